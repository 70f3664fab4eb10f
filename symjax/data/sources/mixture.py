"""Several sources in one corpus, each with its share of the training rows.

Their tokens follow each other in the file. Which of them a row is cut from depends on
its number and the seed alone, so a run resumes by its step.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from symjax import config
from symjax.data.order import visited

PERIOD = 1000  # rows in which the shares are kept exactly, to a row
NEAR = 0.1  # of a share, by which the rows may miss it without a word
NAMES = {"text": "path", "hub": "name"}  # the key that an entry of a mixture stands for


class Part(NamedTuple):
    """One source of a corpus."""

    share: float  # of the rows; all add up to 1
    start: int  # its first training token
    stop: int


def entries(options: config.Data) -> list[tuple[float, config.Data]]:
    """The sources of `data.mixture`, each with its share; without it the one source.

    Raises:
        ValueError: an entry is no SOURCE:WEIGHT, a weight is not positive, a source
            is given twice, or one is given beside the mixture.
    """
    if not options.mixture:
        return [(1.0, options)]
    key, found, places = NAMES[options.source], {}, set()
    where = f"data.mixture {options.mixture!r}"
    if getattr(options, key):
        raise ValueError(f"{where}: leave data.{key} {getattr(options, key)!r} empty")
    for entry in options.mixture.split(","):
        name, _, number = entry.strip().rpartition(":")
        place = os.path.realpath(os.path.expanduser(name))  # of the hub too: unique
        if not name or place in places:
            why = "is given twice" if name else "is no SOURCE:WEIGHT"
            raise ValueError(f"{where}: {entry.strip()!r} {why}")
        found[name] = _weight(number, where)
        places.add(place)
    total = sum(found.values())
    if counts([weight / total for weight in found.values()]).min() < 1:
        raise ValueError(f"{where}: {len(found)} are too many for {PERIOD} rows")
    return [
        (weight / total, dataclasses.replace(options, mixture="", **{key: name}))
        for name, weight in found.items()
    ]


def key_of(source: str) -> str:
    """What a user changes to have another text: data.path, data.source=stdlib."""
    return f"data.{NAMES[source]}" if source in NAMES else f"data.source={source}"


def rounded(options: config.Data) -> list[str]:
    """A line for each source whose share of the rows is not about what was asked."""
    if not options.mixture:
        return []
    shares, parts = zip(*entries(options), strict=True)
    rows = zip(parts, shares, counts(shares), strict=True)
    return [
        f"data.mixture: {getattr(part, NAMES[part.source])} is {count} of {PERIOD} "
        f"rows, for a share of {share:.2g}"
        for part, share, count in rows
        if abs(count / PERIOD / share - 1) > NEAR
    ]


def _weight(number: str, where: str) -> float:
    try:
        weight = float(number)
    except ValueError:
        weight = 0.0
    if not 0 < weight < math.inf:
        raise ValueError(f"{where}: a weight is a number above 0, got {number!r}")
    return weight


def counts(shares: Sequence[float]) -> np.ndarray:
    """Rows of each of PERIOD rows, at least 1; the largest remainders get the rest."""
    exact = np.array(shares) * PERIOD
    rows = np.maximum(np.floor(exact), 1).astype(np.int64)
    order = np.argsort(rows - exact, kind="stable")
    rows[order[: max(0, PERIOD - rows.sum())]] += 1
    rows[np.argmax(rows)] += PERIOD - rows.sum()
    return rows


def assigned(
    shares: Sequence[float], numbers: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """The source of each row, and the number of the row among those of that source.

    Args:
        numbers: int64 [B], from the first row of the first step.
    """
    rows = counts(shares)
    edges = np.cumsum(rows)
    place = visited(PERIOD, numbers, seed)[0].astype(np.int64)
    source = np.searchsorted(edges, place, side="right")
    rank = place - (edges - rows)[source]
    return source, numbers // PERIOD * rows[source] + rank
