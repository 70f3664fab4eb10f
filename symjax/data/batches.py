"""Windows of tokens as a pure function of (seed, step).

No state: resuming a run needs one integer, any step costs the same, and a process can
ask for its own rows of the global batch only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import numpy as np

from symjax.data.draws import mix
from symjax.data.packed import Packed

Tokens = np.ndarray | Packed
Shape = tuple[int, int]  # rows, tokens a row
# (start, stop) → some rows of a batch, [stop − start, length] each: inputs and targets
# int32 and, where rows are judged, weights float32
Rows = Callable[[int, int], tuple[np.ndarray, ...]]

ROUNDS = 4  # a Feistel network of four rounds is a pseudo-random permutation


def batch(
    tokens: Tokens,
    *,
    length: int,
    batch_size: int,
    seed: int,
    step: int,
    start: int = 0,
    stop: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Rows [start, stop) of the training batch of one step.

    The text is cut into windows of length + 1 tokens, each starting `length` after the
    one before, so that every token is a target once an epoch (short of two windows at
    the ends). An epoch visits every window once, in a pseudo-random order; each epoch
    has its own order and its own shift of the cuts. Batches run across epoch ends.

    Time O(rows · length), whatever the step. Any `seed` of 64 bits.

    Returns:
        inputs and targets, int32 [rows, length]; targets are inputs one token later.
    Raises:
        ValueError: the text is shorter than one window.
    """
    check_length(tokens, length, "training")
    stop = batch_size if stop is None else stop
    total = len(tokens) - 1
    # One window fewer than would fit, so that there is room for any shift below length.
    windows = max(1, total // length - 1)
    shifts = min(length, total - windows * length + 1)

    row = int(step) * batch_size + np.arange(start, stop, dtype=np.int64)
    window, key = visited(windows, row, seed)
    shift = key % np.uint64(shifts)
    return _cut((window * np.uint64(length) + shift).astype(np.int64), tokens, length)


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


def heldout_batches(
    tokens: Tokens,
    *,
    length: int,
    batch_size: int,
    count: int | None = None,
) -> Iterator[Rows]:
    """`count` batches spread evenly over the held-out text, in order; None: all of it.

    Windows follow each other as in `batch`, without shuffling or shift, so every token
    but the first is a target exactly once. All batches have the same shape: weights are
    0 where the text has ended (the end of the last window, and rows after it). The
    mean loss is Σ weights · loss / Σ weights over all batches.

    Returns:
        for each batch a function of (start, stop), since one of several processes reads
        only its rows: inputs and targets, int32 [rows, length], and weights, float32
        [rows, length].
    Raises:
        ValueError: the text is shorter than one window.
    """
    check_length(tokens, length, "held-out")
    chosen = spread(heldout_count(tokens, length, batch_size), count)

    def rows(index: int, start: int, stop: int):
        number = index * batch_size + np.arange(start, stop, dtype=np.int64)
        return _weighted(number * length, tokens, length)

    return (functools.partial(rows, index) for index in chosen)


def spread(available: int, count: int | None) -> list[int]:
    """`count` of the available batches, evenly over all, in order; None: every one."""
    count = available if count is None else min(count, available)
    return [number * available // count for number in range(count)]


def heldout_count(tokens: Tokens, length: int, batch_size: int) -> int:
    """Batches that cover the held-out text."""
    return math.ceil((len(tokens) - 1) / (length * batch_size))


def check_length(
    tokens: Tokens, length: int, split: str, key: str = "data.path"
) -> None:
    """Refuse a text shorter than one window.

    Raises:
        ValueError: naming both sizes.
    """
    if length < 1:
        raise ValueError(f"model.length must be at least 1, got {length}")
    if len(tokens) < length + 1:
        raise ValueError(
            f"{key} has {len(tokens)} tokens of {split} text, model.length + 1 = "
            f"{length + 1} are needed: give a longer text or a smaller model.length"
        )


def _cut(
    starts: np.ndarray, tokens: Tokens, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """The windows that begin at starts [B]; beyond the end the last token repeats."""
    windows = np.empty((len(starts), length + 1), np.int32)
    for window, start in zip(windows, starts.tolist(), strict=True):
        found = tokens[start : start + length + 1]
        window[: len(found)] = found
        if len(found) <= length:
            window[len(found) :] = tokens[len(tokens) - 1 : len(tokens)]
    return windows[:, :-1], windows[:, 1:]


def _weighted(
    starts: np.ndarray, tokens: Tokens, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    inputs, targets = _cut(starts, tokens, length)
    target = starts[:, None] + np.arange(1, length + 1)
    return inputs, targets, (target < len(tokens)).astype(np.float32)


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
