"""The kernels of the delta rule, interpreted on the CPU, equal the scan.

Other tests compare the scan with the definition.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import laws
import numpy as np
import pytest
from interpreted import STRICT, B, K, N, differentiated, seen_by
from laws import close, same

from symjax.attention import delta_causal
from symjax.attention.core.operands import Tokens
from symjax.attention.delta_rule import DeltaRule
from symjax.attention.kernels.tpu.recurrent import TpuDelta


class Sizes(NamedTuple):
    length: int = 256
    head_size: int = 64
    value_size: int = 64
    decays: str = "none"  # "a head", "a channel"


def arrays(sizes, most=1.0, spread=1.0):
    """Return inputs: β up to `most`, log-decays from about −spread² to −1/spread²."""
    rng = np.random.default_rng(0)
    length, size, value_size, decays = sizes
    shapes = (B, length, N, size), (B, length, K, size), (B, length, K, value_size)
    query, key, value = (rng.normal(size=shape) for shape in shapes)
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    beta = most * rng.random((B, length, K))
    if decays == "none":
        return query, key, value, beta
    shape = B, length, K, size if decays == "a channel" else 1
    return query, key, value, beta, -np.exp(spread * rng.normal(size=shape)) / 10


def kernel(query, key, value, beta, log_decay=None, mask=None, segment_ids=None):
    operands = (beta,) if log_decay is None else (beta, log_decay)
    parameters = jnp.zeros((K, 1)) if log_decay is None else None
    tokens = Tokens(query, key, value, operands, mask, segment_ids)
    rule = DeltaRule(fades=log_decay is not None)
    return TpuDelta(rule, STRICT).attend(tokens, parameters, None)


def scan(query, key, value, beta, log_decay=None, **seen):
    if log_decay is not None and log_decay.shape[-1] == 1:
        log_decay = log_decay[..., 0]
    return delta_causal(query, key, value, beta, log_decay, **seen)


ALWAYS = "a decay a channel, odd sizes, both"
CASES = {
    "delta": (Sizes(), 2, 1, ()),
    "delta, a head of a tile, a mask": (Sizes(256, 128, 256), 1, 1, ("mask",)),
    "delta, segments": (Sizes(300, 16, 24), 1, 1, ("segment_ids",)),
    "a decay a head, both": (
        Sizes(200, 32, 32, "a head"),
        1,
        1,
        ("mask", "segment_ids"),
    ),
    "a decay a head, from nothing to all": (
        Sizes(256, 128, 256, "a head"),
        2,
        3,
        ("segment_ids",),
    ),
    "a decay a channel": (Sizes(decays="a channel"), 2, 3, ()),
    ALWAYS: (
        Sizes(300, 16, 24, "a channel"),
        1,
        1,
        ("mask", "segment_ids"),
    ),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=[pytest.mark.always] if x == ALWAYS else []) for x in CASES],
)
def test_it_equals_the_scan(case):
    sizes, most, spread, names = CASES[case]
    seen, given = seen_by(sizes.length, *names), arrays(sizes, most, spread)
    wanted = differentiated(partial(scan, **seen), given, np.float64)
    found = differentiated(partial(kernel, **seen), given)
    for one, exact in zip(found, wanted, strict=True):
        close(one, exact, 4e-6)


def test_a_decay_that_all_tokens_share_is_one_of_each():
    query, key, value, beta = arrays(Sizes(200, 16, 24))
    shared = -np.linspace(0.01, 0.2, K)[:, None]

    def by_kernel(*given):
        *tokens, decay = given
        tokens = Tokens(*tokens[:3], (tokens[3],))
        return TpuDelta(DeltaRule(), STRICT).attend(tokens, decay, None)

    def by_scan(*given):
        return delta_causal(*given[:4], given[4][:, 0])

    given = query, key, value, beta, shared
    found = differentiated(by_kernel, given)
    wanted = differentiated(by_scan, given, np.float64)
    for one, exact in zip(found, wanted, strict=True):
        close(one, exact, 4e-6)


def test_hidden_tokens_may_be_anything():
    sizes = Sizes(300, 16, 24, "a channel")
    seen, given = seen_by(sizes.length, "mask"), arrays(sizes)
    hidden = ~seen["mask"][:, 0, 0]
    bad = [x.copy() for x in given]
    for i, x in enumerate((np.nan, np.inf, np.nan, np.nan)):
        bad[1 + i][hidden] = x
    form = partial(kernel, **seen)
    one, two = differentiated(form, given), differentiated(form, bad)
    for clean, found in zip(one, two, strict=True):
        same(found, clean)
    assert not any(x[hidden].any() for x in one[2:])


@pytest.mark.parametrize("decays, most", [("none", 2), ("a head", 2), ("a channel", 1)])
def test_bfloat16_products_cost_what_rounded_inputs_do(decays, most):
    given = [x[:1] for x in arrays(Sizes(decays=decays), most)]
    graded = partial(differentiated, given=given)
    laws.bfloat16_products_cost_what_rounded_inputs_do(graded, kernel, scan)
