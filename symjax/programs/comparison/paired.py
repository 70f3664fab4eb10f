"""Differences between two configurations, paired by seed, with their interval.

Runs of one seed share the order of their training data, so part of the noise of a seed
cancels in the difference of two runs. With differences d_i of n seeds, mean d̄ and
standard deviation s (n − 1), the interval of 95 % is

    d̄ ± t s / √n,    t the 97.5 % quantile of Student's distribution, n − 1 degrees

It assumes that the differences are normal. If it excludes 0, the seeds alone explain
the difference in at most 5 % of such comparisons.

Source: Student 1908, "The probable error of a mean", Biometrika 6(1).
"""

import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

from scipy.special import stdtrit

CONFIDENCE = 0.95


class Difference(NamedTuple):
    """Mean difference of two configurations over the seeds that both have.

    Attributes:
        low, high: ends of the interval; None with fewer than two seeds.
        by_seed: the differences.
    """

    mean: float
    low: float | None
    high: float | None
    by_seed: tuple[float, ...]


def paired_difference(
    values: Mapping[int, float | None], reference: Mapping[int, float | None]
) -> Difference | None:
    """Return values − reference; None if no seed has both.

    Args:
        values, reference: a number by seed; None if it is unknown.
    """
    differences = tuple(
        value - other
        for seed, value in values.items()
        if value is not None and (other := reference.get(seed)) is not None
    )
    if not differences:
        return None
    mean, count = statistics.mean(differences), len(differences)
    if count < 2:
        return Difference(mean, None, None, differences)
    quantile = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2))
    half = quantile * statistics.stdev(differences) / math.sqrt(count)
    return Difference(mean, mean - half, mean + half, differences)
