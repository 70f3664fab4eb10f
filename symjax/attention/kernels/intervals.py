"""The keys that rows may see, as intervals, and the blocks that a kernel must visit.

Causality, a window and segments leave each row an interval of keys; a padding mask
takes keys out of all rows, and `mask_self` a row's own. Everything here is O(T + S),
but for a comparison of rows with blocks of keys.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped


class Seen(NamedTuple):
    """Which keys each row sees; b is 1 where all examples are alike."""

    rows: Int[Array, "b 3 T"]  # the first key, the one after the last, its own or −1
    keys: Int[Array, "b S"] | None  # each key's position, −1 where it is hidden
    first: Int[Array, ""]  # the position of row 0

    def positions(self, length: int) -> Int[Array, "b 1 length"] | None:
        """Of keys, with hidden ones up to `length`."""
        if self.keys is None:
            return None
        filling = ((0, 0), (0, length - self.keys.shape[1]))
        return jnp.pad(self.keys, filling, constant_values=-1)[:, None]


def seen_by_rows(
    length: int,
    keys: int,
    *,
    first: int | Int[Array, ""],
    left: int | None,
    right: int | None,
    mask_self: bool,
    mask: Bool[Array, "b S"] | None,
    runs: Int[Array, "b S"] | None,
) -> tuple[Seen, Int[Array, "b T"]]:
    """The intervals of `length` rows from position `first` on, and how many keys each
    row sees.

    Args:
        left, right: how many keys before and after its own position a row may see.
        mask: the keys that exist.
        runs: the number of each key's segment, non-decreasing.
    """
    position = first + jnp.arange(length, dtype=jnp.int32)[None]
    begin = jnp.zeros_like(position) if left is None else position - left
    end = jnp.full_like(position, keys) if right is None else position + right + 1
    begin, end = jnp.clip(begin, 0, keys), jnp.clip(end, 0, keys)
    if runs is not None:
        start, stop = (
            jax.lax.dynamic_slice_in_dim(x, first, length, 1) for x in _extents(runs)
        )
        begin, end = jnp.maximum(begin, start), jnp.minimum(end, stop)
    own, count = jnp.full_like(begin, -1), jnp.maximum(end - begin, 0)
    if mask is not None:
        total = jnp.cumsum(jnp.pad(mask, ((0, 0), (1, 0))), axis=1, dtype=jnp.int32)
        begin, end = (jnp.broadcast_to(x, (mask.shape[0], length)) for x in (begin, end))
        upto, before = (jnp.take_along_axis(total, x, axis=1) for x in (end, begin))
        count = jnp.maximum(upto - before, 0)
    if mask_self:
        sees = (begin <= position) & (position < end)
        if mask is not None:
            sees &= mask[:, jnp.clip(position[0], 0, keys - 1)]
        hides = sees & (count > 1)
        own, count = jnp.where(hides, position, -1), count - hides
    shape = jnp.broadcast_shapes(begin.shape, own.shape)
    rows = jnp.stack([jnp.broadcast_to(x, shape) for x in (begin, end, own)], axis=1)
    positions = None
    if mask is not None:
        positions = jnp.where(mask, jnp.arange(keys, dtype=jnp.int32)[None], -1)
    return Seen(rows, positions, jnp.asarray(first, jnp.int32)), count


def _extents(runs: Int[Array, "b S"]) -> tuple[Array, Array]:
    """Where the run of each token begins, and where the next one does."""
    index = jnp.arange(runs.shape[1], dtype=jnp.int32)[None]
    change = runs[:, 1:] != runs[:, :-1]
    start = jnp.where(jnp.pad(change, ((0, 0), (1, 0))), index, 0)
    stop = jnp.where(jnp.pad(change, ((0, 0), (0, 1))), index + 1, runs.shape[1])
    return jax.lax.cummax(start, axis=1), jax.lax.cummin(stop, axis=1, reverse=True)


def blocks_of_rows(
    seen: Seen, keys: int, rows: int, count: int, size: int
) -> Int[Array, "b 4 count"]:
    """For each of `count` blocks of `rows` rows the blocks of `size` keys it visits.

    Four bounds: the first block, the first and the last of those in which every row
    sees every key, the last one.
    """
    begin, end, own = (_cut(x, rows, count) for x in jnp.moveaxis(seen.rows, 1, 0))
    low, high = begin.min(-1), end.max(-1)
    whole_low = begin.max(-1)
    whole_high = jnp.minimum(end, jnp.where(own < 0, keys, own)).min(-1)
    if seen.keys is not None:
        index, hidden = jnp.arange(keys)[None], seen.keys < 0
        first = jnp.where(hidden, keys, index).min(axis=1, keepdims=True)
        last = jnp.where(hidden, 0, index + 1).max(axis=1, keepdims=True)
        gap = jnp.where(hidden & (index > first), index, keys)
        low, high = jnp.maximum(low, first), jnp.minimum(high, last)
        whole_low = jnp.maximum(whole_low, first)
        whole_high = jnp.minimum(whole_high, gap.min(axis=1, keepdims=True))
    return _bounds(low, high, whole_low, whole_high, size)


def blocks_of_keys(
    seen: Seen, keys: int, rows: int, size: int
) -> Int[Array, "b 4 blocks"]:
    """For each block of `size` keys the blocks of `rows` rows that visit it."""
    begin, end, own = (x[:, None] for x in jnp.moveaxis(seen.rows, 1, 0))
    start = (jnp.arange(-(-keys // size)) * size)[None, :, None]
    stop = start + size
    index = jnp.arange(begin.shape[-1])[None, None]
    sees = (end > start) & (begin < stop) & (begin < end)
    low = jnp.where(sees, index, index.size).min(-1)
    high = jnp.where(sees, index + 1, 0).max(-1)
    # begin and end grow with the row: all of a block is seen from where its last key
    # is until its first is no more, and not by rows that hide one of its keys
    hides = (own >= start) & (own < stop)
    whole_low = jnp.where((end < stop) | hides, index + 1, 0).max(-1)
    whole_high = (begin <= start).sum(-1)
    if seen.keys is not None:
        exists = _cut(seen.keys >= 0, size, -(-keys // size))
        high = jnp.where(exists.any(-1), high, low)
        whole_high = jnp.where(exists.all(-1), whole_high, whole_low)
    return _bounds(low, high, whole_low, whole_high, rows)


def _cut(x: Shaped[Array, "b T"], size: int, count: int) -> Shaped[Array, "b c size"]:
    """Blocks of equal size, filled up with the last element."""
    filling = ((0, 0), (0, size * count - x.shape[1]))
    return jnp.pad(x, filling, "edge").reshape(x.shape[0], count, size)


def _bounds(low, high, whole_low, whole_high, size: int) -> Int[Array, "b 4 blocks"]:
    first = low // size
    last = jnp.where(low < high, -(-high // size), first)
    whole = jnp.clip(-(-whole_low // size), first, last)
    rest = jnp.clip(whole_high // size, whole, last)
    return jnp.stack(jnp.broadcast_arrays(first, whole, rest, last), axis=1)
