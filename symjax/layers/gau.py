"""The gated attention unit: one block in place of attention and feed-forward."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from symjax import attention, config
from symjax.attention.masks import visible_pairs
from symjax.layers.cache import KeyValues, check_room, write
from symjax.layers.primitives import Linear, norm, rotary
from symjax.layers.sharded import per_device, time_axis

LARGEST_SIZE = 128  # of queries and keys, unless model.head_size says otherwise
ROLES = {
    "gau": ("query", "key"),
    "flash": ("query", "key", "linear_query", "linear_key"),
}
# Keys of config.Attention that a block takes. The others, and those of config.Model
# that are named here, may be set where other blocks of the model take them.
OWN = {"gau": ("implementation",), "flash": ("chunk_size",)}
FOREIGN = ("kv_heads", "feedforward", "activation")


class Role(nnx.Module):
    """What one use makes of the vector that all uses share: scale · z + bias."""

    def __init__(self, size: int, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        draw = nnx.initializers.normal(0.02)
        self.dtype = dtype
        # Around 1, not 0 as in other codes: scores are seen from the first step on.
        # Held-out loss of configs/gau.py:tiny after 300 steps 1.98, not 2.16.
        self.scale = nnx.Param(1 + draw(rngs.params(), (size,)))
        self.bias = nnx.Param(jnp.zeros((size,)))

    def __call__(self, z: Float[Array, "B T s"]) -> Float[Array, "B T s"]:
        scale, bias = (x[...].astype(self.dtype) for x in (self.scale, self.bias))
        return z * scale[None, None] + bias[None, None]


class GatedBlock(nnx.Module):
    """x + W_o(u ⊙ A v), with u = silu(W_u y), v = silu(W_v y) and y = norm(x).

    A is relu² attention with one head, whatever model.heads says. Its query and key
    are scales and biases of one vector z = silu(W_z y); u and v have twice the width,
    so that two such blocks cost about as much as one of attention and feed-forward.

    gau   every pair; the divisor is model.length, a constant, since a causal model
          may not know how long its text will be, and of an encoder the number of tokens
    flash groups of chunk_size tokens, with linear attention across them from a second
          query and key; both divisors are the size of a group

    Args:
        options: the model's configuration. z has model.head_size features, by default
            half the width, at most 128.
        depth: of this block, counted from 0.
    Raises:
        ValueError: a key is set that the block does not know, by its name.
    Source: Hua et al. 2022, arXiv:2202.10447.
    """

    def __init__(self, options: config.Model, depth: int, *, rngs: nnx.Rngs):
        _check(options)
        self.mechanism = config.mechanism_of(options, depth)
        self.causal = config.is_causal(options)
        self.dtype = jnp.dtype(options.dtype)
        self.size = options.head_size or max(1, min(LARGEST_SIZE, options.width // 2))
        self.hidden = 2 * options.width
        self.rotate = rotary(options, self.size)
        if self.mechanism == "gau":
            implementation = options.attention.implementation
            divisor = options.length if self.causal else "count"
            shared = {"divisor": divisor, "implementation": implementation}
        else:
            shared = {"group_size": options.attention.chunk_size}
        self.options = tuple(shared.items())  # hashable, as jit needs
        layer = {"dtype": self.dtype, "rngs": rngs}
        self.norm = norm(options.norm, options.width, bias=options.bias, **layer)

        def linear(inputs: int, outputs: int) -> Linear:
            return Linear(inputs, outputs, use_bias=options.bias, **layer)

        self.gate = linear(options.width, self.hidden)
        self.value = linear(options.width, self.hidden)
        self.shared = linear(options.width, self.size)
        self.roles = nnx.Dict(
            {role: Role(self.size, **layer) for role in ROLES[self.mechanism]}
        )
        self.out = linear(self.hidden, options.width)
        self.dropout = nnx.Dropout(options.dropout)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        padding_mask: Bool[Array, "B T"] | None = None,
        *,
        dropout_key: Array | None = None,
    ) -> Float[Array, "B T D"]:
        """
        Args:
            padding_mask: True for tokens that exist; the others are seen by none.
                None: all.
            dropout_key: None turns dropout off.
        """
        y = self.norm(x)
        arrays = self.arrays(y, jnp.arange(x.shape[1])[None])
        if padding_mask is not None:
            arrays["mask"] = (padding_mask[:, None, None], "B")
        y = self._output(y, self.mix(arrays))
        return x + self.dropout(y, deterministic=dropout_key is None, rngs=dropout_key)

    def mix(self, arrays: dict[str, tuple[Any, str]]) -> Float[Array, "B T 1 E"]:
        """The values as the head weighs them, before the gate; of `arrays`."""
        options = dict(self.options)
        if self.mechanism == "gau":
            function = partial(attention.gau, is_causal=self.causal, **options)
        else:
            form = attention.flash_causal if self.causal else attention.flash
            function = partial(form, **options)
        length, group = arrays["query"][0].shape[1], options.get("group_size", 1)
        axis = time_axis(length, group) if self.causal else None
        if axis is not None:
            function = partial(function, axis_name=axis)
            arrays = {name: (array, "BT") for name, (array, _) in arrays.items()}
        return per_device(function, arrays, "BT", time=axis)

    def init_cache(self, batch: int, length: int) -> Any:
        """The decoding state before the first of at most `length` tokens."""
        if self.mechanism == "flash":
            sizes = batch, 1, self.size, self.hidden
            return attention.flash_state(*sizes, dtype=self.dtype, **dict(self.options))
        return KeyValues(
            jnp.zeros((batch, length, 1, self.size), self.dtype),
            jnp.zeros((batch, length, 1, self.hidden), self.dtype),
        )

    def decode(
        self,
        x: Float[Array, "B T D"],
        state: Any,
        position: Int[Array, "B"],
        padding_mask: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """The next T tokens of every example from its state: (output, new state).

        Args:
            position: how many tokens each example has read.
            padding_mask: True for tokens that exist, the others stand at the end; None:
                all.
        Raises:
            ValueError: more tokens than the cache of "gau" has places.
        """
        y = self.norm(x)
        positions = position[:, None] + jnp.arange(x.shape[1])[None]
        arrays = self.arrays(y, positions)
        if self.mechanism == "gau":
            places = state.key.shape[1]
            named = f"a cache of {places}"
            check_room(places, named, position, x.shape[1], padding_mask)
            mixed, state = self._read_cache(arrays, state, positions)
        elif x.shape[1] == 1:
            arrays["state"] = (state, "B")
            mixed, after = per_device(attention.flash_step, arrays, ("BT", "B"))
            state = (
                after
                if padding_mask is None
                else _where(padding_mask[:, 0], after, state)
            )
        else:
            arrays["state"] = (state, "B")
            if padding_mask is not None:
                arrays["mask"] = (padding_mask[:, None, None], "B")
            options = {**dict(self.options), "return_state": True}
            function = partial(attention.flash_causal, **options)
            mixed, state = per_device(function, arrays, ("BT", "B"))
        return x + self._output(y, mixed), state

    def _read_cache(
        self, arrays: dict[str, Any], cache: KeyValues, positions: Array
    ) -> tuple[Array, KeyValues]:
        """What tokens that are not there write is hidden until it is overwritten."""
        key = write(cache.key, arrays["key"][0], positions)
        value = write(cache.value, arrays["value"][0], positions)
        visible = visible_pairs(positions, jnp.arange(key.shape[1]), is_causal=True)
        arrays |= {"key": (key, "B"), "value": (value, "B"), "mask": (visible, "B")}
        function = partial(attention.gau, **dict(self.options))
        return per_device(function, arrays, "BT"), KeyValues(key, value)

    def arrays(
        self, y: Float[Array, "B T D"], positions: Int[Array, "#B T"]
    ) -> dict[str, tuple[Any, str]]:
        """All that the attention is given; a device has its own examples."""
        z = jax.nn.silu(self.shared(y))
        arrays: dict[str, tuple[Any, str]] = {
            role: (self.rotate(make(z)[:, :, None], positions), "B")
            for role, make in self.roles.items()
        }
        arrays["value"] = (jax.nn.silu(self.value(y))[:, :, None], "B")
        return arrays

    def _output(self, y: Array, mixed: Float[Array, "B T 1 E"]) -> Array:
        return self.out(jax.nn.silu(self.gate(y)) * mixed[:, :, 0])


def _where(chosen: Bool[Array, " B"], one: Any, other: Any) -> Any:
    """One state or the other for each example."""

    def pick(a: Array, b: Array) -> Array:
        return jnp.where(chosen.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return jax.tree.map(pick, one, other)


def _check(options: config.Model) -> None:
    """Refuse what no block of the model takes."""
    names = options.pattern or (options.attention.mechanism,)
    if options.positions == "alibi":
        raise ValueError(
            "model.positions 'alibi' is a bias of several heads: a gated block has one"
        )
    if not set(names) <= set(OWN):
        return
    if options.attention.implementation == "ring" and "gau" in names:
        raise ValueError(
            "model.attention.implementation 'ring' is of softmax alone: gau takes rows "
            "or whole"
        )
    known = {"mechanism", *(key for name in names for key in OWN[name])}
    foreign = {field.name for field in dataclasses.fields(config.Attention)} - known
    for prefix, found, keys in (
        ("model.", options, FOREIGN),
        ("model.attention.", options.attention, sorted(foreign)),
    ):
        for key in keys:
            value = getattr(found, key)
            if value != getattr(type(found)(), key):
                raise ValueError(
                    f"{prefix}{key} {value!r}: {', '.join(names)} has no such option"
                )
