"""Execution of a layer's mechanism: over whole rows, or in decoding from a cache.

A cache is the state of a recurrence, or `KeyValues` of score mechanisms.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from symjax import attention, config
from symjax.attention.core.operands import repeat_noise, signal_keys
from symjax.layers.parts.part import Sizes
from symjax.layers.sharded import Operand, per_device, time_axis
from symjax.layers.validate import SHARED, gated_sizes, mechanism_options, sizes

SMALLEST_READ = 256  # keys of the shortest part of a cache that is read
OF_KEYS = ("BSK", "BTK")  # axes of operands with an entry per key head
CHUNK_OPTIONS = ("chunk_size", "group_size")  # options that a step of one token lacks


class KeyValues(NamedTuple):
    """Decoding state of score mechanisms: cached keys and values, and forget gates.

    The keys are None if they are made from the values (`Mixer.keys_from_values`).
    """

    key: Float[Array, "B L K H"] | None
    value: Float[Array, "B L K V"]
    log_decay: Float[Array, "B L K"] | None = None


@dataclass(frozen=True)
class Mixer:
    """Mechanism of a layer, with its options.

    Attributes:
        mechanism: a name in `MECHANISMS`.
        options: (name, value) of each option of the mechanism.
        dtype: dtype in which the layer computes, and of its cache.
        differential: none, v1 or v2.
        alibi: whether scores have the bias of ALiBi.
        keys_from_values: whether a cache holds values alone, from which keys are made
            (model.attention.symmetric kv or qkv).
        causal: whether tokens see only earlier tokens and themselves.
        signals: number of heads of differential V1 that subtract the same noise map;
            otherwise 1.
    """

    mechanism: str
    options: tuple[tuple[str, Any], ...]
    sizes: Sizes
    causal: bool
    dtype: Any
    differential: str = "none"
    alibi: bool = False
    keys_from_values: bool = False
    signals: int = 1

    @property
    def entry(self) -> attention.Mechanism:
        return attention.MECHANISMS[self.mechanism]

    @property
    def without_implementation(self) -> "Mixer":
        """The mixer without the option `implementation`, which decoding ignores."""
        options = tuple(x for x in self.options if x[0] != "implementation")
        return replace(self, options=options)

    @property
    def mechanism_sizes(self) -> Sizes:
        """Sizes of the arrays that the mechanism gets.

        Score mechanisms get one noise head for all heads that share it. Recurrences get
        a copy of it for each of these heads, each with its own state.
        """
        shares = self.signals == 1 or self.entry.implementations
        return self.sizes if shares else self.sizes.repeat_noise()

    def __call__(self, operands: dict[str, Operand]) -> Float[Array, "B T N V"]:
        """Return the output of attention per head, before any norm.

        If a mesh splits the tokens of a row, causal mechanisms exchange states or keys
        between devices. Encoders gather the tokens.
        """
        options, length = dict(self.options), operands["query"].array.shape[1]
        function = self.entry.attend
        if self.causal and self.entry.causal is not None:
            function = self.entry.causal
        elif self.causal:
            options["is_causal"] = True
        if not self.entry.keys:
            function = _without_key(function)
        group = options.get("group_size", 1)  # tokens that stay on one device
        axis = time_axis(length, group) if self.causal else None
        if axis is not None:  # the mesh axis splits keys as it splits queries
            options["axis_name"] = axis
            operands = {
                name: operand._replace(axes=operand.axes.replace("S", "T"))
                for name, operand in operands.items()
            }
        return self._run(function, options, operands, "BTN", axis)

    def init_cache(
        self,
        batch: int,
        length: int,
        *,
        head_size: int | None = None,
        forgets: bool = False,
        **arrays,
    ) -> Any:
        """Return the decoding state before the first of at most `length` tokens.

        Args:
            head_size: size of keys after a learned feature map of the layer, if there
                is one.
            forgets: whether scores have forget gates, whose log-decays are cached.
            arrays: other arguments of the mechanism's empty state.
        """
        size = head_size or self.sizes.head_size
        keys, value_size = self.mechanism_sizes.keys, self.sizes.value_size
        if self.entry.state is None:
            values = (batch, length, self.sizes.kv_heads, value_size)
            shape = batch, length, keys, size
            has_keys = not self.keys_from_values
            key = jnp.zeros(shape, self.dtype) if has_keys else None
            log_decay = jnp.zeros((batch, length, keys)) if forgets else None
            return KeyValues(key, jnp.zeros(values, self.dtype), log_decay)
        options = dict(self.without_implementation.options) | arrays
        options.pop("chunk_size", None)
        # The two query heads of V2 read one state; V1 has a state for each branch.
        shape = batch, keys, size, value_size
        return self.entry.state(*shape, dtype=self.dtype, **options)

    def decode(
        self,
        operands: dict[str, Operand],
        cache: Any,
        position: Int[Array, "B"],
        padding_mask: Bool[Array, "B T"] | None = None,
        keys_of: Callable[[Array], Array] | None = None,
    ) -> tuple[Float[Array, "B T N V"], Any]:
        """Read the next T tokens of each example; return (output per head, new cache).

        Args:
            position: number of tokens that each example has read.
            padding_mask: True for tokens, False for padding, which comes after them in
                the row (`generate` moves it there). By default there is no padding.
            keys_of: with `keys_from_values`, the function from cached values to keys.
        Raises:
            ValueError: more tokens than fit the cache.
        """
        if self.entry.state is None:
            arguments = position, padding_mask, keys_of
            return self._decode_scores(operands, cache, *arguments)
        axes = "BK" if self.sizes.keys > 1 else "B"
        operands = operands | {"state": Operand(cache, axes)}
        options = dict(self.without_implementation.options)
        if operands["query"].array.shape[1] == 1 and padding_mask is None:
            function = _state_first(self.entry.step)
            options = {x: y for x, y in options.items() if x not in CHUNK_OPTIONS}
        else:
            function, options["return_state"] = self.entry.causal, True
            if padding_mask is not None:
                operands["mask"] = Operand(padding_mask[:, None, None], "B")
        if not self.entry.keys:
            function = _without_key(function)
        return self._run(function, options, operands, ("BTN", axes))

    def _decode_scores(
        self,
        operands: dict[str, Operand],
        cache: KeyValues,
        position: Array,
        padding_mask: Array | None,
        keys_of: Any,
    ) -> tuple[Array, KeyValues]:
        """Write keys and values to the cache and attend to the cache.

        Entries of the cache after the last token are empty or hold padding, until the
        next tokens overwrite them. The argument `positions` of the mechanism hides from
        each row all entries after its own position.

        A step reads the shortest beginning of the cache that holds all written keys:
        the whole, a half, a quarter and so on, but not fewer than 256 keys. A bias has
        one value per entry of the cache.
        """
        count, room = operands["query"].array.shape[1], cache.value.shape[1]
        check_room(room, f"a cache of {room}", position, count, padding_mask)
        positions = position[:, None] + jnp.arange(count)[None]
        key = cache.key
        if key is not None:
            key = write(key, operands["key"].array, positions)
        value = write(cache.value, operands["value"].array, positions)
        options = {**dict(self.without_implementation.options), "is_causal": True}
        log_decay = cache.log_decay
        if log_decay is not None:
            log_decay = write(log_decay, operands["log_decay"].array, positions)

        def attend(size: int) -> Array:
            values = value[:, :size]
            cached = {
                "key": Operand(
                    keys_of(values) if key is None else key[:, :size], "BSK"
                ),
                "value": Operand(values, "BSK"),
                "positions": Operand(positions, "B"),
            }
            if log_decay is not None:
                cached["log_decay"] = Operand(log_decay[:, :size], "BSK")
            if "bias" in operands:
                bias = operands["bias"]
                cached["bias"] = bias._replace(array=bias.array[..., :size])
            return self._run(self.entry.attend, options, operands | cached, "BTN")

        prefixes = _prefixes(room)
        index = jnp.searchsorted(jnp.array(prefixes), positions.max() + 1)
        mixed = jax.lax.switch(index, [partial(attend, size) for size in prefixes])
        return mixed, KeyValues(key, value, log_decay)

    def _run(
        self,
        function: Any,
        options: dict[str, Any],
        operands: dict[str, Operand],
        output: Any,
        axis: str | None = None,
    ) -> Any:
        """Call `function` for all heads, with differential maps and ALiBi if chosen."""
        if self.mechanism_sizes is not self.sizes:
            mixer, operands = self.repeat_noise(operands)
            return mixer._run(function, options, operands, output, axis)
        operands = self._with_alibi(operands)
        if self.differential == "v1":
            branches = {"attend": function, "signals": self.signals}
            function = partial(attention.differential, **branches)
        elif self.differential == "v2":
            function = partial(attention.differential_v2, attend=function)
        return per_device(partial(function, **options), operands, output, time=axis)

    def _with_alibi(self, operands: dict[str, Operand]) -> dict[str, Operand]:
        """Return a copy of the operands, with the slopes of ALiBi if it is chosen."""
        if not self.alibi:
            return dict(operands)
        slopes = attention.alibi_slopes(self.sizes.head_groups)
        return operands | {"alibi": Operand(slopes, "N")}

    def repeat_noise(
        self, operands: dict[str, Operand]
    ) -> tuple["Mixer", dict[str, Operand]]:
        """Return a mixer and operands that have a noise head for each signal head.

        They compute the same output by differential attention without shared maps.
        """
        keys = signal_keys(self.sizes.keys, self.sizes.kv_heads)
        operands = self._with_alibi(operands)
        for name, operand in list(operands.items()):
            if name == "query" or (operand.axes in OF_KEYS and name != "value"):
                signals = self.signals if name == "query" else keys
                paired = repeat_noise(operand.array, signals)
                operands[name] = operand._replace(array=paired)
            elif operand.axes == "K":
                paired = repeat_noise(operand.array, keys, axis=0)
                operands[name] = operand._replace(array=paired)
            elif operand.axes in ("N", "BN") or name == "length_scale":
                axis = operand.axes.index("N")
                repeat = partial(jnp.repeat, repeats=self.signals, axis=axis)
                repeated = jax.tree.map(repeat, operand.array)
                operands[name] = operand._replace(array=repeated)
        sizes = self.sizes.repeat_noise()
        return replace(self, sizes=sizes, signals=1, alibi=False), operands


def mixer_of(options: config.Model, depth: int) -> Mixer:
    """Return the mechanism of the block at `depth`, its options and its sizes.

    Raises:
        ValueError: choices that exclude each other, naming both.
    """
    mechanism = config.mechanism_of(options, depth)
    chosen = mechanism_options(options, depth)
    gated = attention.MECHANISMS[mechanism].gated
    mixer = Mixer(
        mechanism,
        chosen,
        gated_sizes(options) if gated else sizes(options),
        config.is_causal(options),
        jnp.dtype(options.dtype),
    )
    if gated:  # options of heads are for the other layers of model.pattern
        return mixer
    return replace(
        mixer,
        differential=options.attention.differential,
        alibi=options.positions == "alibi",
        keys_from_values=options.attention.symmetric in SHARED,
        signals=options.attention.signals,
    )


def _without_key(attend: Any) -> Callable:
    """Return `attend` of a mechanism without keys as a function that ignores a key."""

    def run(query, key, value, **options) -> Any:
        return attend(query, value, **options)

    return run


def _state_first(step: Any) -> Callable:
    """Return a mechanism's step with the arguments of its causal form."""

    def run(*arrays, state, **options) -> Any:
        return step(state, *arrays, **options)

    return run


def _prefixes(room: int) -> list[int]:
    """Return the lengths of a cache that may be read: …, a quarter, half, all."""
    lengths = [room]
    while (half := -(-lengths[0] // 2)) >= SMALLEST_READ:
        lengths.insert(0, half)
    return lengths


def check_room(
    room: int,
    room_name: str,
    position: Int[Array, "B"],
    count: int,
    padding_mask: Bool[Array, "B T"] | None,
) -> None:
    """Raise if more tokens come than fit.

    Under `jax.jit` only `count` is compared with `room`, and only without a padding
    mask.

    Args:
        room: number of tokens that fit.
        room_name: words for the error message: "a cache of 512".
        position: number of tokens that each example has read.
        count: number of new tokens, padding included.
        padding_mask: True for new tokens that exist. By default all exist.
    Raises:
        ValueError: more tokens than fit, naming both numbers.
    """
    needed = position + (count if padding_mask is None else padding_mask.sum(axis=1))
    least = count if padding_mask is None else 0
    if not isinstance(needed, Tracer):
        least = max(needed.tolist(), default=0)
    if least > room:
        raise ValueError(f"{least} tokens do not fit {room_name}")


def write(
    cache: Float[Array, "B L *rest"],
    new: Float[Array, "B T *rest"],
    positions: Int[Array, "B T"],
) -> Float[Array, "B L *rest"]:
    """Write `new` to the cache at the positions of each example.

    Positions beyond the end are dropped: padding at the end of a prompt needs no room.
    """
    examples = jnp.arange(cache.shape[0])[:, None]
    return cache.at[examples, positions].set(new.astype(cache.dtype), mode="drop")
