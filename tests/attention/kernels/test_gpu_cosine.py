"""Cosine attention on the feature kernels for NVIDIA GPUs.

Interpreted on the CPU they equal the definition, and they compile for an H200. The
interpreter rounds operands as tensor cores do.
"""

from functools import partial

import jax
import jax.numpy as jnp
import laws
import numpy as np
import oracles
import pytest
from gpus import compiled_for_an_h200, served
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
from symjax.attention.core.operands import Tokens
from symjax.attention.cosine import RECURRENCE
from symjax.attention.kernels.gpu.recurrent import GpuFeatures


def arrays(length, size, value_size, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (B, length, N, size), (B, length, K, size), (B, length, K, value_size)
    return [rng.normal(size=shape) for shape in shapes]


def definition(query, key, value, module=jnp, **seen):
    features = [oracles.cosine_features(x, module) for x in (query, key)]
    pairs = oracles.seen(*query.shape[:2], key.shape[1], causal=True, **seen)
    products = oracles.feature_products(*features, module)
    return oracles.weighted_mean(*products, value, pairs, module)


def far_from(keys, spread):
    """Return arrays, kernel and definition where all rows see the first keys only.

    The mask hides all but the first `keys` of 200 keys, so later chunks read them from
    the state.
    """
    given = antiparallel(200, spread, heads=2, width=16)
    mask = np.broadcast_to(np.arange(200) < keys, (1, 1, 1, 200))
    return given, partial(kernel, mask=mask), partial(definition, mask=mask)


def kernel(query, key, value, mask=None, segment_ids=None):
    tokens = Tokens(query, key, value, (), mask, segment_ids)
    return GpuFeatures(RECURRENCE, True).attend(tokens, None, None)


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
    """Rounding outputs and gradients to bfloat16 makes 1.7e-3 of the limit of 2e-3."""
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
    "1 + cos of 0.09": (antiparallel(200, 0.3, heads=2, width=16), kernel, definition),
    "1 + cos of 0.01": (antiparallel(200, 0.1, heads=2, width=16), kernel, definition),
    "0.01, from a state": far_from(100, 0.1),
    "values with a mean": (shifted(), kernel, definition),
}
LOST = {"1 + cos of 0.09": 4e-3, "values with a mean": 2.5e-3}


@pytest.mark.parametrize("case", HARD)
def test_what_cancels_costs_the_digits_that_the_docs_say(case):
    """About 1e-4 / (1 + cos) of the output, and 2.5 times as much for gradients."""
    given, form, exact = HARD[case]
    bfloat16_agrees(form, exact, narrow(given), LOST.get(case, 0.03))


@pytest.mark.parametrize("length", [100, 200])
def test_rows_whose_keys_all_point_away_are_zero(length):
    """With keys in their chunk and in the state; they have no gradient."""
    (_, key, value), form, _ = far_from(length, 0.001)
    key = np.broadcast_to(10 * key[:, :1], key.shape)
    for found in differentiated(form, (-key, key, value), jnp.bfloat16):
        assert not found.any()


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
    """The segment ends at the end of a chunk."""
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
def test_what_it_supports(sizes, takes):
    assert served(GpuFeatures(RECURRENCE), **sizes) == takes


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 64, 192])
def test_it_compiles_for_an_h200_and_is_chosen(size):
    program = compiled_for_an_h200(cosine_causal, (4, size), (2, size), (2, 128))
    assert "__gpu$xla.gpu.triton" in program.as_text()
