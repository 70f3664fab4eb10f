"""Rows of batches: windows of the packed text, chosen by the numbers of the rows.

Training rows are numbered from 0 on. With B rows a batch, step s (from 0) has the rows
s · B to (s + 1) · B − 1. Each row is a pure function of its number and the seed, so a
resumed run needs only its step, and each process reads only its own rows.

`Examples` makes the rows of a run. `training_windows` and `heldout_windows` make the
rows of a text.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from symjax.data.corpus import Corpus, check_length
from symjax.data.documents import Ends, with_segment_ids
from symjax.data.shuffle import shuffled
from symjax.data.sources.mixture import MixturePart, assign_rows
from symjax.data.store.packed import PackedArray
from symjax.data.store.stream import GrowingArray, Stream
from symjax.data.tokens import Tokenizer

TokenArray = np.ndarray | PackedArray | GrowingArray
Shape = tuple[int, int]  # rows per batch, tokens per row
# (start, stop) → these rows of one batch: inputs (an array or `SegmentedTokens`),
# targets int32 and, for held-out rows, weights float32.
ReadRows = Callable[[int, int], tuple[Any, ...]]

ENDLESS_BATCHES = 32  # held-out batches of generated tasks, which have no end


@dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """Training rows and held-out rows of a run, and facts about them.

    Attributes:
        read_training: (numbers [B], length, seed) → inputs and targets of training
            rows. Numbers count from the first row of the first step. Targets below 0
            are left out of the loss.
        read_heldout: (numbers [B], length) → inputs, targets and weights of held-out
            rows. The mean loss is Σ weights · loss / Σ weights over all rows. Weights
            are 0 after the end of the held-out text.
        heldout_rows: length → number of rows that cover the held-out text; None if
            held-out rows have no end.
        check_length: raises a ValueError if there are no rows of this length.
        vocabulary: number of token types; 0 for images.
        unit: name of one target, such as byte, character, answer or label; losses are
            nats per unit.
        size: phrase for messages that gives the amount of training data, such as
            "1,000 training tokens".
        language: a dict of plain values that describe the tokens. A checkpoint keeps
            it, and `examples.tokenizer_of` makes the tokenizer from it.
            "document_start" is the token before every document, from which the first
            token of the document is predicted; texts that older versions packed have
            no such token. The key "bos" exists if all documents and prompts begin with
            that token.
        fingerprint: plain values that identify the examples; one is "sha256".
        references: losses of baselines without a model, by name.
        files: the open files.
        stream: the process that packs the text; None if the text is packed.
        tokenizer: the tokenizer of the inputs; None if inputs are no text.
        text: the text that a decoder learns to continue. None if targets are answers
            (labels, masked tokens, answers of a task); accuracy is reported then.
        separate: whether inputs are `SegmentedTokens`, in which a token sees only its
            own document.
        longest: tokens of the longest held-out row; None if any length is possible.
        fixed_length: whether the length belongs to the task, so that rows cannot be
            shortened.
        labels: names of the classes.
        image: height, width and channels of image inputs; None for tokens.
    """

    read_training: Callable[[np.ndarray, int, int], tuple[Any, ...]]
    read_heldout: Callable[[np.ndarray, int], tuple[Any, ...]]
    heldout_rows: Callable[[int], int] | None = None
    check_length: Callable[[int], None]
    vocabulary: int
    unit: str
    size: str
    language: dict[str, Any]
    fingerprint: dict[str, Any]
    references: dict[str, float]
    files: tuple[PackedArray, ...] = ()
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

    def batch_reader(self, shape: Shape, *, seed: int, step: int) -> ReadRows:
        """Return a function (start, stop) → rows start … stop − 1 of a training batch.

        Args:
            shape: rows per batch, and tokens per row.
            step: number of steps before this batch.
        """
        return lambda start, stop: self.read_training(
            _row_numbers(shape, step, start, stop), shape[1], seed
        )

    def heldout_batches(
        self, shape: Shape, count: int | None = None
    ) -> Iterator[ReadRows]:
        """Return an iterator of functions of (start, stop), one per held-out batch.

        Each function returns inputs, targets and weights of these rows. All batches
        have the same shape.

        Args:
            count: number of batches, spread evenly over the held-out rows; None for all
                batches. If held-out rows have no end, their first batches are used.
        """
        total = self.heldout_count(shape)
        count = total if count is None else min(count, total)
        endless = self.heldout_rows is None
        chosen = [n if endless else n * total // count for n in range(count)]

        def rows(index: int, start: int, stop: int) -> tuple[Any, ...]:
            return self.read_heldout(_row_numbers(shape, index, start, stop), shape[1])

        return (functools.partial(rows, index) for index in chosen)

    def heldout_count(self, shape: Shape) -> int:
        """Number of held-out batches; `ENDLESS_BATCHES` if the rows have no end."""
        if self.heldout_rows is None:
            return ENDLESS_BATCHES
        return math.ceil(self.heldout_rows(shape[1]) / shape[0])

    def vanished(self) -> str:
        """Return a line if open files were deleted or replaced on disk; else ""."""
        gone = [str(file) for file in self.files if file.vanished]
        if not gone:
            return ""
        return (
            f"{' and '.join(gone)} was deleted or replaced: this run continues with "
            "the file that it opened; the next run needs the file or its source"
        )


def _row_numbers(shape: Shape, index: int, start: int, stop: int) -> np.ndarray:
    """Numbers int64 [stop − start] of the rows from start to stop of batch `index`."""
    return int(index) * shape[0] + np.arange(start, stop, dtype=np.int64)


def training_windows(
    tokens: TokenArray,
    numbers: np.ndarray,
    length: int,
    seed: int,
    *,
    ends: Ends | None = None,
    shared: bool = False,
    parts: Sequence[MixturePart] = (),
    shard: int = 0,
) -> tuple[Any, np.ndarray]:
    """Inputs and targets of rows of a training text.

    The text is cut into windows of length + 1 tokens, which begin `length` tokens
    apart. An epoch shows every window once, in a pseudo-random order. Each epoch has
    its own order, and its own shift of the cuts. A batch may begin in one epoch and end
    in the next. Every token is a target once per epoch, except

    - the tokens of up to two windows at the ends of the text (of each source of a
      mixture, of each shard of a stream);
    - the first token of each document if documents are separate, unless the separator
      is `shared`: then the separator predicts the first token of the next document.

    Args:
        numbers: int64 [B], counted from the first row of the first step.
        seed: any integer; its last 64 bits count.
        ends: the place after the last token of each document; None to join documents.
        shared: one separator token belongs to two documents: see `with_segment_ids`.
        parts: the sources of a mixture. Each has its own windows and epochs, and its
            share of the rows.
        shard: tokens per shard of a stream (see `shard_starts`); 0 for other texts.
    Returns:
        int32 [B, length] each; targets are the inputs one token later. With `ends`, the
        result of `with_segment_ids` for these inputs and targets.
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
        source, number_in_source = assign_rows(shares, numbers, seed)
        for index, (_, start, stop) in enumerate(parts):
            rows = source == index
            size, number = stop - start, number_in_source[rows]
            starts[rows] = start + window_starts(size, number, length, seed + index)
    inputs, targets = _cut_windows(starts, tokens, length)
    if ends is None:
        return inputs, targets
    return with_segment_ids(starts, inputs, targets, ends, shared=shared)


def windows_in(size: int, length: int) -> int:
    """Number of windows of length + 1 tokens per epoch of a text of `size` tokens.

    It is one less than fit into the text, but at least 1: `window_starts` shifts all
    windows of an epoch by the same 0 to `length` − 1 tokens, and no window may end
    beyond the text.
    """
    return max(1, (size - 1) // length - 1)


def window_starts(size: int, numbers: np.ndarray, length: int, seed: int) -> np.ndarray:
    """Places int64 [B] of the first tokens of rows, in a text of `size` tokens."""
    windows = windows_in(size, length)
    shifts = min(length, size - windows * length)
    window, key = shuffled(windows, numbers, seed)
    shift = key % np.uint64(shifts)
    return (window * np.uint64(length) + shift).astype(np.int64)


def shard_starts(
    tokens: TokenArray, numbers: np.ndarray, length: int, seed: int, shard: int
) -> np.ndarray:
    """Places int64 [B] of the first tokens of rows, in a text made of shards.

    An epoch goes through the shards in order, and through the windows of each shard in
    a pseudo-random order. The place of a row does not depend on how many shards are
    packed. If the shards of these rows are not packed yet, this function waits for
    them.

    Args:
        shard: tokens per shard; the last shard may be shorter.
    """
    per_shard = windows_in(shard, length)
    last = int(numbers.max()) // per_shard
    growing = isinstance(tokens, GrowingArray)
    size = tokens.stream.wait_for((last + 1) * shard) if growing else len(tokens)
    whole, rest = divmod(size, shard)
    tail = windows_in(rest, length) if rest > length else 0
    if last < whole:  # later shards may not be packed yet
        epoch, place = np.zeros_like(numbers), numbers
    else:
        epoch, place = np.divmod(numbers, whole * per_shard + tail)
    starts, shards = np.empty(len(numbers), np.int64), place // per_shard
    for index in np.unique(shards).tolist():
        rows = shards == index
        full = index < whole
        size, windows = (shard, per_shard) if full else (rest, tail)
        number = epoch[rows] * windows + place[rows] - index * per_shard
        starts[rows] = index * shard + window_starts(size, number, length, seed + index)
    return starts


def heldout_windows(
    tokens: TokenArray,
    numbers: np.ndarray,
    length: int,
    *,
    ends: Ends | None = None,
    shared: bool = False,
) -> tuple[Any, np.ndarray, np.ndarray]:
    """Return inputs, targets and weights of rows of a held-out text.

    Windows are cut as in training, without shuffling or shift. Every token is a target
    once, except the first token of the text. If documents are separate and `shared` is
    False, the first token of each document is no target either. Weights (float32) are 0
    after the end of the text and where there is no target, else 1.

    Args:
        ends, shared: as in `training_windows`.
    Raises:
        ValueError: the text is shorter than one window.
    """
    check_length(tokens, length, "held-out")
    inputs, targets, weights = weighted_windows(numbers * length, tokens, length)
    if ends is None:
        return inputs, targets, weights
    starts = numbers * length
    rows, targets = with_segment_ids(starts, inputs, targets, ends, shared=shared)
    return rows, targets, weights * (targets >= 0)


def _cut_windows(
    starts: np.ndarray, tokens: TokenArray, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets int32 [B, length] of the windows that begin at starts [B].

    After the end of the text its last token is repeated.
    """
    windows = np.empty((len(starts), length + 1), np.int32)
    for window, start in zip(windows, starts.tolist(), strict=True):
        found = tokens[start : start + length + 1]
        window[: len(found)] = found
        if len(found) <= length:
            window[len(found) :] = tokens[len(tokens) - 1 : len(tokens)]
    return windows[:, :-1], windows[:, 1:]


def weighted_windows(
    starts: np.ndarray, tokens: TokenArray, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, targets and weights of the windows that begin at starts [B].

    Weights are 0 after the end of the text, else 1.
    """
    inputs, targets = _cut_windows(starts, tokens, length)
    places = starts[:, None] + np.arange(1, length + 1)
    return inputs, targets, (places < len(tokens)).astype(np.float32)
