"""Interleaved timing, so that other work on the machine slows all rivals alike.

A round calls each rival once, in an order that is reversed every round. A ratio of two
rivals is the median of the ratios of the rounds.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

Times = dict[str, list[float]]


def in_turn(rivals: dict[str, Callable[[], Any]], rounds: int) -> Times:
    """Return the seconds of each call by rival and round; a first round is left out."""
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
    """Return the time of `one` divided by the time of `other`."""
    return median(a / b for a, b in zip(times[one], times[other], strict=True))


def milliseconds(times: Times, name: str) -> float:
    """Return the median time of a call."""
    return 1000 * median(times[name])
