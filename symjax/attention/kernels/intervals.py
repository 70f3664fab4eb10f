"""Intervals of keys that rows may see, and the blocks that a kernel has to visit.

Causality, a window and segments leave each row an interval of keys. A padding mask
hides keys from all rows, and `mask_self` hides the key at a row's own position.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int


class RowIntervals(NamedTuple):
    """Keys that each row sees, as intervals; b is 1 if all examples are alike."""

    # The first key, the key after the last, and the row's own key if it is hidden,
    # else −1.
    rows: Int[Array, "b 3 T"]
    exists: Bool[Array, "b S"] | None  # keys that are not hidden
    first: Int[Array, ""]  # the position of row 0


def seen_by_rows(
    length: int,
    keys: int,
    first: int | Int[Array, ""],
    *,
    left: int | None,
    right: int | None,
    mask_self: bool,
    exists: Bool[Array, "b S"] | None,
    runs: Int[Array, "b S"] | None,
) -> tuple[RowIntervals, Int[Array, "b T"]]:
    """Return the keys that rows see, and the number of keys of each row.

    The rows are `length` rows from position `first` on. Time O(T + S).

    Args:
        left, right: number of keys before and after its position that a row may see;
            None if there is no limit.
        mask_self: hide a row's own key, except from rows that see no other key.
        exists: whether each key is visible; None if all are.
        runs: the number of each key's segment, non-decreasing; None for one segment.
    """
    position = (first + jnp.arange(length, dtype=jnp.int32))[None]
    begin = jnp.zeros_like(position) if left is None else position - left
    end = jnp.full_like(position, keys) if right is None else position + right + 1
    begin, end = jnp.clip(begin, 0, keys), jnp.clip(end, 0, keys)
    if runs is not None:
        start, stop = (
            jax.lax.dynamic_slice_in_dim(x, first, length, 1) for x in _extents(runs)
        )
        begin, end = jnp.maximum(begin, start), jnp.minimum(end, stop)
    count, own = jnp.maximum(end - begin, 0), jnp.full_like(begin, -1)
    sees_itself = (begin <= position) & (position < end)
    if exists is not None:
        exists = jnp.asarray(exists)
        total = jnp.cumsum(jnp.pad(exists, ((0, 0), (1, 0))), axis=1, dtype=jnp.int32)
        b = max(exists.shape[0], begin.shape[0])
        total, begin, end = (
            jnp.broadcast_to(x, (b, x.shape[1])) for x in (total, begin, end)
        )
        until, before = (jnp.take_along_axis(total, x, axis=1) for x in (end, begin))
        count = jnp.maximum(until - before, 0)
        sees_itself &= exists[:, jnp.clip(position[0], 0, keys - 1)]
    if mask_self:
        hides = sees_itself & (count > 1)
        own, count = jnp.where(hides, position, -1), count - hides
    rows = jnp.stack(jnp.broadcast_arrays(begin, end, own), axis=1)
    return RowIntervals(rows, exists, jnp.asarray(first, jnp.int32)), count


def pairs_in_window(length: int, keys: int, left: int | None, right: int | None) -> int:
    """Return the number of pairs of a row and a key that a window leaves visible.

    The last row is at the position of the last key.
    """
    position = np.arange(keys - length, keys)
    begin = np.zeros_like(position) if left is None else position - left
    end = np.full_like(position, keys) if right is None else position + right + 1
    seen = np.clip(end, 0, keys) - np.clip(begin, 0, keys)
    return int(np.maximum(seen, 0).sum())


def _extents(runs: Int[Array, "b S"]) -> tuple[Array, Array]:
    """Return for each token the start of its segment, and of the next segment."""
    index = jnp.arange(runs.shape[1], dtype=jnp.int32)[None]
    change = runs[:, 1:] != runs[:, :-1]
    start = jnp.where(jnp.pad(change, ((0, 0), (1, 0))), index, 0)
    stop = jnp.where(jnp.pad(change, ((0, 0), (0, 1))), index + 1, runs.shape[1])
    return jax.lax.cummax(start, axis=1), jax.lax.cummin(stop, axis=1, reverse=True)


def blocks_of_rows(
    intervals: RowIntervals, keys: int, rows: int, size: int
) -> Int[Array, "b 4 blocks"]:
    """Return the blocks of `size` keys that each block of `rows` rows visits.

    Returns:
        Four block numbers: the first block to visit; the first block that all rows see
        whole, and the one after the last of these; the one after the last to visit.
    """
    filling = ((0, 0), (0, 0), (0, -intervals.rows.shape[2] % rows))
    cut = jnp.pad(intervals.rows, filling, "edge")
    begin, end, own = jnp.moveaxis(cut.reshape(*cut.shape[:2], -1, rows), 1, 0)
    low, high, whole_low = begin.min(-1), end.max(-1), begin.max(-1)
    whole_high = jnp.minimum(end, jnp.where(own < 0, keys, own)).min(-1)
    if intervals.exists is not None:
        index, exists = jnp.arange(keys)[None], intervals.exists
        start = jnp.where(exists, index, keys).min(axis=1, keepdims=True)
        stop = jnp.where(exists, index + 1, 0).max(axis=1, keepdims=True)
        gap = jnp.where(~exists & (index > start), index, keys)
        low, high = jnp.maximum(low, start), jnp.minimum(high, stop)
        whole_low = jnp.maximum(whole_low, start)
        whole_high = jnp.minimum(whole_high, gap.min(axis=1, keepdims=True))
    return _in_blocks(low, high, whole_low, whole_high, size, keys)


def blocks_of_keys(
    intervals: RowIntervals, keys: int, rows: int, size: int
) -> Int[Array, "b 4 blocks"]:
    """Return the blocks of `rows` rows that visit each block of `size` keys.

    The four block numbers are as in `blocks_of_rows`. Time O(T S / size).
    """
    begin, end, own = (x[:, None] for x in jnp.moveaxis(intervals.rows, 1, 0))
    count, index = -(-keys // size), jnp.arange(begin.shape[-1])[None, None]
    start = (jnp.arange(count) * size)[None, :, None]
    stop = start + size
    sees = (end > start) & (begin < stop) & (begin < end)
    low = jnp.where(sees, index, index.size).min(-1)
    high = jnp.where(sees, index + 1, 0).max(-1)
    # `begin` and `end` do not decrease from row to row. So the rows that see a block
    # whole start where `end` passes its last key, and stop where `begin` passes its
    # first key. Rows that hide one of its keys are excluded.
    part = (end < stop) | (own >= start) & (own < stop)
    whole_low = jnp.where(part, index + 1, 0).max(-1)
    whole_high = (begin <= start).sum(-1)
    if intervals.exists is not None:
        filling = ((0, 0), (0, count * size - keys))
        exists = jnp.pad(intervals.exists, filling).reshape(-1, count, size)
        high = jnp.where(exists.any(-1), high, low)
        whole_high = jnp.where(exists.all(-1), whole_high, whole_low)
    return _in_blocks(low, high, whole_low, whole_high, rows, index.size)


def _in_blocks(
    low, high, whole_low, whole_high, size: int, length: int
) -> Int[Array, "b 4 blocks"]:
    # If no block is visited, `low` may be `length`. A kernel loads block `first` even
    # then, so that block has to exist.
    first = jnp.minimum(low, length - 1) // size
    last = jnp.where(low < high, -(-high // size), first)
    start = jnp.clip(-(-whole_low // size), first, last)
    stop = jnp.clip(whole_high // size, start, last)
    return jnp.stack(jnp.broadcast_arrays(first, start, stop, last), axis=1)
