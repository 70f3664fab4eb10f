"""Counter-based random numbers: pure functions of the seed, row, attempt and call."""

import numpy as np


def mix(value: np.ndarray) -> np.ndarray:
    """Mix the bits of uint64 numbers by splitmix64, which is one-to-one.

    Source: Steele, Lea and Flood 2014.
    """
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class Draws:
    """Random numbers of rows. Rows are independent, and so are successive calls.

    Args:
        seed: any integer.
        rows: int64 [B]; equal numbers get equal draws.
        attempt: number of the attempt; each gets other draws for all rows.
    """

    def __init__(self, seed: int, rows: np.ndarray, attempt: int = 0):
        start = mix(np.full(1, int(seed) % 2**64, np.uint64))
        start = mix(start ^ np.uint64(attempt))
        self._keys = mix(start ^ np.asarray(rows).astype(np.uint64))
        self._calls = 0

    def bits(self, columns: int) -> np.ndarray:
        """Random bits uint64 [B, columns]."""
        self._calls += 1
        keys = mix(self._keys ^ mix(np.full(1, self._calls, np.uint64)))
        return mix(keys[:, None] + np.arange(1, columns + 1, dtype=np.uint64))

    def below(self, bound: int, columns: int) -> np.ndarray:
        """Integers [B, columns] from 0 to bound − 1."""
        return (self.bits(columns) % np.uint64(bound)).astype(np.int64)

    def uniform(self, columns: int) -> np.ndarray:
        """Numbers [B, columns] in [0, 1)."""
        return (self.bits(columns) >> np.uint64(11)) * 2.0**-53

    def distinct(self, bound: int, columns: int) -> np.ndarray:
        """Integers [B, columns] from 0 to bound − 1, different within a row."""
        return np.argsort(self.bits(bound), axis=1, kind="stable")[:, :columns]
