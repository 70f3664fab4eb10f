"""Squared-ReLU attention, over all pairs and in groups."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import score_laws
from laws import SEGMENTS, B, H, K, N, T, V, close, hiding, same
from score_laws import SOFTMAX, every_close, graded, jitted, single

from symjax.attention import (
    differential,
    flash,
    flash_causal,
    flash_state,
    flash_step,
    gau,
)

M = 4  # features of linear queries and keys
GROUP = 8  # does not divide T, and T needs more than two groups


def scored(**options):
    return SOFTMAX._replace(
        attend=partial(gau, **options),
        definition=partial(oracles.squared_relu, **options),
    )


@pytest.mark.parametrize(
    "law",
    [
        score_laws.it_equals_its_definition,
        score_laws.gradients_equal_those_of_the_definition,
        score_laws.a_decoded_row_is_a_row_of_the_whole,
        score_laws.the_future_changes_nothing,
        score_laws.hidden_keys_change_nothing,
        score_laws.a_row_without_keys_is_zero,
        score_laws.bfloat16_is_as_good_as_its_rounding,
    ],
    ids=lambda law: law.__name__,
)
def test_gau_obeys(law):
    law(scored(divisor="count"))


def test_the_published_divisors_can_be_had(x64):
    query, key, value = SOFTMAX.arrays()
    bias = np.random.default_rng(2).normal(size=(1, N, T, T))
    pairs = oracles.visible(B, N, T, T)
    keys, values = (np.repeat(x, N // K, axis=2) for x in (key, value))
    products = np.einsum("btnh,bsnh->bnts", query, keys)

    def form(scores, over=1.0):
        weights = np.maximum(scores, 0) ** 2 / over
        return np.einsum("bnts,bsnv->btnv", weights, values)

    for wanted, options in (
        (form(products / H**0.5 + bias, T), {"divisor": T}),
        (form(products / H**0.5 + bias, T), {"divisor": "count"}),
        (form((products + bias) / T), {"divisor": T**2, "scale": 1.0}),
        (form((products + bias) / T), {"divisor": "squared_count", "scale": 1.0}),
        (form(products / T + bias), {"divisor": 1, "scale": 1 / T}),
    ):
        close(gau(query, key, value, bias, **options), wanted, 1e-12)
        oracle = oracles.squared_relu(query, key, value, pairs, bias=bias, **options)
        close(oracle, wanted, 1e-12)


def test_gau_has_differential_heads(x64):
    query, key, value, lam = score_laws.DIFFERENTIAL.arrays()
    output = differential(query, key, value, lam, attend=gau, divisor=3.0)
    pairs = oracles.visible(B, N, T, T)
    branches = (
        oracles.squared_relu(
            query[:, :, b::2], key[:, :, b::2], value, pairs, divisor=3.0
        )
        for b in (0, 1)
    )
    one, two = branches
    close(output, one - lam[None, None, :, None] * two, 1e-12)


def test_divisors_are_numbers_above_0_or_known():
    arrays = single(SOFTMAX.arrays())
    for divisor in (0, -2.0, "length"):
        with pytest.raises(ValueError, match=f"{divisor!r}"):
            gau(*arrays, divisor=divisor)
    with pytest.raises(ValueError, match="count, squared_count"):
        gau(*arrays, divisor="keys")
    for name in ("divisor", "linear_divisor"):
        with pytest.raises(ValueError, match=f"{name} .* 'count'"):
            flash(*single(inputs()), **{name: "count"})


def inputs(length=T, seed=0):
    """Query, key, linear query, linear key, value."""
    rng = np.random.default_rng(seed)
    sizes = (N, H), (K, H), (N, M), (K, M), (K, V)
    return tuple(rng.normal(size=(B, length, *size)) for size in sizes)


def part(arrays, start, stop):
    return [x[:, start:stop] for x in arrays]


CASES = (
    {"group_size": GROUP},
    {"group_size": GROUP, "mask": hiding(T), "segment_ids": SEGMENTS},
    {"group_size": 1, "divisor": 0.5, "segment_ids": SEGMENTS},
    {"group_size": 5, "scale": 0.7, "divisor": 2, "linear_divisor": 3.0},
    {"group_size": T, "mask": hiding(T)},
    {"group_size": 64},
)


def test_flash_equals_its_definition():
    """In both directions, with groups of any size."""
    arrays = inputs()
    wanted = [
        oracles.flash(*arrays, causal=causal, **case)
        for case in CASES
        for causal in (False, True)
    ]

    def outputs(*arrays):
        return [
            flash(*arrays, is_causal=causal, **case)
            for case in CASES
            for causal in (False, True)
        ]

    every_close(jax.jit(outputs)(*single(arrays)), wanted, 3e-6)
    with jax.enable_x64(True):
        every_close(jax.jit(outputs)(*arrays), wanted, 1e-13)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_flash_equal_those_of_the_definition(causal):
    arrays, options = inputs(), CASES[1]
    with jax.enable_x64(True):
        _, gradients = graded(flash, *arrays, is_causal=causal, **options)
        _, wanted = graded(oracles.flash, *arrays, causal=causal, module=jnp, **options)
    every_close(gradients, wanted, 1e-12)


OPTIONS = {"scale": 0.7, "divisor": 3.0, "linear_divisor": 5.0}


def empty(dtype=jnp.float64):
    return flash_state(B, K, H, V, group_size=GROUP, linear_size=M, dtype=dtype)


@jax.jit
def read(arrays, state, mask=None, segment_ids=None):
    return flash_causal(
        *arrays,
        mask,
        group_size=GROUP,
        state=state,
        return_state=True,
        segment_ids=segment_ids,
        **OPTIONS,
    )


@jax.jit
def steps(arrays, state):
    """Token by token."""

    def body(state, now):
        output, state = flash_step(state, *(x[:, None] for x in now), **OPTIONS)
        return state, output[:, 0]

    times = [jnp.moveaxis(x, 1, 0) for x in arrays]
    state, outputs = jax.lax.scan(body, state, times)
    return jnp.moveaxis(outputs, 0, 1), state


def same_state(one, two):
    for name, left, right in zip(one._fields, one, two, strict=True):
        if name == "place":
            same(left, right)
        else:
            close(left, right, 1e-12)


def test_pieces_and_steps_are_the_whole(x64):
    """Pieces end inside a group, with it, and behind two more; then tokens."""
    arrays, state = inputs(26), empty()
    wanted = oracles.flash(*arrays, causal=True, group_size=GROUP, **OPTIONS)
    whole, end = read(arrays, None)
    close(whole, wanted, 1e-13)
    outputs = []
    for start, stop in ((0, 3), (3, 8), (8, 24)):
        output, state = read(part(arrays, start, stop), state)
        outputs.append(output)
    output, state = steps(part(arrays, 24, 26), state)
    close(np.concatenate([*outputs, output], axis=1), wanted, 1e-13)
    same_state(state, end)
    output, stepped = steps(arrays, empty())
    close(output, wanted, 1e-13)
    same_state(stepped, end)
    assert jax.tree.map(jnp.shape, end) == jax.tree.map(jnp.shape, empty())


def test_examples_of_different_lengths_go_on_from_their_own_place(x64):
    """Padded behind their last token, twice; then both take the same steps."""
    arrays, state = inputs(30), empty()
    read_so_far = np.zeros(B, int)
    for lengths in ((13, 4), (0, 6)):
        piece = [
            np.stack(
                [
                    np.resize(x[b, n:], (13, *x.shape[2:]))
                    for b, n in zip(range(B), read_so_far, strict=True)
                ]
            )
            for x in arrays
        ]
        mask = np.arange(13)[None, None, None] < np.reshape(lengths, (B, 1, 1, 1))
        for x in (*piece[:2], *piece[3:]):
            x[~mask[:, 0, 0]] = np.nan  # what is not there may be anything
        piece[0][~mask[:, 0, 0]] = 7.0
        output, state = read(piece, state, mask)
        for b, n in enumerate(lengths):
            start = read_so_far[b]
            own = [x[b : b + 1, : start + n] for x in arrays]
            wanted = oracles.flash(*own, causal=True, group_size=GROUP, **OPTIONS)
            if n:
                close(output[b : b + 1, :n], wanted[:, start:], 1e-13)
        read_so_far += lengths
    same(state.place, read_so_far % GROUP)
    for b, n in enumerate(read_so_far):
        own = [x[b : b + 1, :n] for x in arrays]
        _, alone = flash_causal(*own, group_size=GROUP, return_state=True, **OPTIONS)
        same_state(jax.tree.map(lambda x, b=b: x[b : b + 1], state), alone)
    later = [
        np.stack([x[b, n : n + 9] for b, n in enumerate(read_so_far)]) for x in arrays
    ]
    output, _ = steps(later, state)
    for b, n in enumerate(read_so_far):
        own = [x[b : b + 1, : n + 9] for x in arrays]
        wanted = oracles.flash(*own, causal=True, group_size=GROUP, **OPTIONS)
        close(output[b : b + 1], wanted[:, n:], 1e-13)


def test_the_last_segment_goes_on(x64):
    """Its run alone is in the state, whatever ids its padding has."""
    arrays, state = inputs(), empty()
    mask = np.ones((B, 1, 1, T), bool)
    wanted = oracles.flash(
        *arrays, causal=True, group_size=GROUP, segment_ids=SEGMENTS, **OPTIONS
    )
    outputs = []
    for start, stop in ((0, 10), (10, 19)):
        piece = [
            np.pad(x, ((0, 0), (0, 3), (0, 0), (0, 0)), mode="edge")
            for x in part(arrays, start, stop)
        ]
        ids = np.pad(SEGMENTS[:, start:stop], ((0, 0), (0, 3)), constant_values=77)
        length = stop - start
        mask = (np.arange(length + 3) < length)[None, None, None]
        output, state = read(piece, state, mask, ids)
        outputs.append(output[:, :length])
    close(np.concatenate(outputs, axis=1), wanted, 1e-13)
    _, end = read(arrays, None, None, SEGMENTS)
    same_state(state, end)


def test_the_future_changes_nothing():
    """Not a bit of it, and it takes no gradient."""
    arrays = single(inputs())
    other = [np.concatenate([x[:, :10], -3 * x[:, 10:]], 1) for x in arrays]
    form = jitted(flash, is_causal=True, group_size=GROUP)
    one, two = form(*arrays), form(*other)
    same(one[:, :10], two[:, :10])
    assert np.abs(one[:, 10:] - two[:, 10:]).max() > 0.1

    def early(*arrays):
        return flash(*arrays, is_causal=True, group_size=GROUP)[:, :10]

    _, gradients = graded(early, *arrays)
    for gradient in gradients:
        assert gradient[:, :10].any() and not gradient[:, 10:].any()


@pytest.mark.parametrize("causal", [False, True])
def test_hidden_keys_and_other_examples_change_nothing(causal):
    """Not even NaN; a row that sees nothing is zero; gradients are finite."""
    arrays, mask = single(inputs()), hiding(T)
    mask[1, ..., :9] = False
    hidden = ~mask[:, 0, 0]
    form = partial(flash, is_causal=causal, group_size=GROUP)
    grade = score_laws.grading(form, 5, mask=mask)
    output, _ = grade(*arrays)
    bad = [x.copy() for x in arrays]
    for x in (bad[1], bad[3], bad[4]):
        x[hidden] = np.nan
    again, gradients = grade(*bad)
    same(again, output)
    for index, gradient in enumerate(gradients):
        assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0
        if index in (1, 3, 4):
            assert not gradient[hidden].any()
    if causal:
        same(output[1, :9], np.zeros((9, N, V)))
    assert np.abs(output[1, 9:]).max(axis=(1, 2)).min() > 0
    scaled, _ = grade(*(np.stack([x[0], 30 * x[1]]) for x in arrays))
    same(scaled[0], output[0])


def test_bfloat16_is_as_good_as_its_rounding():
    """Weights, and each of the two parts of a row, are rounded once: 2⁻⁸ each."""
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in inputs()]
    form = jitted(flash_causal, group_size=GROUP, return_state=True)
    output, state = form(*rounded)
    wanted, _ = form(*(x.astype(jnp.float32) for x in rounded))
    assert output.dtype == jnp.bfloat16
    assert state.key.dtype == jnp.bfloat16 and state.sums.dtype == jnp.float32
    error = np.abs(np.asarray(output, np.float32) - wanted)
    assert error.max() <= 2**-8 * np.abs(wanted).max()
    output, state = flash_step(state, *(x[:, :1] for x in rounded))
    assert output.dtype == jnp.bfloat16
    assert state.key.dtype == jnp.bfloat16 and state.sums.dtype == jnp.float32


def test_memory_of_the_gradient_is_linear_in_time():
    """A map of 2048 rows would be 16 MB; a group's is 16 kB."""

    def bytes_for(length):
        sizes = (1, 16), (1, 16), (1, 16), (1, 16), (1, 32)
        arrays = [jax.ShapeDtypeStruct((1, length, *x), jnp.float32) for x in sizes]
        form = partial(flash, is_causal=True, group_size=64)
        graded = jax.grad(lambda *x: form(*x).sum(), tuple(range(5)))
        analysis = jax.jit(graded).lower(*arrays).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    assert bytes_for(2048) < min(2.2 * bytes_for(1024), 0.5 * 2048**2 * 4)


def test_wrong_shapes_are_named():
    arrays = single(inputs())
    names = "query", "key", "linear_query", "linear_key", "value"
    state = empty(jnp.float32)
    cases = [
        ({"query": arrays[0][..., :4]}, (arrays[0][..., :4], arrays[1])),
        ({"key": arrays[1][:, :9]}, (arrays[1][:, :9], arrays[4])),
        ({"linear_query": arrays[2][..., :3]}, (arrays[2][..., :3], arrays[3])),
        ({"linear_query": arrays[2][:, :, :3]}, (arrays[0], arrays[2][:, :, :3])),
        ({"linear_key": arrays[3][:, :9]}, (arrays[3][:, :9], arrays[4])),
        ({"mask": np.ones((B, 1, T, T), bool)}, (np.ones((B, 1, T, T)), arrays[1])),
        ({"segment_ids": SEGMENTS[:, :9]}, (SEGMENTS[:, :9], arrays[0])),
        ({"state": state}, (arrays[1], state.sums)),
    ]
    for changed, named in cases:
        arguments = dict(zip(names, arrays, strict=True)) | changed
        with pytest.raises(ValueError) as refusal:
            flash_causal(**arguments)
        for array in named:
            assert str(array.shape) in str(refusal.value)
    with pytest.raises(ValueError, match="one token"):
        flash_step(state, *arrays)
    with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
        flash(*arrays, group_size=0)
