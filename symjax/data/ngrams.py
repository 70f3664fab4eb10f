"""n-gram baselines: held-out cross-entropy of unigram, bigram and trigram tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

ORDERS = {"unigram": 1, "bigram": 2, "trigram": 3}
LONGEST = max(ORDERS.values())
PSEUDO_COUNT = 0.01
COUNTED = 1 << 23  # targets of a text at most, else a sample of them: 64 MB of codes
STRETCHES = 16  # of a sample, spread evenly


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

    Counted and averaged over the targets of a model of the text: all tokens but the
    first of all, and first tokens of documents only where the model predicts them. A
    context that would begin before its document repeats the document's first input.
    Of more than `COUNTED` targets a sample is taken. Time O(T log T); memory grows with
    the distinct n-grams of train, not with vocabulary³.

    Args:
        train, heldout: token ids [T], each in [0, vocabulary).
        ends: of the documents of "train" and "heldout", where they are kept apart.
        shared: as of `documents.separated`.
        names: of the figures: "unigram", "bigram", "trigram".
    Returns:
        Each figure by its name.
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
    """The targets of a text and their contexts: [n, targets], the nearest first."""
    none = np.empty(0, np.int64)
    edges = none if ends is None else np.asarray(ends[:]) - shared
    parts = (
        _grams_of(tokens, start, stop, edges, shared)
        for start, stop in _stretches(len(tokens))
    )
    return np.concatenate(list(parts), axis=1)


def _stretches(size: int) -> Iterator[tuple[int, int]]:
    """Places of targets of a text of so many tokens: all, or a sample of them."""
    stretch, targets = COUNTED // STRETCHES, size - 1
    if targets <= COUNTED:
        for start in range(1, size, stretch):
            yield start, min(start + stretch, size)
        return
    for number in range(STRETCHES):
        start = 1 + number * (targets - stretch) // (STRETCHES - 1)
        yield start, start + stretch


def _grams_of(
    tokens: np.ndarray, start: int, stop: int, edges: np.ndarray, shared: bool
) -> np.ndarray:
    """The n-grams of the targets from `start` to `stop`.

    Args:
        edges: sorted; the first input of each document but the first one.
    """
    low = max(0, start + 1 - LONGEST)
    text = np.asarray(tokens[low:stop])
    before, upto = np.searchsorted(edges, (start, stop), side="left")
    places = np.arange(start, stop)
    begin = np.zeros(stop - start + 1, np.int64)  # of the documents of the inputs
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
    codes, counts = _count(train, vocabulary)
    contexts, first = np.unique(codes // vocabulary, return_index=True)
    context_counts = np.add.reduceat(counts, first)

    scored, repeats = _count(heldout, vocabulary)
    seen = _look_up(codes, counts, scored) + PSEUDO_COUNT
    total = _look_up(contexts, context_counts, scored // vocabulary)
    nats = np.log(total + PSEUDO_COUNT * vocabulary) - np.log(seen)
    return math.fsum(nats * repeats) / int(repeats.sum())


def _count(grams: np.ndarray, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """The distinct n-grams as sorted codes (base-vocabulary numbers), and how often.

    vocabulary³ stays below 2⁶³ for any alphabet, since Unicode has 1,114,112 points.
    """
    codes = np.zeros(grams.shape[1], np.int64)
    for tokens in grams[::-1]:
        codes *= vocabulary
        codes += tokens
    return np.unique(codes, return_counts=True)


def _look_up(codes: np.ndarray, counts: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The count of each wanted code, 0 where it was never seen."""
    where = np.searchsorted(codes, wanted).clip(max=len(codes) - 1)
    return np.where(codes[where] == wanted, counts[where], 0)
