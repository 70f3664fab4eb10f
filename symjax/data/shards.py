"""Where the rows of a training text begin, in an order that needs no state."""

from __future__ import annotations

from typing import Any

import numpy as np

from symjax.data.order import visited


def windows_in(size: int, length: int) -> int:
    """How many windows of length + 1 tokens an epoch of a text of `size` tokens has.

    One fewer than would fit, so that there is room for any shift below length.
    """
    return max(1, (size - 1) // length - 1)


def window_starts(size: int, numbers: np.ndarray, length: int, seed: int) -> np.ndarray:
    """Where the windows of rows begin in a text of `size` tokens, int64 [B]."""
    windows = windows_in(size, length)
    shifts = min(length, size - windows * length)
    window, key = visited(windows, numbers, seed)
    shift = key % np.uint64(shifts)
    return (window * np.uint64(length) + shift).astype(np.int64)


def shard_starts(
    tokens: Any, numbers: np.ndarray, length: int, seed: int, shard: int
) -> np.ndarray:
    """Where the windows of rows begin in a text of shards of `shard` tokens, int64 [B].

    An epoch goes through the shards in order, the last one shorter, and through each as
    through a text of its own. Where a row is does not depend on how many shards stand.

    Args:
        tokens: `Packed`, or `Growing`, for whose shards this waits.
    """
    each = windows_in(shard, length)
    last = int(numbers.max()) // each
    growing = getattr(tokens, "stream", None)
    size = growing.until((last + 1) * shard) if growing else len(tokens)
    whole, rest = divmod(size, shard)
    tail = windows_in(rest, length) if rest > length else 0
    if last < whole:  # what comes after is not asked for, and may not stand
        epoch, place = np.zeros_like(numbers), numbers
    else:
        epoch, place = np.divmod(numbers, whole * each + tail)
    starts, shards = np.empty(len(numbers), np.int64), place // each
    for index in np.unique(shards).tolist():
        mine = shards == index
        full = index < whole
        own = epoch[mine] * (each if full else tail) + place[mine] - index * each
        found = window_starts(shard if full else rest, own, length, seed + index)
        starts[mine] = index * shard + found
    return starts
