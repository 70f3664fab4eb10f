"""Functions of QQᵀ against the eigenvalues of the matrix [T T]."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from laws import close, same

from symjax import attention
from symjax.attention.matrix_function import FUNCTIONS

B, T, N, H, V = 2, 13, 3, 5, 7
COEFFICIENTS = (0.5, -1.0, 0.25, 2.0)
# Name → (function of a matrix, the same as a function of an eigenvalue).
KINDS = {
    "exp": (dict(function="exp"), np.exp),
    "expm1": (dict(function="expm1"), np.expm1),
    "resolvent": (dict(function="resolvent"), lambda x: 1 / (1 + x)),
    "resolventm1": (
        dict(function="resolventm1", alpha=0.3),
        lambda x: 1 / (1 - 0.3 * x) - 1,
    ),
    "polynomial": (
        dict(function=COEFFICIENTS),
        lambda x: np.polyval(COEFFICIENTS[::-1], x),
    ),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(B, T, N, H)), rng.normal(size=(B, T, N, V))


def hiding():
    mask = np.random.default_rng(5).random((B, 1, 1, T)) < 0.7
    mask[0, 0, 0, [0, -1]] = False
    return mask


@cache
def compiled(kind):
    return jax.jit(partial(attention.matrix_function, **KINDS[kind][0]))


def single(*arrays):
    return [x.astype(np.float32) for x in arrays]


@every_kind
def test_it_equals_its_definition(kind):
    """Hidden tokens are absent: their rows are zero, and their content is not read."""
    query, value = inputs()
    mask, function = hiding(), KINDS[kind][1]
    hidden = ~mask[:, 0, 0]
    every = np.ones_like(mask)
    close(
        compiled(kind)(*single(query, value), mask=every),
        oracles.matrix_function(query, value, function),
        2e-6,
    )
    wanted = oracles.matrix_function(query, value, function, mask=mask)
    query[hidden], value[hidden] = np.nan, np.inf
    output = compiled(kind)(*single(query, value), mask=mask)
    close(output, wanted, 2e-6)
    assert not output[hidden].any()


SIZED = [
    *((kind, normalise) for kind in KINDS for normalise in ("rows", "l2")),
    *(("ones_plus", normalise) for normalise in ("none", "rows", "l2")),
]


@pytest.mark.parametrize(("kind", "normalise"), SIZED)
def test_rows_are_divided_by_their_sum_or_length(kind, normalise, x64):
    query, value = inputs()
    options, function = KINDS.get(kind, ({"function": kind}, kind))
    for more in ({}, {"mask": hiding()}):
        more = more | {"normalise": normalise, "scale": 0.1}
        found = attention.matrix_function(query, value, **options, **more)
        wanted = oracles.matrix_function(query, value, function, **more)
        close(found, wanted, 1e-11)


def test_the_figures_of_the_page(x64):
    """What the maps of 256 random queries lack."""
    query = np.random.default_rng(0).normal(size=(1, 256, 1, 16))
    identity, least = np.eye(256)[None, :, None], 1 / (256 * 16**0.5)

    def weights(*arguments, **options):
        found = attention.matrix_function(query, identity, *arguments, **options)
        return np.asarray(found)[0, :, 0]

    sums = weights("exp", scale=16 * least).sum(axis=1)
    np.testing.assert_allclose([sums.min(), sums.max()], [-114, 153], atol=0.5)
    options = {"scale": 4 * least}
    assert 0.49 < (weights("exp", **options) < 0).mean() < 0.5
    divided = weights("exp", normalise="rows", **options)
    np.testing.assert_allclose(np.abs(divided).max(), 16, atol=0.5)
    divided = weights("exp", normalise="l2", **options)
    np.testing.assert_allclose(np.diag(divided).mean(), 0.92, atol=0.006)
    assert np.abs(weights("ones_plus", scale=0.25) - 1).max() < 2e-4
    largest = np.abs(weights("ones_plus", scale=least) - 1).max()
    np.testing.assert_allclose(largest, 0.033, atol=5e-4)
    causal = attention.matrix_function_causal
    rows = np.asarray(causal(query, identity, "ones_plus", scale=least))[0, :, 0]
    early, last = rows[31, :32], rows[255]
    np.testing.assert_allclose([early.min(), early.max()], [0.73, 1.41], atol=0.006)
    assert last.min() > 0.99 and last.max() < 1.01


def test_a_call_outside_jit_compiles_once(compilations):
    query, value = single(*inputs())
    attention.matrix_function(query, value, "exp")
    compilations.clear()
    attention.matrix_function(query, value, "exp")
    assert not compilations
    attention.matrix_function(query[:, :-1], value[:, :-1], "exp")
    assert compilations


@every_kind
def test_large_scores_lose_no_accuracy(kind):
    """Eigenvalues up to 40: e^A reaches 2e17, and a rounded A is off by 2e-6.

    An eigenvalue is close to the pole of the resolvent: float32 allows ε times the
    condition number.
    """
    query, value = inputs()
    scale = 40 / np.linalg.norm(query, 2, axis=(1, 3)).max() ** 2
    wanted = oracles.matrix_function(query, value, KINDS[kind][1], scale)
    output = compiled(kind)(*single(query, value), scale=jnp.float32(scale))
    tolerance = 1e-5
    if kind == "resolventm1":
        gram = scale * np.einsum("btnh,bsnh->bnts", query, query)
        system = np.eye(T)[None, None] - KINDS[kind][0]["alpha"] * gram
        tolerance = 2**-23 * np.linalg.cond(system).max()  # 7e-5
    close(output, wanted, tolerance)


def queries_of(case):
    """Return Q whose QᵀQ has repeated eigenvalues."""
    query = np.zeros((B, T, N, H))
    if case == "orthonormal":
        query[:, :H] = np.eye(H)[None, :, None]
    elif case == "rank 2":
        query[..., :2] = inputs()[0][..., :2]
    elif case == "random":
        query = inputs()[0]
    return query


@pytest.mark.parametrize("kind", ["exp", "resolvent", "polynomial"])
def test_gradients_are_exact_at_repeated_eigenvalues(kind, x64):
    """Against central differences of the definition, in float64."""
    value, weigh = inputs()[1], np.random.default_rng(1).normal(size=(B, T, N, V))
    scale, step = 0.3, 1e-5

    @jax.jit
    def gradient(query, value):
        def loss(query, value):
            options = KINDS[kind][0] | dict(scale=scale)
            return (attention.matrix_function(query, value, **options) * weigh).sum()

        return jax.grad(loss, (0, 1))(query, value)

    def definition(*arrays):
        return (oracles.matrix_function(*arrays, KINDS[kind][1], scale) * weigh).sum()

    for case in ("zero", "orthonormal", "rank 2", "random"):
        arrays = queries_of(case), value
        found = gradient(*arrays)
        if case == "zero":  # f(QQᵀ) is even in Q
            same(found[0], np.zeros_like(value[..., :H]))
        for seed in range(3):
            direction = inputs(seed + 10)
            ahead, behind = (
                [x + sign * step * d for x, d in zip(arrays, direction, strict=True)]
                for sign in (1, -1)
            )
            wanted = (definition(*ahead) - definition(*behind)) / (2 * step)
            slope = sum((x * d).sum() for x, d in zip(found, direction, strict=True))
            size = sum(np.abs(x).max() for x in found) * value.size
            assert abs(slope - wanted) < 1e-9 * size, case


def matrix(kind, query):
    """Return f(A), as its product with the identity, and A."""
    query = query[:1, :, :1]
    identity = np.eye(T)[None, :, None]
    output = compiled(kind)(query, identity, scale=1.0)
    return np.asarray(output)[0, :, 0], query[0, :, 0] @ query[0, :, 0].T


def test_ranks_and_signs_of_the_matrices(x64):
    """e^A has full rank and negative entries; e^A − I has low rank."""
    rank = partial(np.linalg.matrix_rank, tol=1e-9)
    query = inputs()[0] / 2
    exponential, product = matrix("exp", query)
    less, _ = matrix("expm1", query)
    close(exponential - np.eye(T), less, 1e-13)
    assert rank(product) == rank(less) == H
    assert rank(exponential) == rank(np.exp(product)) == T
    assert exponential.min() < -0.01


def test_a_power_needs_no_large_matrix(x64):
    """Aᵏ = Q (QᵀQ)ᵏ⁻¹ Qᵀ."""
    query, value = inputs()
    power = np.einsum("btnh,bsnh->bnts", query, query)
    wanted = np.einsum("bnts,bsnv->btnv", np.linalg.matrix_power(power, 3), value)
    output = attention.matrix_function(query, value, (0, 0, 0, 1), scale=1.0)
    close(output, wanted, 1e-13)
    close(attention.matrix_function(query, value, (2.0,)), 2 * value, 1e-15)


def test_by_default_neither_length_nor_repetition_matters():
    """The scale is 1/(n √H), so repeating every token changes nothing."""
    query, value = single(*inputs())
    mask = np.arange(2 * T)[None, None, None] < T
    once = compiled("expm1")(query, value)
    twice = compiled("expm1")(*(np.concatenate([x, x], 1) for x in (query, value)))
    close(twice[:, :T], once, 2e-6)
    close(twice[:, T:], once, 2e-6)
    padded = [np.concatenate([x, 9 * x], 1) for x in (query, value)]
    close(compiled("expm1")(*padded, mask=mask)[:, :T], once, 2e-6)


def test_coefficients_can_be_learned():
    query, value = single(*inputs())

    def loss(coefficients):
        return attention.matrix_function(query, value, coefficients).sum()

    slope = jax.jit(jax.grad(loss))(jnp.array(COEFFICIENTS))
    wanted = [
        oracles.matrix_function(*inputs(), lambda x, k=k: x**k).sum()
        for k in range(len(COEFFICIENTS))
    ]
    np.testing.assert_allclose(slope, wanted, rtol=1e-4)


@every_kind
def test_the_rest_of_the_batch_changes_nothing(kind):
    query, value = single(*inputs())
    other = [np.stack([x[0], 3 * x[1]]) for x in (query, value)]
    one, two = (compiled(kind)(*x, scale=0.1)[0] for x in ((query, value), other))
    same(one, two)


@every_kind
def test_bfloat16_is_as_good_as_its_rounding(kind):
    rounded = [x.astype(jnp.bfloat16) for x in inputs()]
    output = compiled(kind)(*rounded)
    assert output.dtype == jnp.bfloat16
    wanted = oracles.matrix_function(*(np.float64(x) for x in rounded), KINDS[kind][1])
    error = np.abs(np.float64(output) - wanted)
    assert (error <= 2**-8 * np.abs(wanted) + 1e-5).all()


@every_kind
def test_nothing_of_size_T_T_is_made(kind):
    """Neither forward nor backward: every array is one of the inputs' size or less."""
    length = 1021

    def loss(query, value):
        options = KINDS[kind][0]
        return attention.matrix_function(query, value, **options).sum()

    shapes = [(B, length, N, size) for size in (H, V)]
    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(*map(jnp.zeros, shapes))
    found = re.findall(r"\w\d+\[([\d,]+)\]", str(jaxpr))
    sizes = [np.prod([int(size) for size in shape.split(",")]) for shape in found]
    assert max(sizes) == B * length * N * V


def test_wrong_shapes_and_names_are_named():
    query, value = single(*inputs())
    run = attention.matrix_function
    for wrong in (value[:, :, :2], value[:, :9], value[:1], value[0]):
        with pytest.raises(ValueError) as refusal:
            run(query, wrong, "exp")
        assert str(query.shape) in str(refusal.value)
        assert str(wrong.shape) in str(refusal.value)
    for shape in ((B, 1, T, T), (B, N, 1, T), (B, 1, 1, T - 1)):
        with pytest.raises(ValueError) as refusal:
            run(query, value, "exp", np.ones(shape, bool))
        assert str(shape) in str(refusal.value)
    with pytest.raises(ValueError, match="'log'.*" + ", ".join(FUNCTIONS)):
        run(query, value, "log")
    for nothing in ((), 3.0, ((1.0,),)):
        with pytest.raises(ValueError, match="coefficients"):
            run(query, value, nothing)
    for function in ("exp", COEFFICIENTS):
        with pytest.raises(ValueError, match="alpha"):
            run(query, value, function, alpha=0.5)
    with pytest.raises(ValueError, match="scale of ones_plus must be positive.* 0.0"):
        attention.matrix_function(query, value, "ones_plus", scale=0.0)
    with pytest.raises(ValueError, match="normalise 'l1' is unknown.*none, rows, l2"):
        run(query, value, "exp", normalise="l1")
    with pytest.raises(ValueError, match=re.escape(str((B, T)))):
        run(query, value, "exp", segment_ids=np.zeros((B, T), int))
    with pytest.raises(TypeError, match="is_causal"):
        run(query, value, "exp", is_causal=True)
    with pytest.raises(ValueError, match="query must be .*floating.*int"):
        run(query.astype(int), value, "exp")


@every_kind
def test_nothing_gives_nothing(kind):
    query, value = single(*inputs())
    for cut in (np.s_[:0], np.s_[:, :0]):
        output = jax.eval_shape(compiled(kind), query[cut], value[cut])
        assert output.shape == value[cut].shape
