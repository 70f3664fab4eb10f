"""How a layer runs its mechanism: over whole rows, or token by token with a cache."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from symjax import attention, config
from symjax.layers.parts.part import Sizes
from symjax.layers.sharded import Operand, per_device, time_axis
from symjax.layers.validate import gated_sizes, mechanism_options, sizes

SMALLEST_PART = 256  # of a cache
PIECES = ("chunk_size", "group_size")  # how time is cut; a step has one token


class KeyValues(NamedTuple):
    """The decoding state of score mechanisms: the keys and values seen so far."""

    key: Float[Array, "B L K H"]
    value: Float[Array, "B L K V"]


@dataclass(frozen=True)
class Mixer:
    """A mechanism with its options, over the heads of a layer.

    Attributes:
        options: of the mechanism, as (name, value): hashable, as jit needs.
        differential: how the maps of two branches combine: none, v1 or v2.
        alibi: a bias of scores that grows with distance.
        dtype: of cached keys and values.
    """

    mechanism: str
    options: tuple[tuple[str, Any], ...]
    sizes: Sizes
    causal: bool
    dtype: Any
    differential: str = "none"
    alibi: bool = False

    @property
    def form(self) -> attention.Mechanism:
        return attention.MECHANISMS[self.mechanism]

    def __call__(self, operands: dict[str, Operand]) -> Float[Array, "B T N V"]:
        """The output of attention for every head, before any norm.

        Where a mesh splits the tokens of a row, an encoder gathers them.
        """
        options, length = dict(self.options), operands["query"].array.shape[1]
        function = self.form.attend if self.form.keys else _of_queries(self.form.attend)
        if self.causal and self.form.causal is not None:
            function = self.form.causal
        elif self.causal:
            options["is_causal"] = True
        group = options.get("group_size", 1)  # tokens that cannot be parted
        axis = time_axis(length, group) if self.causal else None
        if axis is not None:  # keys are a device's own too
            options["axis_name"] = axis
            operands = {
                name: operand._replace(axes=operand.axes.replace("S", "T"))
                for name, operand in operands.items()
            }
        return self._run(function, options, operands, "BTN", axis)

    def init_cache(
        self, batch: int, length: int, *, head_size: int | None = None, **arrays
    ) -> Any:
        """The decoding state before the first token; `length` bounds a cache.

        Args:
            head_size: of keys as the mechanism is given them, where they are mapped.
            arrays: what else its empty state takes.
        """
        size = head_size or self.sizes.head_size
        keys, value_size = self.sizes.keys, self.sizes.value_size
        if self.form.state is None:
            values = (batch, length, self.sizes.kv_heads, value_size)
            key = jnp.zeros((batch, length, keys, size), self.dtype)
            return KeyValues(key, jnp.zeros(values, self.dtype))
        options = {x: value for x, value in self.options if x != "chunk_size"} | arrays
        # V2 reads one state with both query heads; V1 has a state for each branch.
        shape = batch, keys, size, value_size
        return self.form.state(*shape, dtype=self.dtype, **options)

    def decode(
        self,
        operands: dict[str, Operand],
        cache: Any,
        position: Int[Array, "B"],
        padding_mask: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T N V"], Any]:
        """The next T tokens of every example: (output of every head, new cache).

        Args:
            position: how many tokens each example has read.
            padding_mask: True for tokens that exist, the others stand at the end; None:
                all.
        Raises:
            ValueError: more tokens than a cache has places.
        """
        if self.form.state is None:
            return self._read(operands, cache, position, padding_mask)
        axes = "BK" if self.sizes.keys > 1 else "B"
        operands = operands | {"state": Operand(cache, axes)}
        options = dict(self.options)
        if operands["query"].array.shape[1] == 1 and padding_mask is None:
            function = _state_first(self.form.step)
            options = {name: x for name, x in self.options if name not in PIECES}
        else:
            function, options["return_state"] = self.form.causal, True
            if padding_mask is not None:
                operands["mask"] = Operand(padding_mask[:, None, None], "B")
        return self._run(function, options, operands, ("BTN", axes))

    def _read(
        self,
        operands: dict[str, Operand],
        cache: KeyValues,
        position: Array,
        padding_mask: Array | None,
    ) -> tuple[Array, KeyValues]:
        """Entries written for padding are hidden until they are overwritten.

        Of the cache a part is read that holds all that is filled, at most twice that
        or 511 places. What implements attention to whole rows, and may take no
        positions, does not decode.
        """
        count, places = operands["query"].array.shape[1], cache.key.shape[1]
        check_room(places, f"a cache of {places}", position, count, padding_mask)
        positions = position[:, None] + jnp.arange(count)[None]
        key = write(cache.key, operands["key"].array, positions)
        value = write(cache.value, operands["value"].array, positions)
        options = {**dict(self.options), "is_causal": True}
        options.pop("implementation", None)

        def attend(size: int) -> Array:
            read = {
                "key": Operand(key[:, :size], "BSK"),
                "value": Operand(value[:, :size], "BSK"),
                "positions": Operand(positions, "B"),
            }
            return self._run(self.form.attend, options, operands | read, "BTN")

        sizes = _parts(places)
        filled = jnp.searchsorted(jnp.array(sizes), positions.max() + 1)
        mixed = jax.lax.switch(filled, [partial(attend, size) for size in sizes])
        return mixed, KeyValues(key, value)

    def _run(
        self,
        function: Any,
        options: dict[str, Any],
        operands: dict[str, Operand],
        output: Any,
        axis: str | None = None,
    ) -> Any:
        """`function` over all heads, its maps combined as the layer combines them."""

        if self.alibi:
            slopes = attention.alibi_slopes(self.sizes.heads)
            operands = operands | {"alibi": Operand(slopes, "N")}
        if self.differential == "v1":
            function = partial(attention.differential, attend=function)
        elif self.differential == "v2":
            function = partial(attention.differential_v2, attend=function)
        return per_device(partial(function, **options), operands, output, time=axis)


def mixer_of(options: config.Model, depth: int) -> Mixer:
    """Return the mechanism of the block at `depth`, its options and its sizes.

    Raises:
        ValueError: choices that exclude each other, naming both.
    """
    mechanism = config.mechanism_of(options, depth)
    chosen = mechanism_options(options, depth)
    gated = attention.MECHANISMS[mechanism].gated
    return Mixer(
        mechanism,
        chosen,
        gated_sizes(options) if gated else sizes(options),
        config.is_causal(options),
        jnp.dtype(options.dtype),
        options.attention.differential,
        options.positions == "alibi",
    )


def _of_queries(attend: Callable) -> Callable:
    """A function of the queries alone, with the arguments of a mechanism."""

    def run(query, key, value, **options) -> Any:
        return attend(query, value, **options)

    return run


def _state_first(step: Any) -> Callable:
    """A step with the arguments of the causal form."""

    def run(query, key, value, *, state, **options) -> Any:
        return step(state, query=query, key=key, value=value, **options)

    return run


def _parts(places: int) -> list[int]:
    """The parts of a cache that may be read: all, half of it … but not below 256."""
    sizes = [places]
    while (half := -(-sizes[0] // 2)) >= SMALLEST_PART:
        sizes.insert(0, half)
    return sizes


def check_room(
    room: int,
    named: str,
    position: Int[Array, "B"],
    count: int,
    padding_mask: Bool[Array, "B T"] | None,
) -> None:
    """Raise if tokens do not fit, as far as their number is static.

    Under `jax.jit` the number of new tokens is static; how many came before, and which
    of the new ones exist, is not.

    Args:
        room, named: how many tokens fit, and the words that name it.
        position: how many tokens each example has read.
        count, padding_mask: how many come, and which of them exist; None: all.
    Raises:
        ValueError: more tokens than room, naming both.
    """
    needed = position + (count if padding_mask is None else padding_mask.sum(axis=1))
    least = count if padding_mask is None else 0
    if not isinstance(needed, Tracer):
        least = max(needed.tolist(), default=0)
    if least > room:
        raise ValueError(f"{least} tokens do not fit {named}")


def write(
    cache: Float[Array, "B L *rest"],
    new: Float[Array, "B T *rest"],
    positions: Int[Array, "B T"],
) -> Float[Array, "B L *rest"]:
    """`new` at each example's own positions; those beyond the end are dropped.

    A piece may be filled up with tokens that do not exist, and they need no room.
    """
    examples = jnp.arange(cache.shape[0])[:, None]
    return cache.at[examples, positions].set(new.astype(cache.dtype), mode="drop")
