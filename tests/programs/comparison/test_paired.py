"""Differences by seed: the interval of scipy's paired t-test, and what has none."""

import numpy as np
import pytest
from scipy import stats

from symjax.programs.comparison.paired import paired_difference


@pytest.mark.parametrize("count", [2, 3, 7])
def test_the_interval_is_that_of_the_paired_t_test(count):
    one, other = np.random.default_rng(count).normal(size=(2, count)).tolist()
    seeds = range(10, 10 + count)
    found = paired_difference(
        dict(zip(seeds, one, strict=True)), dict(zip(seeds, other, strict=True))
    )
    assert found is not None and len(found.by_seed) == count
    assert found.mean == pytest.approx(np.mean(one) - np.mean(other))
    wanted = stats.ttest_rel(one, other).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high))


def test_noise_that_two_runs_of_a_seed_share_does_not_widen_the_interval():
    reference = {0: 1.0, 1: 9.0, 2: -5.0}
    found = paired_difference({s: x + 0.5 for s, x in reference.items()}, reference)
    assert found == (0.5, 0.5, 0.5, (0.5, 0.5, 0.5))


def test_only_seeds_that_both_know_count():
    values = {0: 1.0, 1: 2.0, 2: None, 3: 4.0}
    found = paired_difference(values, {1: 1.5, 2: 7.0, 3: None, 4: 8.0})
    assert found == (0.5, None, None, (0.5,))
    assert paired_difference(values, {2: 1.0, 5: 1.0}) is None
