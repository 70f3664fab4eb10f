"""Training examples: rows, each a pure function of its number.

No state: resuming a run needs one integer, any step costs the same, and a process can
ask for its own rows of the global batch only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from symjax.data.corpus import Corpus, check_length
from symjax.data.documents import Ends, separated
from symjax.data.order import visited
from symjax.data.sources.mixture import Part, assigned
from symjax.data.store.packed import Packed
from symjax.data.store.stream import Growing, Stream
from symjax.data.tokens import Tokenizer

Tokens = np.ndarray | Packed | Growing
Shape = tuple[int, int]  # rows, tokens a row
# (start, stop) → some rows of a batch, [length] each: inputs (`Separate` or an array)
# and targets int32 and, where rows are judged, weights float32
Rows = Callable[[int, int], tuple[Any, ...]]

ENDLESS = 32  # held-out batches of generated examples


@dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """Training rows and held-out rows, and what they say of themselves.

    Attributes:
        train: (numbers [B], length, seed) → inputs and targets of training rows, which
            are numbered from the first row of the first step; targets below 0 are not
            learned.
        heldout: (numbers [B], length) → inputs, targets, and weights: 0 beyond the end.
            The mean loss is Σ weights · loss / Σ weights over all rows.
        heldout_rows: length → how many rows cover what is held out; None: no end.
        check_length: raises a ValueError where there are no rows of a length.
        vocabulary: token types; 0 of images.
        unit: what a loss is a mean over: byte, character, answer or label.
        size: how much there is, in words.
        language: plain values that describe the tokens. "document_start" is the token
            before a document that its first token is predicted from; it is absent
            where nothing is, as in texts that older versions packed. "bos" is there
            where all documents and prompts begin with that token.
        fingerprint: plain values that identify the examples, "sha256" among them.
        references: losses that need no model, by name.
        files: those that are being read.
        stream: what packs them, while it does.
        tokenizer: of the text in the inputs; None where there is no text.
        text: what a decoder learns to continue; None where targets are answers (labels,
            masked tokens, answers of a task), whose accuracy is reported.
        separate: inputs are `Separate`: documents of a row do not see each other.
        longest: tokens of the longest held-out row; None: any number.
        fixed_length: rows cannot be shortened: the length belongs to the task.
        labels: names of the classes.
        image: height, width and channels of the inputs; None of tokens.
    """

    train: Callable[[np.ndarray, int, int], tuple[Any, ...]]
    heldout: Callable[[np.ndarray, int], tuple[Any, ...]]
    heldout_rows: Callable[[int], int] | None = None
    check_length: Callable[[int], None]
    vocabulary: int
    unit: str
    size: str
    language: dict[str, Any]
    fingerprint: dict[str, Any]
    references: dict[str, float]
    files: tuple[Packed, ...] = ()
    stream: Stream | None = None
    tokenizer: Tokenizer | None = None
    text: Corpus | None = None
    separate: bool = False
    longest: int | None = None
    fixed_length: bool = False
    labels: tuple[str, ...] = ()
    image: tuple[int, int, int] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.size}, losses in nats/{self.unit})"

    def batch(self, shape: Shape, *, seed: int, step: int) -> Rows:
        """The training batch of a step."""
        return lambda start, stop: self.train(
            _numbers(shape, step, start, stop), shape[1], seed
        )

    def heldout_batches(self, shape: Shape, count: int | None = None) -> Iterator[Rows]:
        """`count` batches spread evenly over what is held out, in order; None: all.

        All have the same shape. Of examples without an end the first ones.
        """
        total = self.heldout_count(shape)
        count = total if count is None else min(count, total)
        endless = self.heldout_rows is None
        chosen = [n if endless else n * total // count for n in range(count)]

        def rows(index: int, start: int, stop: int) -> tuple[Any, ...]:
            return self.heldout(_numbers(shape, index, start, stop), shape[1])

        return (functools.partial(rows, index) for index in chosen)

    def heldout_count(self, shape: Shape) -> int:
        """Batches that cover what is held out."""
        if self.heldout_rows is None:
            return ENDLESS
        return math.ceil(self.heldout_rows(shape[1]) / shape[0])

    def vanished(self) -> str:
        """One line if files that are being read are gone from their folder, else ""."""
        gone = [str(file) for file in self.files if file.vanished]
        if not gone:
            return ""
        return (
            f"{' and '.join(gone)} was deleted or replaced: this run continues with "
            "what it opened, the next one needs it back or its source"
        )


def _numbers(shape: Shape, index: int, start: int, stop: int) -> np.ndarray:
    """The numbers of the rows [start, stop) of batch `index`."""
    return int(index) * shape[0] + np.arange(start, stop, dtype=np.int64)


def training_windows(
    tokens: Tokens,
    numbers: np.ndarray,
    length: int,
    seed: int,
    *,
    ends: Ends | None = None,
    shared: bool = False,
    parts: Sequence[Part] = (),
    shard: int = 0,
) -> tuple[Any, np.ndarray]:
    """Inputs and targets of rows of a training text.

    The text is cut into windows of length + 1 tokens, each starting `length` after the
    one before, so that every token is a target once an epoch (short of two windows at
    the ends). An epoch visits every window once, in a pseudo-random order; each epoch
    has its own order and its own shift of the cuts. Batches run across epoch ends.

    Time O(rows · length), whatever the numbers. Any `seed` of 64 bits.

    Args:
        numbers: int64 [B], from the first row of the first step.
        ends: of the documents, where they are kept apart.
        shared: whether one separator stands between two documents: see `separated`.
        parts: of the text, each with windows, epochs and a share of the rows of its
            own.
        shard: of a stream, its tokens: see `shard_starts`.
    Returns:
        int32 [B, length]; targets are inputs one token later. With ends the inputs are
        `Separate`, and targets are as `separated` has them.
    Raises:
        ValueError: the text is shorter than one window.
    """
    check_length(tokens, length, "training")
    if shard:
        starts = shard_starts(tokens, numbers, length, seed, shard)
    elif not parts:
        starts = window_starts(len(tokens), numbers, length, seed)
    else:
        starts = np.empty(len(numbers), np.int64)
        shares = [part.share for part in parts]
        source, own = assigned(shares, numbers, seed)
        for index, (_, start, stop) in enumerate(parts):
            mine = source == index
            found = window_starts(stop - start, own[mine], length, seed + index)
            starts[mine] = start + found
    inputs, targets = _cut(starts, tokens, length)
    if ends is None:
        return inputs, targets
    return separated(starts, inputs, targets, ends, shared=shared)


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
    tokens: Tokens, numbers: np.ndarray, length: int, seed: int, shard: int
) -> np.ndarray:
    """Where the windows of rows begin in a text of shards of `shard` tokens, int64 [B].

    An epoch goes through the shards in order, the last one shorter, and through each as
    through a text of its own. Where a row is does not depend on how many shards are
    packed so far; of a text that grows this waits for the shards of these rows.
    """
    each = windows_in(shard, length)
    last = int(numbers.max()) // each
    growing = isinstance(tokens, Growing)
    size = tokens.stream.until((last + 1) * shard) if growing else len(tokens)
    whole, rest = divmod(size, shard)
    tail = windows_in(rest, length) if rest > length else 0
    if last < whole:  # later shards may not be packed yet
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


def heldout_windows(
    tokens: Tokens,
    numbers: np.ndarray,
    length: int,
    *,
    ends: Ends | None = None,
    shared: bool = False,
) -> tuple[Any, np.ndarray, np.ndarray]:
    """Inputs, targets and weights of rows of a held-out text.

    Windows follow each other as in training, without shuffling or shift, so every token
    but the first is a target exactly once. Weights float32 are 0 where the text has
    ended: the end of the last window, and rows after it.

    Args:
        ends, shared: as of `training_windows`.
    Raises:
        ValueError: the text is shorter than one window.
    """
    check_length(tokens, length, "held-out")
    inputs, targets, weights = weighted_windows(numbers * length, tokens, length)
    if ends is None:
        return inputs, targets, weights
    places = numbers * length
    rows, targets = separated(places, inputs, targets, ends, shared=shared)
    return rows, targets, weights * (targets >= 0)


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


def weighted_windows(
    starts: np.ndarray, tokens: Tokens, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, targets and weights of the windows that begin at starts [B]; weights are
    0 beyond the end of the text."""
    inputs, targets = _cut(starts, tokens, length)
    target = starts[:, None] + np.arange(1, length + 1)
    return inputs, targets, (target < len(tokens)).astype(np.float32)
