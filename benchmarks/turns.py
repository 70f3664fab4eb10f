"""Rivals timed in turn, round after round, since another process may slow any moment.

A ratio is the median of those of single rounds; the order turns round every round.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

Times = dict[str, list[float]]


def in_turn(rivals: dict[str, Callable[[], Any]], rounds: int) -> Times:
    """Seconds of each call, by rival and round; a first round is not counted."""
    times: Times = {name: [] for name in rivals}
    names = list(rivals)
    for turn in range(rounds + 1):
        for name in names[:: 1 if turn % 2 else -1]:
            began = time.perf_counter()
            rivals[name]()
            if turn:
                times[name].append(time.perf_counter() - began)
    return times


def ratio(times: Times, one: str, other: str) -> float:
    """The time of one over that of the other."""
    return median(a / b for a, b in zip(times[one], times[other], strict=True))


def milliseconds(times: Times, name: str) -> float:
    return 1000 * median(times[name])
