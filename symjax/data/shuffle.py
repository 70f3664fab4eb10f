"""A pseudo-random order of items, different in each epoch, computed without a table."""

from __future__ import annotations

import math

import numpy as np

from symjax.data.draws import mix

ROUNDS = 4  # a Feistel network of four rounds is a pseudo-random permutation


def shuffled(count: int, rows: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the item that each row shows, and a random number for the row's epoch.

    An epoch is `count` rows. It shows every item once, in a pseudo-random order that
    depends on the seed and the epoch.

    Args:
        count: number of items.
        rows: int64 [B], numbered from the first row of the first epoch.
    Returns:
        the items from 0 to count − 1, and the random numbers; both uint64 [B].
    """
    keys = _keys(seed, rows // count)
    place = (rows % count).astype(np.uint64)
    return _permuted(place, count, keys[:ROUNDS]), keys[ROUNDS]


def _permuted(index: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Apply a pseudo-random permutation of [0, size) to each index.

    The permutation is a Feistel network on the cells (left, right) of a rectangle that
    is just large enough for `size` cells. A result outside [0, size) is permuted again
    until it is inside (cycle walking). This keeps the map one-to-one.

    Args:
        index: uint64 [B], below size.
        keys: uint64 [ROUNDS, B]; each column chooses the permutation of its index.
    """
    height = np.uint64(math.isqrt(size - 1) + 1)
    width = np.uint64(-(-size // int(height)))
    walking = np.ones(len(index), bool)
    while walking.any():
        left, right = np.divmod(index, width)
        for pair in range(0, len(keys), 2):
            left = (left + mix(keys[pair] ^ right) % height) % height
            right = (right + mix(keys[pair + 1] ^ left) % width) % width
        index = np.where(walking, left * width + right, index)
        walking = index >= size
    return index


def _keys(seed: int, epoch: np.ndarray) -> np.ndarray:
    """Return independent keys uint64 [ROUNDS + 1, B] of (seed, epoch).

    The last row has the random numbers of the epochs.
    """
    base = mix(np.full(1, int(seed) % 2**64, np.uint64))
    base = mix(base ^ epoch.astype(np.uint64))
    return mix(base + np.arange(1, ROUNDS + 2, dtype=np.uint64)[:, None])
