"""n-gram baselines: held-out cross-entropy of unigram, bigram and trigram tables."""

from __future__ import annotations

import math

import numpy as np

ORDERS = {"unigram": 1, "bigram": 2, "trigram": 3}
PSEUDO_COUNT = 0.01
COUNTED = 1 << 23  # tokens of a text at most, else a sample of it: 64 MB of codes
STRETCHES = 16  # of a sample, spread evenly


def cross_entropies(
    train: np.ndarray, heldout: np.ndarray, vocabulary: int
) -> dict[str, float]:
    """Held-out cross-entropy of add-0.01 n-grams, in nats per token.

    p(c | context) = (count(context c) + 0.01) / (count(context) + 0.01 vocabulary)

    Counted on train, averaged over the held-out tokens that have a whole context.
    Of more than `COUNTED` tokens a sample is taken. Time O(T log T); memory grows with
    the distinct n-grams of train, not with vocabulary³.

    Args:
        train, heldout: token ids [T], each in [0, vocabulary).
    Returns:
        The figure for each of "unigram", "bigram", "trigram".
    Raises:
        ValueError: train or held-out has fewer than three tokens.
    """
    longest = max(ORDERS.values())
    for split, tokens in (("training", train), ("held-out", heldout)):
        if len(tokens) < longest:
            raise ValueError(
                f"data.source has {len(tokens)} tokens of {split} text, at least "
                f"{longest} are needed: give a longer text"
            )
    train, heldout = _sample(train), _sample(heldout)
    return {
        name: _cross_entropy(train, heldout, order, vocabulary)
        for name, order in ORDERS.items()
    }


def _sample(tokens: np.ndarray) -> np.ndarray:
    """At most `COUNTED` tokens."""
    if len(tokens) <= COUNTED:
        return tokens
    size = COUNTED // STRETCHES
    starts = [n * (len(tokens) - size) // (STRETCHES - 1) for n in range(STRETCHES)]
    return np.concatenate([tokens[start : start + size] for start in starts])


def _cross_entropy(
    train: np.ndarray, heldout: np.ndarray, order: int, vocabulary: int
) -> float:
    codes, counts = _count(train, order, vocabulary)
    contexts, first = np.unique(codes // vocabulary, return_index=True)
    context_counts = np.add.reduceat(counts, first)

    scored, repeats = _count(heldout, order, vocabulary)
    seen = _look_up(codes, counts, scored) + PSEUDO_COUNT
    total = _look_up(contexts, context_counts, scored // vocabulary)
    nats = np.log(total + PSEUDO_COUNT * vocabulary) - np.log(seen)
    return math.fsum(nats * repeats) / int(repeats.sum())


def _count(
    tokens: np.ndarray, order: int, vocabulary: int
) -> tuple[np.ndarray, np.ndarray]:
    """The distinct n-grams as sorted codes (base-vocabulary numbers), and how often.

    vocabulary³ stays below 2⁶³ for any alphabet, since Unicode has 1,114,112 points.
    """
    codes = np.zeros(len(tokens) - order + 1, np.int64)
    for offset in range(order):
        codes *= vocabulary
        codes += tokens[offset : offset + len(codes)]
    return np.unique(codes, return_counts=True)


def _look_up(codes: np.ndarray, counts: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The count of each wanted code, 0 where it was never seen."""
    where = np.searchsorted(codes, wanted).clip(max=len(codes) - 1)
    return np.where(codes[where] == wanted, counts[where], 0)
