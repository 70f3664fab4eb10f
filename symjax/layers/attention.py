"""The attention layer: four independent choices, one module."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from symjax import attention, config
from symjax.attention.masks import visible_pairs
from symjax.layers.linear import Linear
from symjax.layers.norms import norm
from symjax.layers.sharded import per_device

# Keys of config.Attention that a mechanism may or may not take as an option.
OPTIONS = ("length_base", "mask_self", "features", "chunk_size", "implementation")


class Lambda(nnx.Param):
    """A learned λ vector; stored with the weights, never decayed."""


class Constant(nnx.Variable):
    """An array that is stored with the weights and never optimised."""


class Cache(NamedTuple):
    """The decoding state of score mechanisms: the keys and values seen so far."""

    key: Float[Array, "B L K H"]
    value: Float[Array, "B L K V"]


class Attention(nnx.Module):
    """Causal self-attention with any mechanism, kind of key and combination of maps.

    With differential V1 a head has two branches of size width/2N, values of twice
    that size, and an RMSNorm of its output times 1 − λ_init.

    Args:
        options: the model's configuration.
        depth: of this layer, counted from 0.
    Raises:
        ValueError: choices that exclude each other, naming both.
    """

    def __init__(self, options: config.Model, depth: int, *, rngs: nnx.Rngs):
        chosen = options.attention
        self.mechanism = chosen.mechanism
        self.symmetric = chosen.symmetric
        self.differential = chosen.differential
        self.key_norm = None if chosen.key_norm == "none" else chosen.key_norm
        self.rope_base = options.rope_base if options.positions == "rope" else None
        self.mask_self = chosen.mask_self
        self.options = tuple(_options(chosen).items())  # hashable, as jit needs
        self.dtype = jnp.dtype(options.dtype)
        self.heads, self.kv_heads, self.branches, self.head_size = _sizes(options)
        self.value_size = self.head_size * self.branches
        queries = self.heads * self.branches

        def linear(inputs: int, outputs: int) -> Linear:
            return Linear(
                inputs, outputs, use_bias=options.bias, dtype=self.dtype, rngs=rngs
            )

        self.query = linear(options.width, queries * self.head_size)
        if self.symmetric == "none":
            keys = self.kv_heads * self.branches
            self.key = linear(options.width, keys * self.head_size)
        elif self.symmetric == "pairwise":
            shape = (queries, self.head_size, self.head_size)
            draw = nnx.initializers.normal(self.head_size**-0.5)
            self.metric = nnx.Param(draw(rngs.params(), shape))
        self.value = linear(options.width, self.kv_heads * self.value_size)
        self.out = linear(self.heads * self.value_size, options.width)
        if chosen.query_key_norm:
            shared = {"dtype": self.dtype, "rngs": rngs}
            self.query_norm = norm("rmsnorm", self.head_size, **shared)
            if self.symmetric == "none":
                self.own_key_norm = norm("rmsnorm", self.head_size, **shared)
        self.query_key_norm = chosen.query_key_norm
        if self.differential == "v1":
            self._add_lambda(depth + chosen.depth_offset, rngs)
        if "projection" in attention.MECHANISMS[self.mechanism].options():
            self.projection = Constant(
                attention.orthogonal_projection(
                    rngs.params(), chosen.feature_count, self.head_size
                )
            )
        if chosen.features:
            try:
                jax.eval_shape(lambda: self.empty(1, 1))
            except ValueError as error:
                raise ValueError(f"model.attention.features: {error}") from None

    def _add_lambda(self, depth: int, rngs: nnx.Rngs) -> None:
        self.lambda_initial = attention.lambda_initial(depth)
        draw = nnx.initializers.normal(0.1)

        def vector() -> Lambda:
            return Lambda(draw(rngs.params(), (self.head_size,)))

        self.lambda_query_1, self.lambda_key_1 = vector(), vector()
        self.lambda_query_2, self.lambda_key_2 = vector(), vector()
        self.head_norm = norm("rmsnorm", self.value_size, dtype=self.dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Every token attends to itself and to those before it."""
        query, key, value = self._project(x, jnp.arange(x.shape[1])[None])
        form = attention.MECHANISMS[self.mechanism]
        if form.causal is None:
            options = {**dict(self.options), "is_causal": True}
            mixed = self._attend(form.attend, query, key, value, options)
        else:
            mixed = self._attend(form.causal, query, key, value, dict(self.options))
        return self._output(mixed)

    def empty(self, batch: int, length: int) -> Any:
        """The decoding state before the first token; `length` bounds a cache."""
        form = attention.MECHANISMS[self.mechanism]
        keys = self.kv_heads * self.branches
        if form.state is None:
            return Cache(
                jnp.zeros((batch, length, keys, self.head_size), self.dtype),
                jnp.zeros((batch, length, self.kv_heads, self.value_size), self.dtype),
            )
        return form.state(
            batch, keys, self.head_size, self.value_size, **self._options_of("state")
        )

    def extend(
        self, x: Float[Array, "B T D"], state: Any, position: Int[Array, ""]
    ) -> tuple[Float[Array, "B T D"], Any]:
        """The next T tokens, the first at `position`: (output, new state)."""
        positions = position + jnp.arange(x.shape[1])
        query, key, value = self._project(x, positions[None])
        form = attention.MECHANISMS[self.mechanism]
        if form.step is None or form.causal is None:
            state = Cache(
                _write(state.key, key, position), _write(state.value, value, position)
            )
            visible = visible_pairs(
                positions,
                jnp.arange(state.key.shape[1]),
                is_causal=True,
                mask_self=self.mask_self,
            )
            options = {**dict(self.options), "mask_self": False, "mask": visible}
            mixed = self._attend(form.attend, query, state.key, state.value, options)
        elif x.shape[1] == 1:
            step = partial(form.step, state)
            options = self._options_of("step")
            mixed, state = self._attend(step, query, key, value, options)
        else:
            options = {**dict(self.options), "state": state, "return_state": True}
            mixed, state = self._attend(form.causal, query, key, value, options)
        return self._output(mixed), state

    def _project(self, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        """Queries, keys and values of every (sub-)head, rotated where they are."""
        query = self._split(self.query(x), self.head_size)
        value = self._split(self.value(x), self.value_size)
        if self.query_key_norm:
            query = self.query_norm(query)
        if self.symmetric == "none":
            key = self._split(self.key(x), self.head_size)
            if self.query_key_norm:
                key = self.own_key_norm(key)
        else:
            metric = self.metric[...] if self.symmetric == "pairwise" else None
            key = attention.symmetric_key(query, metric, normalise=self.key_norm)
        if self.rope_base is not None:
            query = attention.rotate(query, positions, self.rope_base)
            key = attention.rotate(key, positions, self.rope_base)
        return query, key, value

    def _attend(
        self, function: Callable, query: Array, key: Array, value: Array, options: dict
    ) -> Any:
        """`function` over all heads; over both branches where heads have two."""
        arrays = {}
        if self.differential == "v1":
            arrays["lam"] = self.lam()
        if hasattr(self, "projection"):
            arrays["projection"] = self.projection[...]

        def run(query, key, value, lam=None, **arrays) -> Any:
            if lam is None:
                return function(query, key, value, **options, **arrays)
            return attention.differential(
                query, key, value, lam, attend=function, **options, **arrays
            )

        return per_device(run, query, key, value, arrays)

    def _options_of(self, form: str) -> dict[str, Any]:
        """The options that another form of the mechanism takes."""
        names = attention.MECHANISMS[self.mechanism].options(form)
        options = dict(self.options)
        if form == "state" and hasattr(self, "projection"):
            options["projection"] = self.projection[...]
        return {name: x for name, x in options.items() if name in names}

    def lam(self) -> Float[Array, ""]:
        """λ of a differential layer as it stands."""
        return attention.differential_lambda(
            self.lambda_query_1[...],
            self.lambda_key_1[...],
            self.lambda_query_2[...],
            self.lambda_key_2[...],
            self.lambda_initial,
        )

    def _output(self, mixed: Float[Array, "B T N V"]) -> Float[Array, "B T D"]:
        if self.differential == "v1":
            mixed = self.head_norm(mixed) * (1 - self.lambda_initial)
        return self.out(mixed.reshape(*mixed.shape[:2], -1))

    @staticmethod
    def _split(x: Array, size: int) -> Array:
        return x.reshape(*x.shape[:2], -1, size)


def _write(cache: Array, new: Array, position: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(cache, new, position, axis=1)


def _sizes(options: config.Model) -> tuple[int, int, int, int]:
    """(heads, key/value heads, branches, head size), checked against each other."""
    heads = options.heads
    kv_heads = options.kv_heads or heads
    branches = 2 if options.attention.differential == "v1" else 1
    if heads % kv_heads:
        raise ValueError(f"model.kv_heads {kv_heads} must divide model.heads {heads}")
    if options.attention.symmetric != "none" and kv_heads != heads:
        raise ValueError(
            f"model.attention.symmetric {options.attention.symmetric!r} makes one key "
            f"a query head: model.kv_heads {kv_heads} must equal model.heads {heads}"
        )
    if not options.head_size and options.width % (heads * branches):
        raise ValueError(
            f"model.width {options.width} must be a multiple of model.heads {heads}"
            + (" times 2 branches" if branches == 2 else "")
            + ", or give model.head_size"
        )
    size = options.head_size or options.width // (heads * branches)
    if options.positions == "rope" and size % 2:
        raise ValueError(
            f"model.positions 'rope' turns pairs of features: head size {size} is odd, "
            "give an even model.head_size"
        )
    return heads, kv_heads, branches, size


def _options(chosen: config.Attention) -> dict[str, Any]:
    """The mechanism's options, those at their "off" value left out.

    Raises:
        ValueError: an option is set that the mechanism does not have.
    """
    known = attention.MECHANISMS[chosen.mechanism].options()
    defaults = config.Attention()
    options = {}
    for name in OPTIONS:
        value = getattr(chosen, name)
        if name not in known and value != getattr(defaults, name):
            raise ValueError(
                f"model.attention.{name} {value!r}: {chosen.mechanism} has no such "
                "option"
            )
        if name in known and value not in ("", 0):
            options[name] = value
    if "projection" not in known and chosen.feature_count != defaults.feature_count:
        raise ValueError(
            f"model.attention.feature_count {chosen.feature_count}: "
            f"{chosen.mechanism} has no random features"
        )
    if chosen.length_base == 1:
        raise ValueError("model.attention.length_base must be 0 (off) or above 1")
    if chosen.key_norm != "none" and chosen.symmetric == "none":
        raise ValueError(
            f"model.attention.key_norm {chosen.key_norm!r} is of symmetric keys: "
            "model.attention.symmetric is 'none'"
        )
    if chosen.depth_offset and chosen.differential == "none":
        raise ValueError(
            f"model.attention.depth_offset {chosen.depth_offset} is of differential "
            "attention: model.attention.differential is 'none'"
        )
    return options
