"""Softmax, symmetric and differential attention obey the laws of score mechanisms."""

from functools import partial

import numpy as np
import pytest
from score_laws import DEFINITIONS, LAWS

from symjax import attention

FACED = [
    pytest.param(law, DEFINITIONS[name], id=f"{law.__name__}-{name}")
    for law, names in LAWS.items()
    for name in names
]


@pytest.mark.parametrize("law, scored", FACED)
def test_laws(law, scored):
    law(scored)


def test_numbers_of_a_law_may_be_shared_by_heads_that_share_noise():
    rng = np.random.default_rng(0)
    query, value = (rng.normal(size=(2, 5, n, 7)).astype(np.float32) for n in (6, 4))
    call = partial(attention.softmax, query, query, value, is_causal=True, signals=2)
    lam = np.full((1, 1, 4), 0.5, np.float32)
    law = [np.full((1, 1, 1), x, np.float32) for x in (0.7, 0.3)]
    alone = call(lam=lam, length_scale=tuple(np.tile(x, (2, 5, 2)) for x in law))
    np.testing.assert_array_equal(call(lam=lam, length_scale=tuple(law)), alone)


def test_a_closed_forget_gate_hides_the_keys_before_it():
    """Also if its log-decay is −∞."""
    rng = np.random.default_rng(1)
    query, key, value = rng.normal(size=(3, 1, 6, 2, 5)).astype(np.float32)
    gates = np.full((1, 6, 2), -0.5, np.float32)
    gates[:, 3] = -np.inf
    call = partial(attention.softmax, is_causal=True)
    found = call(query, key, value, log_decay=gates)[:, 3:]
    later = (x[:, 3:] for x in (query, key, value))
    wanted = call(*later, log_decay=gates[:, 3:])
    np.testing.assert_allclose(found, wanted, atol=2e-3)
