"""Visibility: windows, positions in a cache, and biases by distance."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from laws import SEGMENTS, B, K, N, S, T, close
from score_laws import (
    DEFINITIONS,
    DIFFERENTIAL,
    SOFTMAX,
    blocks,
    every_close,
    graded,
    jitted,
    single,
)

from symjax import attention
from symjax.attention import ScoreMechanism
from symjax.attention.core.visibility import Visibility
from symjax.attention.scores import rows
from symjax.attention.softmax import softmax_weights

GAU = SOFTMAX._replace(
    attend=partial(attention.gau, divisor="count"),
    definition=partial(oracles.squared_relu, divisor="count"),
)
EVERY = {**DEFINITIONS, "gau": GAU}
KEYS = np.random.default_rng(5).random((B, 1, 1, T)) < 0.8
# Windows with other masks. Two-sided windows are read in strips of 2 rows.
WINDOWS = {
    "past": {"window": (3, 0), "is_causal": True, "length_base": 5.0},
    "itself": {"window": (0, 0), "mask_self": True},
    "both": {"window": (2, 5), "mask": KEYS},
    "one number": {"window": 4, "is_causal": True, "mask_self": True},
    "open": {"window": (None, 2), "length_base": 5.0},
    "segments": {"window": (4, 1), "segment_ids": SEGMENTS, "mask_self": True},
    "a bias": {"window": (4, 0), "bias": np.arange(T)[None, None, None] / T},
    "wide": {"window": (50, 0), "is_causal": True},
}


def by_definition(options):
    """Return the options as the oracle takes them."""
    if isinstance(width := options.get("window"), int):
        return options | {"window": (width - 1, width - 1)}
    return options


@pytest.mark.parametrize("name", EVERY)
def test_a_window_is_a_mask_of_pairs(name):
    scored = EVERY[name]
    arrays = scored.arrays()
    wanted = [
        scored.oracle(*arrays, **by_definition(options)) for options in WINDOWS.values()
    ]

    def outputs(*arrays):
        return [scored.attend(*arrays, **options) for options in WINDOWS.values()]

    with jax.enable_x64(True), blocks(2, 2):
        found = jitted(outputs)(*arrays)
    for one, other in zip(found, wanted, strict=True):
        close(one, other, 1e-13)


@pytest.mark.parametrize("name", ["softmax", "entmax15", "differential", "gau"])
@pytest.mark.parametrize("window", ["past", "both", "segments", "a bias"])
def test_gradients_of_a_window_are_those_of_its_mask(name, window):
    scored, options = EVERY[name], WINDOWS[window]
    arrays = scored.arrays()
    with jax.enable_x64(True), blocks(2, 2, batched=window == "past"):
        _, gradients = graded(scored.attend, *arrays, **options)
        _, wanted = graded(scored.oracle, *arrays, module=jnp, **options)
    every_close(gradients, wanted, 1e-12)


def test_a_window_and_a_mask_of_pairs_hide_what_either_hides():
    arrays = SOFTMAX.arrays()
    mask = np.random.default_rng(6).random((B, 1, T, T)) < 0.7
    for pairs in ({"mask": mask}, {"bias": 2.0 * mask}):
        options = {"window": (3, 0), **pairs}
        with jax.enable_x64(True), blocks(2, 2):
            found = jitted(SOFTMAX.attend, **options)(*arrays)
        close(found, SOFTMAX.oracle(*arrays, **options), 1e-13)


def test_queries_and_keys_in_a_window_may_differ_in_number():
    """More keys than queries, as with a cache, and fewer."""
    for length, keys in ((T, 2 * S), (T, 5), (1, S)):
        arrays = SOFTMAX.arrays(length, keys)
        for options in ({"window": (3, 2)}, {"window": (5, 0), "length_base": 3.0}):
            wanted = SOFTMAX.oracle(*arrays, **options)
            with jax.enable_x64(True), blocks(2, 2):
                close(jitted(SOFTMAX.attend, **options)(*arrays), wanted, 1e-13)


def test_one_row_reads_the_keys_in_its_window_alone():
    """At any position of each example, in a cache of any length."""
    rng, keys = np.random.default_rng(0), 200
    query = rng.normal(size=(3, 1, 2, 4)).astype(np.float32)
    key = rng.normal(size=(3, keys, 2, 4)).astype(np.float32)
    places = jnp.array([[1], [90], [keys - 1]])
    seen = np.arange(keys)[None, None, None]
    for left, right in ((5, 0), (3, 2), (0, 0)):
        attend = partial(attention.softmax, positions=places, window=(left, right))
        before = places[:, None, :, None] - seen
        mask = (before <= left) & (before >= -right)
        wanted = attention.softmax(query, key, key, mask=mask)
        np.testing.assert_allclose(attend(query, key, key), wanted, atol=1e-6)
        last = partial(attention.softmax, is_causal=True, window=(left, 0))
        np.testing.assert_allclose(
            last(query, key, key), last(query, key[:, -9:], key[:, -9:]), atol=1e-6
        )
        program = jax.jit(attend).lower(query, key, key).compile()
        pairs = 3 * 2 * keys
        assert program.cost_analysis()["flops"] < 2 * 2 * 4 * pairs


def test_blocks_leave_out_the_keys_that_a_window_hides():
    """A long text is read in strips. No block has more keys than its rows + left."""
    widths = []

    def recorded(scores, visible):
        widths.append(scores.shape[-1])
        return softmax_weights(scores, visible)

    attend = ScoreMechanism("recorded", recorded)
    arrays = [jax.ShapeDtypeStruct((1, 5000, 1, 4), jnp.float32)] * 3

    def loss(*arrays):
        return attend(*arrays, is_causal=True, window=(50, 0)).sum()

    jax.eval_shape(jax.grad(loss), *arrays)
    assert max(widths) == rows.BLOCK_ROWS + 50


def test_a_window_of_the_gradient_takes_memory_for_its_pairs_alone():
    """Twice the length takes twice the memory, far less than one map."""

    def memory(length):
        arrays = [jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)] * 3
        attend = partial(attention.softmax, is_causal=True, window=64)
        graded = jax.jit(jax.grad(lambda *x: attend(*x).sum(), (0, 1, 2)))
        return graded.lower(*arrays).compile().memory_analysis().temp_size_in_bytes

    with blocks(64):
        short, long = memory(2048), memory(4096)
    assert long < 2.2 * short
    assert long < 0.2 * 4096**2 * 4


WRONG = {
    "zero": 0,
    "negative": (-1, 0),
    "three": (1, 2, 3),
    "fraction": 1.5,
    "name": "all",
}


@pytest.mark.parametrize("window", WRONG.values(), ids=WRONG)
def test_a_window_that_is_none_is_refused(window):
    with pytest.raises(ValueError, match="sparsemax: window must be .left, right."):
        attention.sparsemax(*single(SOFTMAX.arrays()), window=window)


def test_a_window_beyond_all_rows_is_none():
    arrays = single(SOFTMAX.arrays())
    for window in (2**40, (2**31, 2**31)):
        found = attention.softmax(*arrays, window=window)
        np.testing.assert_allclose(found, attention.softmax(*arrays), 0, 1e-6)


def test_a_scale_is_one_number():
    arrays = single(SOFTMAX.arrays())
    with pytest.raises(ValueError, match=r"softmax: scale must be one number, got \(2"):
        attention.softmax(*arrays, scale=jnp.ones(2))


@pytest.mark.parametrize("name", ["softmax", "sparsemax", "differential", "gau"])
def test_rows_of_a_cache_are_rows_of_the_whole(name):
    """Examples are at different positions; later entries of the cache are not seen."""
    scored = EVERY[name]
    options = {
        "is_causal": True,
        "window": (5, 0),
        "mask_self": True,
        "length_base": 3.0,
        "alibi": np.linspace(0.1, 1, N),
    }
    arrays = scored.arrays(S)
    weights = arrays[3:]
    positions = np.array([[3, 4, 5], [11, 12, 13]])
    with jax.enable_x64(True):
        whole = jitted(scored.attend, **options)(*arrays)
        query = np.stack([arrays[0][b, rows] for b, rows in enumerate(positions)])
        form = jitted(scored.attend, **options)
        found = form(query, *arrays[1:3], *weights, positions=positions)
        for b, rows in enumerate(positions):
            close(found[b], whole[b, rows], 1e-13)


@pytest.mark.parametrize("is_causal", [False, True])
def test_slopes_are_a_bias_against_distance(is_causal, x64):
    """For softmax, differential attention and squared ReLU, where shifts matter."""
    slopes = np.linspace(0.1, 1, N)
    distance = np.abs(np.arange(T)[:, None] + S - T - np.arange(S))
    bias = -slopes[None, :, None, None] * distance
    for scored in (SOFTMAX, GAU, DIFFERENTIAL):
        arrays = scored.arrays(keys=S)
        found = jitted(scored.attend, is_causal=is_causal)(*arrays, alibi=slopes)
        close(found, scored.oracle(*arrays, bias=bias, is_causal=is_causal), 1e-13)
    two_calls = DEFINITIONS["differential_outputs"]
    found = two_calls.attend(*arrays, alibi=slopes)
    close(found, two_calls.oracle(*arrays, bias=bias), 1e-13)


def test_slopes_are_exact_however_many_keys_are_cached():
    """Relative to the last of 100,000 keys, the bias of early rows was off by 4e-3."""
    places, rows = 100_000, np.array([[20, 30]])
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.normal(size=(1, n, 1, 8)).astype("f4") for n in (2, places, places)
    )
    slope = attention.alibi_slopes(1) * 2**7  # slope of the first of many heads
    found = jitted(attention.softmax, is_causal=True)(
        query, key, value, positions=rows, alibi=slope
    )
    near = slice(0, 31)
    distance = rows[0][:, None] - np.arange(31)
    wanted = oracles.softmax(
        *(np.float64(x) for x in (query, key[:, near], value[:, near])),
        np.broadcast_to(distance >= 0, (1, 1, 2, 31)),
        bias=-float(slope[0]) * distance[None, None],
    )
    close(found, wanted, 2e-6)


def test_counts_are_those_of_the_pairs():
    """With a window, at both ends of time, and for rows before all keys."""
    for first, left, right, alone in (
        (0, None, 0, False),
        (0, 3, 2, True),
        (-4, 3, 2, True),
        (5, None, None, True),
        (2, 0, 0, True),
    ):
        rows, keys = first + jnp.arange(9)[None], jnp.arange(11)[None]
        seen = Visibility(rows, keys, window=(left, right), mask_self=alone, length=11)
        by_token = replace(seen, mask=jnp.ones((1, 1, 9, 11), bool))
        wanted = by_token.pairs()
        np.testing.assert_array_equal(
            np.broadcast_to(
                True if seen.pairs() is None else seen.pairs(), (1, 1, 9, 11)
            ),
            wanted,
        )
        count = np.broadcast_to(seen.count(seen.pairs()), (1, 1, 9, 1))
        np.testing.assert_array_equal(count[..., 0], np.asarray(wanted).sum(-1))


REFUSED = {
    "alibi": ({"alibi": np.ones(K)}, rf"alibi.*\({N},\).*\({K},\)"),
    "positions": ({"positions": np.ones((B, 3), int)}, rf"positions.*\(2, {T}\).*3"),
    "lam": ({"lam": np.ones((B, T, N))}, rf"lam.*\(2, {T}, {N // 2}\)"),
}


@pytest.mark.parametrize("options, message", REFUSED.values(), ids=REFUSED)
def test_wrong_shapes_are_named(options, message):
    with pytest.raises(ValueError, match=f"softmax: {message}"):
        attention.softmax(*single(SOFTMAX.arrays()), **options)


def test_gradients_of_keys_and_values_are_summed_in_float32():
    """8,000 rows see one key: bfloat16 sums were off by 2 % and 4 %."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(1, 8000, 1, 4)) for _ in range(3))
    query[..., 0] = key[:, 0, :, 0] = 4
    weigh = np.array([1, 0.5, -1, 2]) + 0.1 * rng.normal(size=query.shape)
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in (query, key, value)]

    def loss(*arrays):
        return (attention.softmax(*arrays) * weigh.astype(np.float32)).sum()

    graded = jax.jit(jax.grad(loss, (0, 1, 2)))
    found = [np.float64(x) for x in graded(*rounded)]
    wanted = graded(*(x.astype(jnp.float32) for x in rounded))
    for one, other in zip(found, wanted, strict=True):
        assert np.linalg.norm(one - other) < 2**-8 * np.linalg.norm(other)
    assert abs(found[2][0, 0] / wanted[2][0, 0] - 1).max() < 2**-8


def test_a_bias_for_all_rows_is_summed_in_float32():
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(1, 4000, 1, 4)), "f4") for _ in range(3)]

    def gradient(bias):
        def loss(bias):
            return jnp.square(attention.softmax(*arrays, bias=bias)).sum()

        return np.float64(jax.jit(jax.grad(loss))(bias)[0, 0, 0, :9])

    bias = jnp.zeros((1, 1, 1, 4000), jnp.bfloat16).at[..., :9].set(6)
    wanted = gradient(bias.astype(jnp.float32))
    assert np.abs(gradient(bias) - wanted).max() < 2**-8 * np.abs(wanted).max()


@pytest.mark.parametrize("size, value", [(300, 2e-6), (1e-4, 2000)])
def test_squared_relu_in_float16_neither_overflows_nor_vanishes(size, value):
    """Weights reach 2^33 and 2^-10; the outputs are representable."""
    query = np.full((1, 1, 1, 1), 300, np.float16)
    key = np.full((1, 2, 1, 1), size, np.float16)
    value = np.full((1, 2, 1, 3), value, np.float16)
    exact = 2 * (300 * np.float64(key[0, 0])) ** 2 * np.float64(value[0, 0])
    output = attention.gau(query, key, value, divisor=1.0, scale=1.0)
    np.testing.assert_allclose(np.float64(output[0, 0]), exact, rtol=2e-3)
