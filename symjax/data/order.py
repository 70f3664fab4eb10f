"""A pseudo-random order of things, epoch after epoch, without keeping any of it."""

from __future__ import annotations

import math

import numpy as np

from symjax.data.draws import mix

ROUNDS = 4  # a Feistel network of four rounds is a pseudo-random permutation


def visited(count: int, rows: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Which of `count` things each row shows, and a random number of its epoch.

    An epoch shows every thing once, in a pseudo-random order of its own.

    Args:
        rows: int64 [B], numbered from the first row of the first epoch.
    Returns:
        both uint64 [B].
    """
    keys = _keys(seed, rows // count)
    place = (rows % count).astype(np.uint64)
    return _permute(place, count, keys[:ROUNDS]), keys[ROUNDS]


def _permute(index: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Where a pseudo-random permutation of [0, size) sends each index.

    A Feistel network on pairs (left, right) of a rectangle that barely holds `size`
    cells; a result outside is permuted again until it is inside (cycle walking), which
    keeps the map one-to-one.

    Args:
        index: uint64 [B], below size.
        keys: uint64 [ROUNDS, B], the permutation each index is under.
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
    """Independent uint64 keys [ROUNDS + 1, B] of (seed, epoch), the last for shifts."""
    base = mix(np.full(1, int(seed) % 2**64, np.uint64))
    base = mix(base ^ epoch.astype(np.uint64))
    return mix(base + np.arange(1, ROUNDS + 2, dtype=np.uint64)[:, None])
