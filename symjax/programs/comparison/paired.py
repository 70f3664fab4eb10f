"""Differences between two configurations, paired by seed, with their interval.

Runs of one seed share the order of their training data, so part of the noise of a seed
cancels in the difference of two runs. Let d̄ be the mean of the differences of n seeds,
and s their standard deviation (with divisor n − 1). The 95 % interval is

    d̄ ± t s / √n

where t is the 97.5 % quantile of Student's distribution with n − 1 degrees of freedom.
The differences are assumed to be normal. If their true mean is 0, the interval excludes
0 in 5 % of such comparisons.

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
        by_seed: the difference of each seed.
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
