"""The TPU kernels of Performer and linear attention equal the definitions.

They are interpreted on the CPU.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import laws
import numpy as np
import oracles
import pytest
from interpreted import STRICT, B, K, N, differentiated, seen_by
from laws import close, same

from symjax.attention import linear_causal, performer_causal
from symjax.attention.core.feature_maps import FeatureParameters
from symjax.attention.core.operands import Tokens
from symjax.attention.features import IDENTITY, PLAIN, plain
from symjax.attention.kernels import dispatch
from symjax.attention.kernels.tpu.recurrent import TpuFeatures
from symjax.attention.random_features import RANDOM_FEATURES
from symjax.attention.recurrent import engine
from symjax.attention.recurrent.normalised import Normalised


class Sizes(NamedTuple):
    length: int = 256
    head_size: int = 64
    value_size: int = 64
    rows: int = 40
    features: str = "positive"


TWO_IN_A_TILE = Sizes()
FOUR_IN_A_TILE = Sizes(200, 32, 32, 40, "hyperbolic")
ODD = Sizes(300, 16, 24, 11)
WIDE = Sizes(256, 128, 128, 128)
ELU = Sizes(200, 64, 64, 0, "elu")
ODD_ELU = Sizes(300, 16, 24, 0, "elu")  # φ(0) = 1 in the lanes that pad a head
RELU2 = Sizes(300, 16, 24, 0, "relu2")


def arrays(sizes, scale=1.0, seed=0):
    rng = np.random.default_rng(seed)
    length, size, value_size, *_ = sizes
    shapes = (B, length, N, size), (B, length, K, size), (B, length, K, value_size)
    query, key, value = (rng.normal(size=shape) for shape in shapes)
    return query * scale, key * scale, value


def projection(sizes):
    return np.random.default_rng(4).normal(size=(sizes.rows, sizes.head_size))


def kernel(sizes, query, key, value, rows=None, **seen):
    recurrence = Normalised((RANDOM_FEATURES if sizes.rows else PLAIN)[sizes.features])
    rows = jnp.asarray(projection(sizes), jnp.float32) if rows is None else rows
    random = FeatureParameters(rows, jnp.float32(sizes.head_size**-0.5))
    random = random if sizes.rows else None
    mask, segment_ids = seen.get("mask"), seen.get("segment_ids")
    tokens = Tokens(query, key, value, (), mask, segment_ids)
    fallback = engine.InXla(recurrence, 64)
    return TpuFeatures(recurrence, STRICT).attend(tokens, random, fallback)


def definition(sizes, query, key, value, **seen):
    """Attend by pairs; for linear attention by the scan, which other tests check."""
    if not sizes.rows:
        return linear_causal(query, key, value, features=sizes.features, **seen)
    logarithms, signs = oracles.performer_products(
        query, key, projection(sizes), features=sizes.features, module=jnp
    )
    pairs = oracles.seen(len(query), sizes.length, sizes.length, causal=True, **seen)
    return oracles.weighted_mean(logarithms, signs, value, pairs, jnp)


ODD_LINEAR = "linear, odd sizes, both"
LOST = "rows are lost, both"
ALWAYS = ODD_LINEAR, LOST
CASES = {
    "two heads in a tile": (TWO_IN_A_TILE, 1, (), 1e-5),
    "four heads in a tile, a mask": (FOUR_IN_A_TILE, 1, ("mask",), 1e-5),
    "odd sizes, segments": (ODD, 1, ("segment_ids",), 1e-5),
    "a head of a tile, both": (WIDE, 1, ("mask", "segment_ids"), 1e-5),
    "linear": (ELU, 1, (), 1e-5),
    "linear, a mask": (ELU, 1, ("mask",), 1e-5),
    ODD_LINEAR: (ODD_ELU, 1, ("mask", "segment_ids"), 1e-5),
    "relu², odd sizes, both": (RELU2, 1, ("mask", "segment_ids"), 1e-5),
    "rows are lost": (TWO_IN_A_TILE, 8, (), 3e-5),
    LOST: (ODD, 8, ("mask", "segment_ids"), 3e-5),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=[pytest.mark.always] if x in ALWAYS else []) for x in CASES],
)
def test_it_equals_the_definition(case):
    """At scale 8 exponents reach hundreds, and rows underflow in float32."""
    sizes, scale, names, tolerance = CASES[case]
    seen, given = seen_by(sizes.length, *names), arrays(sizes, scale)
    wanted = differentiated(partial(definition, sizes, **seen), given, np.float64)
    found = differentiated(partial(kernel, sizes, **seen), given)
    for one, exact in zip(found, wanted, strict=True):
        close(one, exact, tolerance)


def test_a_key_that_dwarfs_the_past_leaves_it_alone():
    """Earlier chunks are bitwise equal; in its chunk such rows are recomputed."""
    query, key, value = (x.astype(np.float32) for x in arrays(TWO_IN_A_TILE, 4))
    changed = key.copy()
    changed[:, 200] = projection(TWO_IN_A_TILE)[0] * 64**0.25
    run = jax.jit(partial(kernel, TWO_IN_A_TILE))
    before, after = (np.asarray(run(query, x, value)) for x in (key, changed))
    same(after[:, :128], before[:, :128])
    close(after[:, 128:200], before[:, 128:200], 1e-5)
    assert np.abs(after[:, 200:] - before[:, 200:]).max() > 0.1


@pytest.mark.parametrize("sizes", [ODD, ODD_ELU])
def test_hidden_keys_may_be_anything_and_rows_without_keys_are_zero(sizes):
    seen, given = seen_by(sizes.length, "mask"), arrays(sizes)
    hidden = ~seen["mask"][:, 0, 0]
    bad = [x.copy() for x in given]
    bad[1][hidden], bad[2][hidden] = np.nan, np.inf
    form = partial(kernel, sizes, **seen)
    one, two = differentiated(form, given), differentiated(form, bad)
    for clean, found in zip(one, two, strict=True):
        same(found, clean)
    assert not one[0][0, :140].any() and np.abs(one[0][0, 150:]).min() > 0
    assert not one[2][hidden].any() and not one[3][hidden].any()


@pytest.mark.parametrize(
    "sizes, scale", [(Sizes(rows=128), 0.5), (Sizes(rows=128), 2), (ELU, 1)]
)
def test_bfloat16_products_cost_what_rounded_inputs_do(sizes, scale):
    form, exact = partial(kernel, sizes), partial(definition, sizes)
    graded = partial(differentiated, given=[x[:1] for x in arrays(sizes, scale)])
    laws.bfloat16_products_cost_what_rounded_inputs_do(graded, form, exact)


@pytest.mark.parametrize(
    "name, scale", [("relu", 1e-20), ("elu", 1e18), ("relu", 1e18)]
)
def test_features_may_be_tiny_and_huge(name, scale):
    sizes = Sizes(128, 64, 64, 0, name)
    given = [x.astype(np.float32) for x in arrays(sizes)]
    given = [given[0] * np.float32(scale), given[1] * np.float32(scale), given[2]]
    found, wanted = (
        differentiated(partial(form, sizes), given) for form in (kernel, definition)
    )
    for one, other in zip(found, wanted, strict=True):
        assert np.isfinite(one).all() and np.abs(other).max() > 0
        close(one, other, 1e-5)


OWN = {
    "it reads the head size": lambda x: jnp.exp(x * x.shape[-1] ** -0.5),
    "two features a channel": lambda x: jnp.concatenate(
        [jax.nn.relu(x), jax.nn.relu(-x)], axis=-1
    ),
    "no kernel has its operations": lambda x: jax.nn.elu(x) + 1,
}


@pytest.mark.parametrize("name", OWN)
def test_xla_computes_elementwise_features_that_kernels_may_not(name, monkeypatch):
    monkeypatch.setitem(PLAIN, name, plain(OWN[name], elementwise=True))
    sizes = Sizes(150, 40, 24, 0, name)
    seen, given = seen_by(sizes.length, "mask", "segment_ids"), arrays(sizes)
    wanted = differentiated(partial(definition, sizes, **seen), given, np.float64)
    found = differentiated(partial(kernel, sizes, **seen), given)
    for one, exact in zip(found, wanted, strict=True):
        close(one, exact, 1e-5)


def test_a_learned_projection_gets_the_gradient_of_the_scan():
    given = [x.astype(np.float32) for x in arrays(ODD)]
    rows = jnp.asarray(projection(ODD), jnp.float32)

    def by_kernel(rows, *given):
        return kernel(ODD, *given, rows=rows).sum()

    def by_scan(rows, *given):
        return performer_causal(*given, rows).sum()

    found, wanted = (
        jax.jit(jax.grad(form, (0, 1)))(rows, *given) for form in (by_kernel, by_scan)
    )
    for one, other in zip(found, wanted, strict=True):
        close(one, other, 1e-5)


def test_other_machines_features_and_lengths_take_the_scan():
    random = FeatureParameters(jnp.zeros((8, 16)), jnp.float32(1))
    tokens = Tokens(*(jnp.zeros((1, 128, 2, 16), jnp.bfloat16) for _ in range(3)))
    short = Tokens(*(x[:, :100] for x in tokens[:3]))
    half = jax.tree.map(lambda x: x.astype(jnp.float16), tokens)

    def served(features, tokens, random):
        table = PLAIN if random is None else RANDOM_FEATURES
        recurrence = Normalised(table.get(features, IDENTITY))
        found = [x(recurrence) for _, x in dispatch._sources("features")]
        return any(x.refusal(tokens, random) is None for x in found)

    assert not served("positive", tokens, random)  # on a CPU
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(dispatch.PLATFORMS, "tpu", lambda: True)
        patch.setattr(dispatch, "xla_keeps_arrays_whole", lambda: True)
        assert served("positive", tokens, random)
        assert served("elu", tokens, None)
        assert not served("trigonometric", tokens, random)
        assert not served("taylor", tokens, None)
        assert not served(jnp.abs, tokens, None)
        assert not served("positive", short, random)
        assert not served("positive", tokens._replace(query=tokens.query[:0]), random)
        empty = tokens.value[..., :0]
        assert not served("positive", tokens._replace(value=empty), random)
        assert not served("positive", half, random)
