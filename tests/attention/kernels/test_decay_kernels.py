"""The kernels of decays, interpreted on the CPU, equal the scan.

Other tests compare the scan with the definition.
"""

from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import jax
import laws
import numpy as np
import pytest
from interpreted import STRICT, B, K, N, differentiated, scan, seen_by
from laws import close, same

from symjax.attention import decay_causal
from symjax.attention.core import devices
from symjax.attention.core.operands import Tokens
from symjax.attention.kernels.tpu.recurrent import TpuDecay


class Sizes(NamedTuple):
    length: int = 256
    head_size: int = 64
    value_size: int = 64
    channels: bool = True


TWO_IN_A_TILE = Sizes()
FOUR_IN_A_TILE = Sizes(200, 32, 32)
ODD = Sizes(300, 16, 24)
WIDE = Sizes(256, 128, 256)
BY_HEAD = Sizes(channels=False)


def arrays(sizes, spread=1.0, seed=0):
    """Return inputs with log-decays from about −spread² to −1/spread²."""
    rng = np.random.default_rng(seed)
    length, size, value_size, channels = sizes
    shapes = (B, length, N, size), (B, length, K, size), (B, length, K, value_size)
    query, key, value = (rng.normal(size=shape) for shape in shapes)
    shape = B, length, K, size if channels else 1
    return query, key, value, -np.exp(spread * rng.normal(size=shape)) / 10


def kernel(query, key, value, log_decay, mask=None, segment_ids=None):
    tokens = Tokens(query, key, value, (log_decay,), mask, segment_ids)
    return TpuDecay(None, STRICT).attend(tokens, None, None)


ALWAYS = "odd sizes, segments"
CASES = {
    "two heads in a tile": (TWO_IN_A_TILE, 1, ()),
    "four heads in a tile, a mask": (FOUR_IN_A_TILE, 1, ("mask",)),
    ALWAYS: (ODD, 1, ("segment_ids",)),
    "a head of a tile, both": (WIDE, 1, ("mask", "segment_ids")),
    "from nothing to all": (ODD, 3, ("mask",)),
    "a decay a head": (BY_HEAD, 1, ("segment_ids",)),
    "a decay a head, from nothing to all": (
        FOUR_IN_A_TILE._replace(channels=False),
        3,
        ("mask", "segment_ids"),
    ),
    "a decay a head of a tile": (WIDE._replace(channels=False), 1, ("mask",)),
}


KINDS = [
    ("TPU v5 lite", False, True),
    ("TPU v5 lite", True, False),  # 64-bit types
    ("TPU v3", False, False),
]


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=[pytest.mark.always] if x == ALWAYS else []) for x in CASES],
)
def test_it_equals_the_scan(case):
    sizes, spread, names = CASES[case]
    seen, given = seen_by(sizes.length, *names), arrays(sizes, spread)
    wanted = differentiated(partial(scan, **seen), given, np.float64)
    found = differentiated(partial(kernel, **seen), given)
    for one, exact in zip(found, wanted, strict=True):
        close(one, exact, 2e-6)


@pytest.mark.parametrize("channels", [True, False])
def test_a_decay_of_minus_infinity_forgets_all(channels):
    query, key, value, log_decay = arrays(ODD._replace(channels=channels))
    log_decay[:, [3, 70, 131]] = -np.inf
    given = query, key, value, log_decay
    for one, exact in zip(
        differentiated(kernel, given),
        differentiated(scan, given, np.float64),
        strict=True,
    ):
        close(one, exact, 2e-6)


def test_a_decay_that_all_tokens_share_is_one_of_each():
    query, key, value, _ = arrays(ODD)
    shared = -np.linspace(0.01, 0.2, K)[:, None]

    def by_kernel(*given):
        return TpuDecay(None, STRICT).attend(Tokens(*given[:3]), given[3], None)

    def by_scan(*given):
        return decay_causal(*given[:3], given[3][:, 0])

    given = query, key, value, shared
    found = differentiated(by_kernel, given)
    wanted = differentiated(by_scan, given, np.float64)
    for one, exact in zip(found, wanted, strict=True):
        close(one, exact, 2e-6)


def test_hidden_tokens_may_be_anything():
    seen, given = seen_by(ODD.length, "mask"), arrays(ODD)
    hidden = ~seen["mask"][:, 0, 0]
    bad = [x.copy() for x in given]
    bad[1][hidden], bad[2][hidden], bad[3][hidden] = np.nan, np.inf, np.nan
    form = partial(kernel, **seen)
    one, two = differentiated(form, given), differentiated(form, bad)
    for clean, found in zip(one, two, strict=True):
        same(found, clean)
    assert not any(x[hidden].any() for x in one[2:])


@pytest.mark.parametrize("spread", [1, 3])
@pytest.mark.parametrize("channels", [True, False])
def test_bfloat16_products_cost_what_rounded_inputs_do(channels, spread):
    given = [x[:1] for x in arrays(Sizes(channels=channels), spread)]
    graded = partial(differentiated, given=given)
    laws.bfloat16_products_cost_what_rounded_inputs_do(graded, kernel, scan)


@pytest.mark.parametrize("kind, wide, fits", KINDS)
def test_kernels_are_for_tpus_that_they_compile_for(kind, wide, fits, monkeypatch):
    device = SimpleNamespace(device_kind=kind)
    monkeypatch.setattr(devices, "backend", lambda: "tpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    with jax.enable_x64(wide):
        assert devices.on_tpu() == fits
