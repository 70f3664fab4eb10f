"""Causal functions of QQᵀ: every row is of the function of its prefix's matrix."""

from functools import partial

import jax
import jax.numpy as jnp
import laws
import numpy as np
import oracles
import pytest
from laws import CHUNK, SEGMENTS, B, H, K, N, T, V, close, hiding, same
from split_time import check_split_time

from symjax.attention.causal_matrix_function import (
    matrix_function_causal,
    matrix_function_state,
    matrix_function_step,
)
from symjax.attention.differential import differential
from symjax.attention.matrix_function import matrix_function

COEFFICIENTS = (0.5, -1.0, 0.25, 2.0)
SCALE = 0.03
# Name → (options, the same function of an eigenvalue).
KINDS = {
    "exp": ({"function": "exp"}, np.exp),
    "expm1": ({"function": "expm1"}, np.expm1),
    "resolvent": ({"function": "resolvent"}, lambda x: 1 / (1 + x)),
    "resolventm1": (
        {"function": "resolventm1", "alpha": 0.05},
        lambda x: 1 / (1 - 0.05 * x) - 1,
    ),
    "polynomial": (
        {"function": COEFFICIENTS},
        lambda x: np.polyval(COEFFICIENTS[::-1], x),
    ),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
SERIES = "exp", "polynomial"


def joined(query, key, value, module=np):
    """Return queries and values of N heads that depend on all arrays of a law."""
    wide = [x.astype(module.promote_types(x.dtype, np.float32)) for x in (query, key)]
    groups = query.shape[2] // key.shape[2]
    query = wide[0] + module.repeat(wide[1], groups, axis=2) / 2
    return query, module.repeat(value, groups, axis=2)


class OfPrefixes(laws.Mechanism):
    """A function of the queries and keys of a law. `products` is its kind."""

    @classmethod
    def of_kind(cls, kind):
        options = KINDS[kind][0] | {"scale": SCALE}

        def causal(query, key, value, mask=None, *, chunk_size=CHUNK, **more):
            more |= options | {"mask": mask, "chunk_size": chunk_size}
            return matrix_function_causal(*joined(query, key, value, jnp), **more)

        def step(state, query, key, value):
            arrays = joined(query, key, value, jnp)
            return matrix_function_step(state, *arrays, **options)

        def state(batch, heads, *sizes, **more):
            assert heads == K
            return matrix_function_state(batch, N, *sizes, **options, **more)

        return cls(causal, causal, step, state, kind)

    def oracle(self, query, key, value, *, causal=True, **options):
        arrays = joined(query, key, value)
        function = KINDS[self.products][1]
        return oracles.causal_matrix_function(*arrays, function, SCALE, **options)


MECHANISMS = {kind: OfPrefixes.of_kind(kind) for kind in KINDS}
# Hidden tokens have a zero row here, shapes have one number of heads, and gradients are
# tested below.
OTHER = (
    laws.wrong_shapes_are_named,
    laws.gradients_equal_those_of_the_definition,
    laws.nothing_of_size_T_T_or_T_M_V_is_kept,
)


@pytest.mark.parametrize(
    "law", [x for x in laws.CAUSAL_LAWS if x not in OTHER], ids=lambda law: law.__name__
)
@pytest.mark.parametrize("kind", ["exp", "resolvent"])
def test_a_causal_function_obeys(law, kind):
    law(MECHANISMS[kind])


@pytest.mark.parametrize("kind", ["expm1", "resolventm1", "polynomial"])
@pytest.mark.parametrize(
    "law",
    [laws.segments_do_not_see_each_other, laws.a_prefill_goes_on_in_chunks_and_steps],
    ids=lambda law: law.__name__,
)
def test_other_functions_obey(law, kind):
    law(MECHANISMS[kind])


def inputs(length=T, heads=N, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (B, length, heads, H), (B, length, heads, V)
    return tuple(rng.normal(size=shape) for shape in shapes)


def decays(length=T, heads=N):
    return -0.2 * np.random.default_rng(7).random((B, length, heads))


def single(*arrays):
    return tuple(x.astype(np.float32) for x in arrays)


def by_tokens(kind, scale, query, value, log_decay):
    """Compute the rows by a function [H H] of each M_t, as differentiable by jax."""

    def g_times(matrix, x):
        """Return (f(A) − f(0))/A x."""
        if kind.startswith("exp"):
            block = jnp.zeros((H + 1, H + 1)).at[:H, :H].set(matrix).at[:H, H].set(x)
            return jax.scipy.linalg.expm(block)[:H, H]
        if kind.startswith("resolvent"):
            alpha = KINDS[kind][0].get("alpha", -1.0)
            return alpha * jnp.linalg.solve(jnp.eye(H) - alpha * matrix, x)
        powers = [x]
        for _ in COEFFICIENTS[2:]:
            powers.append(matrix @ powers[-1])
        return sum(a * x for a, x in zip(COEFFICIENTS[1:], powers, strict=True))

    def token(state, now):
        query, value, log_decay = now
        left = jnp.exp(log_decay)
        moments = left * state[0] + jnp.outer(query, query)
        sums = left * state[1] + jnp.outer(query, value)
        reached = scale * g_times(scale * moments, query) @ sums
        return (moments, sums), KINDS[kind][1](0.0) * value + reached

    def head(*arrays):
        start = jnp.zeros((H, H)), jnp.zeros((H, V))
        return jax.lax.scan(token, start, arrays)[1]

    heads = jax.vmap(head, in_axes=1, out_axes=1)
    return jax.vmap(heads)(query, value, log_decay)


def graded(form, *arrays):
    """Return the output and the gradients of a weighted sum of it."""

    def loss(*arrays):
        output = form(*arrays)
        weigh = np.random.default_rng(1).normal(size=output.shape)
        return (output * weigh).sum(), output

    gradients, output = jax.jit(jax.grad(loss, range(len(arrays)), has_aux=True))(
        *arrays
    )
    return jax.tree.map(np.asarray, (output, *gradients))


def stepwise(options, query, value, log_decay):
    def token(state, now):
        query, value, log_decay = (x[:, None] for x in now)
        fixed = "resolvent" in str(options) or options.get("normalise") == "l2"
        more = {} if fixed else {"log_decay": log_decay}
        output, state = matrix_function_step(state, query, value, **options, **more)
        return state, output[:, 0]

    state = matrix_function_state(B, query.shape[2], H, V, **options, dtype=query.dtype)
    moved = [jnp.moveaxis(x, 1, 0) for x in (query, value, log_decay)]
    return jnp.moveaxis(jax.lax.scan(token, state, tuple(moved))[1], 0, 1)


@every_kind
def test_2048_tokens_are_the_functions_of_all_prefixes_in_float64(kind, x64):
    """Chunks, steps and the definition agree to 1e-9, and so do all gradients."""
    length, heads, scale = 2048, 2, 3 / 2048
    arrays = inputs(length, heads)
    fades = kind in SERIES
    rates = decays(length, heads) / 20 * fades
    options = KINDS[kind][0] | {"scale": scale}
    definition = oracles.causal_matrix_function(
        *(x[:1, :, :1] for x in arrays),
        KINDS[kind][1],
        scale,
        log_decay=rates[:1, :, :1],
    )

    def chunked(query, value, log_decay):
        more = {"log_decay": log_decay} if fades else {}
        return matrix_function_causal(query, value, **options, **more)

    wanted = graded(partial(by_tokens, kind, scale), *arrays, rates)
    close(wanted[0][:1, :, :1], definition, 1e-11)
    for form in (chunked, partial(stepwise, options)):
        found = graded(form, *arrays, rates)
        for one, two in zip(found[: 3 + fades], wanted, strict=False):
            close(one, two, 1e-9)


@pytest.mark.parametrize("kind", SERIES)
def test_decays_hidden_tokens_and_segments_go_together(kind, x64):
    arrays, mask, rates = inputs(), hiding(T), decays()
    options = {"mask": mask, "segment_ids": SEGMENTS, "log_decay": rates}
    wanted = oracles.causal_matrix_function(*arrays, KINDS[kind][1], SCALE, **options)
    more = KINDS[kind][0] | {"scale": SCALE, "chunk_size": 8}
    close(matrix_function_causal(*arrays, **options, **more), wanted, 1e-12)
    shared = rates[0, 0]
    everywhere = np.broadcast_to(shared, rates.shape)
    found = matrix_function_causal(*arrays, **more, log_decay=shared)
    wanted = matrix_function_causal(*arrays, **more, log_decay=everywhere)
    close(found, np.asarray(wanted), 1e-12)


SIZED = [
    *((kind, normalise) for kind in KINDS for normalise in ("rows", "l2")),
    *(("ones_plus", normalise) for normalise in ("none", "rows", "l2")),
]


@pytest.mark.parametrize(("kind", "normalise"), SIZED)
def test_rows_are_divided_by_their_sum_or_length(kind, normalise, x64):
    """In chunks with hidden tokens and segments, and in steps."""
    options, function = KINDS.get(kind, ({"function": kind}, kind))
    options = options | {"normalise": normalise, "scale": SCALE}
    arrays, given = inputs(), {"mask": hiding(T), "segment_ids": SEGMENTS}
    found = matrix_function_causal(*arrays, **options, **given, chunk_size=8)
    more = {"normalise": normalise}
    wanted = oracles.causal_matrix_function(*arrays, function, SCALE, **given, **more)
    close(found, wanted, 1e-11)
    found = jax.jit(partial(stepwise, options))(*arrays, np.zeros((B, T, N)))
    wanted = oracles.causal_matrix_function(*arrays, function, SCALE, **more)
    close(found, wanted, 1e-11)


def test_gradients_of_normalised_rows_are_finite_with_hidden_tokens():
    query, value = single(*inputs())
    for kind, normalise in SIZED[::2]:
        options = KINDS.get(kind, ({"function": kind}, None))[0]
        options = options | {"normalise": normalise, "scale": SCALE}

        def loss(query, value, options=options):
            return matrix_function_causal(query, value, **options, mask=hiding(T)).sum()

        gradients = jax.grad(loss, (0, 1))(query, value)
        assert all(np.isfinite(x).all() for x in gradients)


@every_kind
def test_the_last_row_is_that_of_the_bidirectional_form(kind, x64):
    arrays = inputs()
    options = KINDS[kind][0] | {"scale": SCALE}
    causal = matrix_function_causal(*arrays, **options)
    whole = matrix_function(*arrays, **options)
    close(causal[:, -1], np.asarray(whole[:, -1]), 1e-12)


@every_kind
def test_the_row_of_a_hidden_token_is_zero(kind):
    query, value = single(*inputs())
    mask = hiding(T)
    hidden = ~mask[:, 0, 0]
    query[hidden], value[hidden] = np.nan, np.inf
    options = KINDS[kind][0] | {"scale": SCALE, "mask": mask, "chunk_size": CHUNK}
    output, state = matrix_function_causal(query, value, **options, return_state=True)
    same(output[hidden], np.zeros((hidden.sum(), N, V)))
    assert all(np.isfinite(x).all() for x in (output, *state))


@pytest.mark.parametrize("kind", ["exp", "resolvent"])
def test_time_split_over_devices_changes_nothing(kind):
    """Output and gradients, with hidden tokens and segments that cross devices."""
    length, devices = 20, 5
    arrays = single(*inputs(length))
    given = {
        "mask": hiding(length),
        "segment_ids": np.repeat([[0, 1, 1, 2], [3, 3, 3, 3]], 5, axis=1),
    }
    options = KINDS[kind][0] | {"scale": SCALE}
    weigh = np.random.default_rng(1).normal(size=(B, length, N, V)).astype(np.float32)
    form = partial(matrix_function_causal, **options)
    check_split_time(form, arrays, weigh, devices, given)


@pytest.mark.parametrize(("largest", "dtype"), [(55.0, np.float64), (80.0, np.float32)])
def test_an_exponential_is_exact_or_nothing(largest, dtype, x64):
    """Up to the stated eigenvalue; a row whose series has not converged is NaN."""
    query, value = inputs()
    scale = largest / np.linalg.norm(query, 2, axis=(1, 3)).max() ** 2
    wanted = oracles.causal_matrix_function(query, value, np.exp, scale)
    form = partial(matrix_function_causal, *(x.astype(dtype) for x in (query, value)))
    close(form("exp", scale=scale), wanted, 200 * np.finfo(dtype).eps)
    beyond = np.asarray(form("exp", scale=scale * 5))
    exact = oracles.causal_matrix_function(query, value, np.exp, scale * 5)
    assert np.isnan(beyond).any() and not np.isnan(beyond).all()
    error = np.abs(beyond - exact) / np.abs(exact).max(axis=-1, keepdims=True)
    assert np.nanmax(error) < 1000 * np.finfo(dtype).eps


@pytest.mark.parametrize("largest", [1e-20, 1e-6, 1e-3, 0.1, 3.0, 12.0])
def test_terms_that_are_left_out_are_below_rounding(largest):
    """Also where a row is nearly orthogonal to the rows of the large eigenvalue.

    The first terms of such a row are small, and later ones are not.
    """
    query, value = single(*inputs())
    query[:, :, :, 0] *= 0.05
    query[:, -1] = 0
    query[:, -1, :, 0] = 1e-3
    scale = largest / np.linalg.norm(query, 2, axis=(1, 3)).max() ** 2
    wide = [x.astype(np.float64) for x in (query, value)]
    for kind in ("exp", "expm1"):
        wanted = oracles.causal_matrix_function(*wide, KINDS[kind][1], scale)
        found = matrix_function_causal(query, value, kind, scale=scale)
        scales = np.abs(wanted).max(axis=-1, keepdims=True)
        assert (np.abs(found - wanted) <= 100 * np.finfo(np.float32).eps * scales).all()


def test_a_resolvent_beyond_its_pole_is_not_a_number():
    query, value = single(*inputs())
    scale = 1 / np.linalg.norm(query, 2, axis=(1, 3)).min() ** 2
    options = {"scale": scale, "alpha": 1.5, "chunk_size": 1}
    output = matrix_function_causal(query, value, "resolvent", **options)
    assert np.isfinite(output[:, 0]).all() and np.isnan(output[:, -1]).all()


def test_coefficients_and_alpha_can_be_learned(x64):
    query, value = inputs()

    def loss(parameter, kind):
        options = {"function": parameter} if kind == "polynomial" else KINDS[kind][0]
        options = dict(
            options, **({} if kind == "polynomial" else {"alpha": parameter})
        )
        return matrix_function_causal(query, value, **options, scale=SCALE).sum()

    step = 1e-5
    for kind, start in (("polynomial", jnp.array(COEFFICIENTS)), ("resolvent", -1.0)):
        slope = jax.grad(loss)(start, kind)
        ahead, behind = (loss(start + x, kind) for x in (step, -step))
        wanted = (ahead - behind) / (2 * step)
        np.testing.assert_allclose(np.sum(slope), wanted, rtol=1e-7)


def test_differential_subtracts_two_functions():
    query, value = inputs()
    value, lam = value[:, :, : N // 2], 0.4
    one, two = (
        oracles.causal_matrix_function(query[:, :, b::2], value, np.exp, SCALE)
        for b in (0, 1)
    )

    def attend(query, key, value, **options):
        return matrix_function_causal(query, value, "exp", scale=SCALE, **options)

    arrays = single(query, query, value)
    output = differential(*arrays, lam, attend=attend)
    close(output, one - lam * two, 5e-6)


def test_what_does_not_fit_is_named():
    query, value = single(*inputs())
    run = partial(matrix_function_causal, scale=SCALE)
    for wrong in (value[:, :, :2], value[:, :9], value[:1], value[0]):
        with pytest.raises(ValueError) as refusal:
            run(query, wrong, "exp")
        assert str(query.shape) in str(refusal.value)
        assert str(wrong.shape) in str(refusal.value)
    with pytest.raises(ValueError, match="log_decay is not possible with.*resolvent"):
        run(query, value, "resolvent", log_decay=np.zeros(N))
    with pytest.raises(ValueError, match="log_decay is not possible with normalise"):
        run(query, value, "exp", log_decay=np.zeros(N), normalise="l2")
    with pytest.raises(ValueError, match="log_decay must have one number per head"):
        run(query, value, "exp", log_decay=np.zeros((B, T, N, H)))
    with pytest.raises(ValueError, match="'log' is unknown"):
        run(query, value, "log")
    with pytest.raises(ValueError, match="scale must be positive.* -1"):
        matrix_function_causal(query, value, "exp", scale=-1.0)
    with pytest.raises(TypeError, match="scale"):
        matrix_function_causal(query, value, "exp")
    state = matrix_function_state(B, N, H, V, "exp")
    with pytest.raises(ValueError, match="need a MesaState.*MatrixFunctionState"):
        run(query, value, "resolvent", state=state)
    with pytest.raises(ValueError, match="a step takes one token"):
        matrix_function_step(state, query, value, "exp", scale=SCALE)
