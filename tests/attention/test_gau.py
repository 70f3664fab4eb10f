"""Squared-ReLU attention, over all pairs and in groups."""

from functools import partial

import jax
import jax.numpy as jnp
import laws
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
    linear_state,
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

    cases = (
        (form(products / H**0.5 + bias, T), {"divisor": T}),
        (form(products / H**0.5 + bias, T), {"divisor": "count"}),
        (form((products + bias) / T), {"divisor": T**2, "scale": 1.0}),
        (form((products + bias) / T), {"divisor": "squared_count", "scale": 1.0}),
        (form(products / T + bias), {"divisor": 1, "scale": 1 / T}),
    )

    @jax.jit
    def outputs(*arrays):
        return [gau(*arrays, **options) for _, options in cases]

    found = outputs(query, key, value, bias)
    for output, (wanted, options) in zip(found, cases, strict=True):
        close(output, wanted, 1e-12)
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
    with pytest.raises(ValueError, match="constant number above 0"):
        jax.eval_shape(lambda divisor: gau(*arrays, divisor=divisor), jnp.float32(3))
    for name in ("divisor", "linear_divisor"):
        with pytest.raises(ValueError, match=f"{name} .* 'count'"):
            flash(*single(inputs()), **{name: "count"})


def inputs(length=T, seed=0):
    """Draw query, key, linear query, linear key and value."""
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
    {"group_size": 64, "mask": hiding(T)},
)


def test_flash_equals_its_definition():
    """In both directions, with groups of any size."""
    arrays = inputs()
    both = [(case, causal) for case in CASES for causal in (False, True)]
    wanted = [oracles.flash(*arrays, causal=causal, **case) for case, causal in both]

    @partial(jax.jit, static_argnums=0)
    def outputs(count, *arrays):
        return [
            flash(*arrays, is_causal=causal, **case) for case, causal in both[:count]
        ]

    every_close(outputs(2, *single(arrays)), wanted[:2], 3e-6)
    with jax.enable_x64(True):
        every_close(outputs(len(both), *arrays), wanted, 1e-13)


OPTIONS = {"group_size": GROUP, "scale": 0.7, "divisor": 3.0, "linear_divisor": 5.0}


@partial(jax.jit, static_argnums=0)
def outputs_and_gradients(causal, weigh, mask, *arrays):
    """Return the output of `flash`, and gradients of its sum weighted by `weigh`."""
    form = partial(flash, mask=mask, is_causal=causal, **OPTIONS)
    output, pull_back = jax.vjp(form, *arrays)
    return output, pull_back(weigh)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_flash_equal_those_of_the_definition(causal):
    arrays, options = inputs(), CASES[1]
    with jax.enable_x64(True):
        _, gradients = graded(flash, *arrays, is_causal=causal, **options)
        _, wanted = graded(oracles.flash, *arrays, causal=causal, module=jnp, **options)
    every_close(gradients, wanted, 1e-12)


def empty(dtype=jnp.float64):
    return flash_state(B, K, H, V, group_size=GROUP, linear_size=M, dtype=dtype)


@jax.jit
def read(arrays, state, mask, segment_ids=None):
    """Read the next 13 tokens at once."""
    return flash_causal(
        *arrays,
        mask,
        state=state,
        return_state=True,
        segment_ids=segment_ids,
        **OPTIONS,
    )


@jax.jit
def steps(arrays, state):
    """Read the next 13 tokens one by one."""
    options = {name: x for name, x in OPTIONS.items() if name != "group_size"}

    def body(state, now):
        output, state = flash_step(state, *(x[:, None] for x in now), **options)
        return state, output[:, 0]

    times = [jnp.moveaxis(x, 1, 0) for x in arrays]
    state, outputs = jax.lax.scan(body, state, times)
    return jnp.moveaxis(outputs, 0, 1), state


def whole(arrays, **options):
    return oracles.flash(*arrays, causal=True, **OPTIONS, **options)


def test_pieces_and_steps_are_the_whole(x64):
    arrays = inputs(26)
    halves = part(arrays, 0, 13), part(arrays, 13, 26)
    everything = np.ones((1, 1, 1, 13), bool)
    ends = []
    for forms in ((read, read), (read, steps), (steps, steps)):
        outputs, state = [], empty()
        for form, half in zip(forms, halves, strict=True):
            seen = (everything,) if form is read else ()
            output, state = form(half, state, *seen)
            outputs.append(output)
        close(np.concatenate(outputs, axis=1), whole(arrays), 1e-13)
        ends.append(state)
    for end in ends:
        same(end.place, [26 % GROUP] * B)
        for one, other in zip(end, ends[0], strict=True):
            close(one, other, 1e-13)
    assert jax.tree.map(jnp.shape, ends[0]) == jax.tree.map(jnp.shape, empty())


def test_examples_of_different_lengths_go_on_from_their_own_place(x64):
    """Padded after their last token, twice; then both take the same steps."""
    arrays, state = inputs(26), empty()
    done = np.zeros(B, int)
    for lengths in ((13, 2), (0, 6)):
        piece = [np.full((B, 13, *x.shape[2:]), np.nan) for x in arrays]
        for b, (start, count) in enumerate(zip(done, lengths, strict=True)):
            for there, x in zip(piece, arrays, strict=True):
                there[b, :count] = x[b, start : start + count]
        mask = np.arange(13)[None, None, None] < np.reshape(lengths, (B, 1, 1, 1))
        output, state = read(piece, state, mask)
        for b, (start, count) in enumerate(zip(done, lengths, strict=True)):
            wanted = whole(arrays)[b, start : start + count]
            np.testing.assert_allclose(output[b, :count], wanted, 0, 1e-13)
        done += lengths
    same(state.place, [13 % GROUP, 0])
    later = [np.stack([x[b, n : n + 13] for b, n in enumerate(done)]) for x in arrays]
    output, _ = steps(later, state)
    wanted = np.stack([whole(arrays)[b, n : n + 13] for b, n in enumerate(done)])
    close(output, wanted, 1e-13)


def test_the_last_segment_goes_on(x64):
    """The state has only the last segment, whatever ids the padding has."""
    arrays, state = inputs(T + 13), empty()
    ids = np.pad(SEGMENTS, ((0, 0), (0, 13)), mode="edge")
    outputs = []
    for start, stop in ((0, 12), (12, T)):
        mask = (np.arange(13) < stop - start)[None, None, None]
        segments = np.where(mask[:, 0, 0], ids[:, start : start + 13], 77)
        output, state = read(part(arrays, start, start + 13), state, mask, segments)
        outputs.append(output[:, : stop - start])
    output, _ = steps(part(arrays, T, T + 13), state)
    wanted = whole(arrays, segment_ids=ids)
    close(np.concatenate([*outputs, output], axis=1), wanted, 1e-13)


def test_the_future_changes_nothing():
    """Outputs are bitwise equal, and later tokens get no gradient."""
    arrays, everything = single(inputs()), np.ones((B, 1, 1, T), bool)
    other = [np.concatenate([x[:, :10], -3 * x[:, 10:]], 1) for x in arrays]
    weigh = np.zeros((B, T, N, V), np.float32)
    weigh[:, :10] = np.random.default_rng(1).normal(size=(B, 10, N, V))
    one, gradients = outputs_and_gradients(True, weigh, everything, *arrays)
    two, _ = outputs_and_gradients(True, weigh, everything, *other)
    same(one[:, :10], two[:, :10])
    assert np.abs(one[:, 10:] - two[:, 10:]).max() > 0.1
    for gradient in gradients:
        assert gradient[:, :10].any() and not gradient[:, 10:].any()


@pytest.mark.parametrize("causal", [False, True])
def test_hidden_keys_and_other_examples_change_nothing(causal):
    """Hidden keys may be NaN. Rows without keys are zero, and gradients are finite."""
    arrays, mask = single(inputs()), hiding(T)
    mask[1, ..., :9] = False
    hidden = ~mask[:, 0, 0]
    weigh = np.random.default_rng(1).normal(size=(B, T, N, V)).astype(np.float32)
    grade = partial(outputs_and_gradients, causal, weigh, mask)
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
    assert output[1, 9:].any()
    scaled, _ = grade(*(np.stack([x[0], 30 * x[1]]) for x in arrays))
    same(scaled[0], output[0])


def test_bfloat16_is_as_good_as_its_rounding():
    """The part inside a group is rounded before the other part is added: 2⁻⁷."""
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in inputs()]
    form = jitted(flash, is_causal=True, group_size=GROUP)
    output = form(*rounded)
    wanted = form(*(x.astype(jnp.float32) for x in rounded))
    assert output.dtype == jnp.bfloat16
    error = np.abs(np.asarray(output, np.float32) - wanted)
    assert error.max() <= 2**-7 * np.abs(wanted).max()
    prefill = partial(flash_causal, return_state=True)
    output, state = jax.eval_shape(prefill, *rounded)
    now = [x[:, :1] for x in rounded]
    for after in (state, jax.eval_shape(flash_step, state, *now)[1]):
        assert output.dtype == after.key.dtype == jnp.bfloat16
        assert after.sums.dtype == jnp.float32


def test_the_gradient_keeps_no_map():
    """The largest array is a few times an input, or the sums of all groups."""
    length = 1024
    sizes = (16, 16, 16, 16, 32)
    arrays = [np.zeros((1, length, 1, size), np.float32) for size in sizes]

    def loss(*arrays):
        return flash(*arrays, is_causal=True, group_size=64).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2, 3, 4)))(*arrays)
    assert laws._largest(jaxpr.jaxpr) <= 2 * length * 32


def test_float16_weighs_in_float32():
    """relu² of 300 and of 1e-4 do not fit into float16; outputs do."""
    for size, wide in ((16, 1e-3), (1e-2, 1e3)):
        arrays = [
            (np.ones((1, 6, 1, 1)) * x).astype(np.float16) for x in (size, size, wide)
        ]
        nothing = np.zeros_like(arrays[:2])
        wanted = float(arrays[0][0, 0, 0, 0]) ** 4 * float(arrays[2][0, 0, 0, 0])
        both = (
            gau(*arrays, scale=1.0, divisor="count"),
            flash(*arrays[:2], *nothing, arrays[2], scale=1.0, divisor=6),
        )
        for output in both:
            assert output.dtype == np.float16
            close(output, np.full((1, 6, 1, 1), wanted), 2e-3)


def test_the_scale_of_flash_may_be_learned(x64):
    arrays = inputs()

    def total(scale):
        return flash(*arrays, scale=scale, group_size=GROUP).sum()

    slope = jax.jit(jax.grad(total))(0.7)
    near = (total(0.7 + 1e-6) - total(0.7 - 1e-6)) / 2e-6
    np.testing.assert_allclose(slope, near, 1e-7)


def test_divisors_and_scales_may_be_numbers_of_numpy_and_jax():
    arrays = single(SOFTMAX.arrays(3))
    same(gau(*arrays, divisor=jnp.float32(3)), gau(*arrays, divisor=3))
    arrays = single(inputs(3))
    given = {"scale": jnp.float32(0.5), "divisor": np.float32(3), "group_size": 2}
    same(flash(*arrays, **given), flash(*arrays, scale=0.5, divisor=3, group_size=2))


@pytest.mark.parametrize("cut", [np.s_[:0], np.s_[:, :0]], ids=["batch", "time"])
def test_nothing_gives_nothing_and_leaves_the_state(cut):
    arrays = [x[cut] for x in single(inputs(3))]
    segments = np.zeros((B, 3), int)[cut]
    rows = (*arrays[0].shape[:3], V)
    for is_causal, ids in ((False, segments), (True, segments), (True, None)):
        form = partial(flash, is_causal=is_causal, segment_ids=ids, group_size=2)
        output, back = jax.vjp(form, *arrays)
        assert output.shape == rows
        assert [x.shape for x in back(output)] == [x.shape for x in arrays]
    state = jax.tree.map(lambda x: x + 1, empty(jnp.float32))
    state = jax.tree.map(lambda x: x[:0], state) if not len(arrays[0]) else state
    go_on = partial(flash_causal, group_size=GROUP, return_state=True)
    output, after = go_on(*arrays, state=state)
    assert output.shape == rows
    jax.tree.map(same, after, state)


def test_values_may_have_no_size():
    query, key, linear_query, linear_key, value = single(inputs())
    arrays = query, key, linear_query, linear_key, value[..., :0]
    rows = (*query.shape[:3], 0)
    for is_causal in (False, True):
        assert flash(*arrays, is_causal=is_causal, group_size=GROUP).shape == rows
    output, state = flash_causal(*arrays, group_size=GROUP, return_state=True)
    assert output.shape == rows
    assert (state.place == query.shape[1] % GROUP).all()


def test_a_step_without_examples_has_no_rows():
    arrays = [x[:0, :1] for x in single(inputs(3))]
    state = jax.tree.map(lambda x: x[:0], empty(jnp.float32))
    output, after = flash_step(state, *arrays)
    assert output.shape == (0, 1, N, V)
    jax.tree.map(same, after, state)


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
    with pytest.raises(ValueError, match=r"FlashState, got a LinearState of sums \("):
        flash_step(linear_state(B, K, H, V), *(x[:, :1] for x in arrays))
    with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
        flash(*arrays, group_size=0)
    with pytest.raises(ValueError, match="flash: group_size must be an int, got 2.5"):
        flash(*arrays, group_size=2.5)
