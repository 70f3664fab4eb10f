"""Several sources in one corpus, each with a share of the training rows.

The tokens of the sources follow each other in one file. The source of a row depends on
the number of the row and the seed alone, so a run resumes from its step.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from symjax import config
from symjax.data.shuffle import shuffled

PERIOD = 1000  # rows in which each source has its share, rounded to whole rows
TOLERANCE = 0.1  # relative change of a share by rounding, above which a line reports it
ENTRY_KEYS = {"text": "path", "hub": "name"}  # source → key that an entry of it sets


class MixturePart(NamedTuple):
    """One source of a mixture.

    Attributes:
        share: its share of the training rows; all shares add up to 1.
        start, stop: the range of its tokens in the training text.
    """

    share: float
    start: int
    stop: int


def entries(options: config.Data) -> list[tuple[float, config.Data]]:
    """Return the (share, options) of each source of `data.mixture`.

    Without a mixture the single source has the share 1.

    Raises:
        ValueError: an entry is no SOURCE:WEIGHT, a weight is not positive, a source is
            given twice, there are too many sources, or data.path or data.name is set
            too.
    """
    if not options.mixture:
        return [(1.0, options)]
    key, found, places = ENTRY_KEYS[options.source], {}, set()
    where = f"data.mixture {options.mixture!r}"
    if getattr(options, key):
        raise ValueError(f"{where}: leave data.{key} {getattr(options, key)!r} empty")
    for entry in options.mixture.split(","):
        name, _, number = entry.strip().rpartition(":")
        place = os.path.realpath(os.path.expanduser(name))  # equal for equal sources
        if not name or place in places:
            why = "is given twice" if name else "is no SOURCE:WEIGHT"
            raise ValueError(f"{where}: {entry.strip()!r} {why}")
        found[name] = _weight(number, where)
        places.add(place)
    total = sum(found.values())
    if rows_in_period([weight / total for weight in found.values()]).min() < 1:
        raise ValueError(f"{where}: {len(found)} are too many for {PERIOD} rows")
    return [
        (weight / total, dataclasses.replace(options, mixture="", **{key: name}))
        for name, weight in found.items()
    ]


def config_key(source: str) -> str:
    """The configuration key that names a source's text, such as "data.path"."""
    return (
        f"data.{ENTRY_KEYS[source]}"
        if source in ENTRY_KEYS
        else f"data.source={source}"
    )


def rounding_notes(options: config.Data) -> list[str]:
    """Lines about sources whose share of the rows is changed much by rounding."""
    if not options.mixture:
        return []
    shares, parts = zip(*entries(options), strict=True)
    rows = zip(parts, shares, rows_in_period(shares), strict=True)
    return [
        f"data.mixture: {getattr(part, ENTRY_KEYS[part.source])} is {count} of "
        f"{PERIOD} rows, for a share of {share:.2g}"
        for part, share, count in rows
        if abs(count / PERIOD / share - 1) > TOLERANCE
    ]


def _weight(number: str, where: str) -> float:
    try:
        weight = float(number)
    except ValueError:
        weight = 0.0
    if not 0 < weight < math.inf:
        raise ValueError(f"{where}: a weight is a number above 0, got {number!r}")
    return weight


def rows_in_period(shares: Sequence[float]) -> np.ndarray:
    """Number of rows of each source in a period of PERIOD rows, at least 1 each.

    The shares are rounded down. The sources with the largest remainders get one more
    row each, until the period is full.
    """
    exact = np.array(shares) * PERIOD
    rows = np.maximum(np.floor(exact), 1).astype(np.int64)
    order = np.argsort(rows - exact, kind="stable")
    rows[order[: max(0, PERIOD - rows.sum())]] += 1
    rows[np.argmax(rows)] += PERIOD - rows.sum()  # if small shares were rounded up
    return rows


def assign_rows(
    shares: Sequence[float], numbers: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each row, and the number of the row within that source.

    Args:
        numbers: int64 [B], counted from the first row of the first step.
    """
    rows = rows_in_period(shares)
    edges = np.cumsum(rows)
    place = shuffled(PERIOD, numbers, seed)[0].astype(np.int64)
    source = np.searchsorted(edges, place, side="right")
    rank = place - (edges - rows)[source]
    return source, numbers // PERIOD * rows[source] + rank
