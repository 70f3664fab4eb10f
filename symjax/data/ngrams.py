"""n-gram baselines: held-out cross-entropy of unigram, bigram and trigram tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

ORDERS = {"unigram": 1, "bigram": 2, "trigram": 3}
LONGEST = max(ORDERS.values())
PSEUDO_COUNT = 0.01
COUNTED_TARGETS = 1 << 23  # the most targets that are counted; their codes take 64 MB
RANGES = 16  # ranges of targets in a sample, spread evenly


def cross_entropies(
    train: np.ndarray,
    heldout: np.ndarray,
    vocabulary: int,
    *,
    ends: Mapping[str, np.ndarray] | None = None,
    shared: bool = False,
    names: Iterable[str] = ORDERS,
) -> dict[str, float]:
    """Held-out cross-entropy of add-0.01 n-grams, in nats per token.

    p(c | context) = (count(context c) + 0.01) / (count(context) + 0.01 vocabulary)

    The targets are the tokens that a model of the text has to predict. The training
    targets are counted, and the result is a mean over the held-out targets. The first
    token of the text is no target. If documents are separate, the first token of a
    document is a target only if it follows a shared separator. A context that would
    begin before its document repeats the document's first input. If there are more than
    `COUNTED_TARGETS` targets, a sample of them is taken.

    Time O(T log T). Memory grows with the number of distinct n-grams of train, not with
    vocabulary³.

    Args:
        train, heldout: token ids [T], each in [0, vocabulary).
        ends: the places after the documents of "train" and "heldout"; None if documents
            are joined.
        shared: as in `documents.with_segment_ids`.
        names: the n-grams to compute: "unigram", "bigram", "trigram".
    Returns:
        The cross-entropies by these names.
    Raises:
        ValueError: train or held-out has fewer than three tokens.
    """
    for split, tokens in (("training", train), ("held-out", heldout)):
        if len(tokens) < LONGEST:
            raise ValueError(
                f"data.source has {len(tokens)} tokens of {split} text, at least "
                f"{LONGEST} are needed: give a longer text"
            )
    ends = ends or {}
    known = _grams(train, ends.get("train"), shared)
    asked = _grams(heldout, ends.get("heldout"), shared)
    return {
        name: _cross_entropy(known[: ORDERS[name]], asked[: ORDERS[name]], vocabulary)
        for name in names
    }


def _grams(tokens: np.ndarray, ends: Any, shared: bool) -> np.ndarray:
    """Return [3, targets]: each target and the two tokens before it, nearest first."""
    none = np.empty(0, np.int64)
    edges = none if ends is None else np.asarray(ends[:]) - shared
    parts = (
        _grams_of(tokens, start, stop, edges, shared)
        for start, stop in _target_ranges(len(tokens))
    )
    return np.concatenate(list(parts), axis=1)


def _target_ranges(size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the targets that are counted, in a text of `size` tokens.

    These are all targets, or `RANGES` ranges of them that are spread evenly.
    """
    stretch, targets = COUNTED_TARGETS // RANGES, size - 1
    if targets <= COUNTED_TARGETS:
        for start in range(1, size, stretch):
            yield start, min(start + stretch, size)
        return
    for number in range(RANGES):
        start = 1 + number * (targets - stretch) // (RANGES - 1)
        yield start, start + stretch


def _grams_of(
    tokens: np.ndarray, start: int, stop: int, edges: np.ndarray, shared: bool
) -> np.ndarray:
    """Return the n-grams of the targets from `start` to `stop`.

    Args:
        edges: for each document, the place of the first input of the next one.
    """
    low = max(0, start + 1 - LONGEST)
    text = np.asarray(tokens[low:stop])
    before, upto = np.searchsorted(edges, (start, stop), side="left")
    places = np.arange(start, stop)
    # Where the document begins, for each place from start − 1 to stop − 1.
    begin = np.zeros(stop - start + 1, np.int64)
    begin[0] = edges[before - 1] if before else 0
    begin[edges[before:upto] - start + 1] = edges[before:upto]
    begin = np.maximum.accumulate(begin)
    grams = [places] + [
        np.maximum(places - back, begin[:-1]) for back in range(1, LONGEST)
    ]
    if not shared:  # a first input is no target of the document before
        inside = begin[1:] != places
        grams = [x[inside] for x in grams]
    return np.stack([text[x - low] for x in grams])


def _cross_entropy(train: np.ndarray, heldout: np.ndarray, vocabulary: int) -> float:
    """Cross-entropy in nats of held-out n-grams under counts of training n-grams."""
    codes, counts = _counted(train, vocabulary)
    contexts, first = np.unique(codes // vocabulary, return_index=True)
    context_counts = np.add.reduceat(counts, first)

    scored, repeats = _counted(heldout, vocabulary)
    seen = _count_of(codes, counts, scored) + PSEUDO_COUNT
    total = _count_of(contexts, context_counts, scored // vocabulary)
    nats = np.log(total + PSEUDO_COUNT * vocabulary) - np.log(seen)
    return math.fsum(nats * repeats) / int(repeats.sum())


def _counted(grams: np.ndarray, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct n-grams as sorted codes, and the count of each.

    A code is a number in base `vocabulary`. vocabulary³ stays below 2⁶³ for any
    alphabet, since Unicode has 1,114,112 code points.
    """
    codes = np.zeros(grams.shape[1], np.int64)
    for tokens in grams[::-1]:
        codes *= vocabulary
        codes += tokens
    return np.unique(codes, return_counts=True)


def _count_of(codes: np.ndarray, counts: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the count of each wanted code; 0 if the code was never seen."""
    where = np.searchsorted(codes, wanted).clip(max=len(codes) - 1)
    return np.where(codes[where] == wanted, counts[where], 0)
