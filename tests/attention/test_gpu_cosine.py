"""The kernels of cosine attention for NVIDIA GPUs equal the definition, interpreted on
CPU, and compile for an H200.

Interpreted, too, they round to what tensor cores take.
"""

from functools import partial

import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest
from cosines import arrays, definition, far_from
from gpus import compiled_for_an_h200, on, served
from interpreted import (
    B,
    K,
    N,
    antiparallel,
    bfloat16_agrees,
    differentiated,
    padding,
    seen_by,
    segments,
)
from laws import close, same

from symjax.attention import cosine_causal
from symjax.attention.chunks import Tokens
from symjax.attention.cosine_gpu import GpuCosine


def kernel(query, key, value, mask=None, segment_ids=None):
    tokens = Tokens(query, key, value, (), mask, segment_ids)
    return GpuCosine(interpret=True).attend(tokens)


def narrow(given):
    return [x.astype(jnp.bfloat16) for x in given]


CASES = {
    "all": ((200, 64, 64), ()),
    "a mask": ((200, 32, 32), ("mask",)),
    "two blocks, segments": ((256, 128, 128), ("segment_ids",)),
    "odd sizes, both": ((300, 24, 16), ("mask", "segment_ids")),
    "three blocks": ((130, 192, 16), ()),
}


@pytest.mark.parametrize("sizes, names", CASES.values(), ids=CASES)
def test_it_equals_the_definition(sizes, names):
    """Rounding outputs and gradients to bfloat16 is 1.7e-3 of 2e-3."""
    seen, given = seen_by(sizes[0], *names), narrow(arrays(*sizes))
    forms = partial(kernel, **seen), partial(definition, **seen)
    bfloat16_agrees(*forms, given, 2e-3)


@pytest.mark.slow
def test_bfloat16_inputs_cost_what_their_rounding_does():
    graded = partial(differentiated, given=[x[:1] for x in arrays(200, 64, 64)])
    laws.bfloat16_products_cost_what_rounded_inputs_do(graded, kernel, definition)


def shifted():
    query, key, value = arrays(200, 32, 32)
    return query, key, value + 4


HARD = {
    "1 + cos of 1e-2": (antiparallel(200, 0.1, heads=2, width=16), kernel, definition),
    "1 + cos of 1e-4": (antiparallel(200, 0.01, heads=2, width=16), kernel, definition),
    "far from a state": far_from(kernel, 100, 0.1, width=16),
    "values with a mean": (shifted(), kernel, definition),
}


@pytest.mark.parametrize("given, form, exact", HARD.values(), ids=HARD)
def test_what_cancels_costs_no_digits(given, form, exact):
    bfloat16_agrees(form, exact, narrow(given), 2.5e-3)


def test_a_state_of_keys_that_all_point_away_gives_the_mean_of_their_values():
    """And its gradient is that of as small a weight as can be told from none."""
    (_, key, value), form, _ = far_from(kernel, 100, 0.001, width=16)
    key = np.broadcast_to(10 * key[:, :1], key.shape)
    found = differentiated(form, (-key, key, value), jnp.bfloat16)
    output, *gradients = (x.astype(np.float32) for x in found)
    assert not output[:, :64].any()
    (value,) = narrow([value])
    mean = value[:, :100].astype(np.float32).mean(axis=1, keepdims=True)
    close(output[:, 128:], np.repeat(mean, 72, axis=1), 2**-8)
    assert all(np.isfinite(x).all() for x in gradients)
    assert not gradients[0].any() and gradients[2][:, :100].any()


def test_a_default_precision_changes_no_product():
    with jax.default_matmul_precision("BF16_BF16_F32"):
        found = jax.make_jaxpr(jax.grad(lambda *x: kernel(*x).sum()))(
            *narrow(arrays(70, 16, 16))
        )
    assert "dot_general" in str(found) and "BF16_BF16_F32" not in str(found)


@pytest.mark.slow
def test_no_direction_has_a_finite_gradient():
    query, key, value = arrays(130, 16, 16)
    query[:, 5], key[:, 6], query[:, 7] = 0, 0, 1e20
    found = differentiated(kernel, (query, key, value), jnp.bfloat16)
    assert all(np.isfinite(x.astype(np.float32)).all() for x in found)
    rows = np.asarray(found[0], np.float32)[:, 5]
    mean = value[:, :6].mean(axis=1).repeat(N // K, axis=1)
    close(rows, mean, 2**-7)


def test_a_hidden_nan_reaches_nothing():
    given, mask = arrays(300, 16, 16), padding(300)
    hidden = ~mask[:, 0, 0]
    bad = [x.copy() for x in given]
    bad[1][hidden], bad[2][hidden] = np.nan, np.inf
    form = partial(kernel, mask=mask, segment_ids=segments(300))
    one, two = (differentiated(form, x, jnp.bfloat16) for x in (given, bad))
    for clean, found in zip(one, two, strict=True):
        same(found.astype(np.float32), clean.astype(np.float32))
    assert not one[0][0, :140].any() and not one[2][hidden].any()


@pytest.mark.slow
def test_a_nan_stays_in_its_segment():
    """Which ends with a chunk."""
    given = arrays(200, 16, 16)
    segment_ids = np.broadcast_to(np.arange(200) >= 128, (B, 200)).astype(np.int32)
    bad = [x.copy() for x in given]
    for x in bad:
        x[0, 20] = np.nan
    form = partial(kernel, segment_ids=segment_ids)
    one, two = (differentiated(form, x, jnp.bfloat16) for x in (given, bad))
    for clean, found in zip(one, two, strict=True):
        clean, found = clean.astype(np.float32), found.astype(np.float32)
        same(found[:, 128:], clean[:, 128:])
        same(found[1], clean[1])
        assert np.isnan(found[0, 20]).all()


SERVED = {
    "bfloat16": ({}, True),
    "float32": ({"dtype": np.float32}, False),
    "short": ({"length": 100}, False),
    "values of 256": ({"width": 256}, False),
    "keys of 48": ({"size": 48}, True),
}


@pytest.mark.parametrize("sizes, takes", SERVED.values(), ids=SERVED)
def test_what_it_serves(sizes, takes, monkeypatch):
    on("9.0", monkeypatch)
    assert served(GpuCosine(), **sizes) == takes


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 64, 192])
def test_it_compiles_for_an_h200_and_is_chosen(size):
    program = compiled_for_an_h200(cosine_causal, (4, size), (2, size), (2, 128))
    assert "__gpu$xla.gpu.triton" in program.as_text()
