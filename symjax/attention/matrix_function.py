"""Functions of the matrix QQᵀ: the exponential, the resolvent, polynomials.

    def matrix_function(q, v, f):            # one head: q [T H], v [T V], f of numbers
        scale = 1 / (len(q) * q.shape[-1] ** 0.5)
        values, vectors = np.linalg.eigh(scale * q @ q.T)
        return vectors @ (f(values)[:, None] * (vectors.T @ v))

With A = scale · QQᵀ and M = scale · QᵀQ, the powers of A are Aᵏ = scale · Q Mᵏ⁻¹ Qᵀ. So
f(A) = f(0) I + scale · Q g(M) Qᵀ with g(λ) = (f(λ) − f(0))/λ, and no [T T] matrix is
formed. g is computed without eigenvectors and without a division by λ, so that
gradients exist if eigenvalues repeat or are 0.

`FUNCTIONS` has f(0) and a function that multiplies by g(M), by name of f.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.arguments import (
    as_array,
    check_arrays,
    check_choice,
    check_number,
    check_positive,
    shown,
)
from symjax.attention.core.meshes import on_any_mesh, spec_of_rows
from symjax.attention.core.products import einsum, over, over_root
from symjax.attention.recurrent.arguments import check_mask

# With these constants `_exponential` is exact to rounding for eigenvalues above −3500
# in float64, and above −20,000 in float32.
DOUBLINGS, TERMS = 14, 10
NORMALISE = "none", "rows", "l2"  # divisors of a row of f(A)


def matrix_function(
    query: Float[Array, "B T N H"],
    value: Float[Array, "B T N V"],
    function: str | Sequence[float] | Float[Array, "degree+1"],
    mask: Bool[Array, "B 1 1 T"] | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    alpha: float | Float[Array, ""] | None = None,
    normalise: str = "none",
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T N V"]:
    """Return f(A) V, where A = scale · QQᵀ is the matrix of all scores.

    exp            e^A
    expm1          e^A − I
    resolvent      (I − αA)⁻¹
    resolventm1    (I − αA)⁻¹ − I
    ones_plus      1 + A/‖A‖², entry by entry; ‖A‖² is the sum of all squared scores
    (a₀, a₁, …)    a₀ I + a₁ A + a₂ A² + …

    Rows of f(A) may have negative entries, and they sum to 1 only with normalise
    "rows". The rank of f(A) − f(0) I is at most H, and H + 1 for ones_plus. e^A has
    full rank. `matrix_function_causal` is the causal form.

    Time O(T H (H + V)), plus O(H² V) per degree of a polynomial, or O(H² (H + V)) for
    exponentials and resolvents. Sums run in float32 at least. No ε is added.

    Args:
        function: a name, or the coefficients of a polynomial, which may be learned.
        mask: False hides a token. A hidden token changes no other row, and its own row
            is zero.
        scale: None means 1 / (n √H) for n visible tokens. Eigenvalues then do not grow
            with T, and are at most the largest |q|²/√H. e^A overflows float32 if an
            eigenvalue is above 88. ones_plus needs a scale above 0.
        alpha: α of the resolvents. None means −1: the output is V minus its ridge
            regression on Q, which exists for any Q. With a positive α keep α times the
            largest eigenvalue below 1, which is not checked.
        normalise: "rows" divides every row of f(A) by its sum, "l2" by its Euclidean
            length, "none" by nothing. A row whose sum or length is 0 is zero. Sums may
            be near 0, since entries have both signs.
    Raises:
        ValueError: shapes that do not fit; an unknown function; ones_plus with a scale
            that is not above 0; alpha with a function that is no resolvent; a mask that
            hides pairs; segment_ids, since each segment would need another matrix.
    Source: Courtois et al. 2024, arXiv:2406.06366 (the rank of QQᵀ); Higham 2008,
        Functions of Matrices, chapter 1.
    """
    _check(query, value, mask, segment_ids)
    check_number("matrix_function", "scale", scale)
    name, parameter = parsed_function("matrix_function", function, alpha)
    check_choice("matrix_function", "normalise", normalise, NORMALISE)
    if name == "ones_plus":  # `with_ones` divides by √scale
        check_positive("matrix_function", "scale of ones_plus", scale)
    operands = SpectralOperands(query, value, parameter, scale, mask)
    return _rows(name, normalise, operands)


class SpectralOperands(NamedTuple):
    """Arrays of one call."""

    query: Float[Array, "B T N H"]
    value: Float[Array, "B T N V"]
    parameter: Any  # α of a resolvent, or the coefficients of a polynomial
    scale: float | Float[Array, ""] | None
    mask: Bool[Array, "B 1 1 T"] | None


@on_any_mesh("name", "normalise", specs=spec_of_rows)
def _rows(
    name: str | None, normalise: str, operands: SpectralOperands
) -> Float[Array, "B T N V"]:
    """Return f(A) V; f is a polynomial if `name` is None."""
    query, value, parameter, scale, mask = operands
    wide = jnp.promote_types(jnp.result_type(query, value), jnp.float32)
    parameter = jax.tree.map(lambda x: jnp.asarray(x, wide), parameter)
    rows, columns = query.astype(wide), value.astype(wide)
    visible = jnp.asarray(query.shape[1], wide)
    if mask is not None:
        seen = jnp.broadcast_to(mask, (query.shape[0], 1, 1, query.shape[1]))
        visible = jnp.maximum(seen.sum(axis=-1, keepdims=True), 1).astype(wide)
    scale = 1 / (visible * query.shape[-1] ** 0.5) if scale is None else scale
    scale = jnp.asarray(scale, wide)
    if name == "ones_plus":
        rows = with_ones(rows, scale)
    if normalise == "rows":
        columns = with_ones(columns)
    if mask is not None:
        seen = jnp.moveaxis(seen, -1, 1)
        rows, columns = jnp.where(seen, rows, 0), jnp.where(seen, columns, 0)
    scaled = rows * scale
    gram = einsum("btnh,btng->bnhg", scaled, rows)
    if name is None:
        constant, product = parameter[0], _polynomial
    else:
        constant, product = FUNCTIONS[name]

    def reach(columns: Array) -> Array:
        """Return (f(A) − f(0) I) columns."""
        weighted = einsum("btnh,btnv->bnhv", scaled, columns)
        return einsum("btnh,bnhv->btnv", rows, product(gram, weighted, parameter))

    output = constant * columns + reach(columns)
    if normalise == "rows":
        output = over(output[..., :-1], output[..., -1:])
    elif normalise == "l2":
        identity = jnp.broadcast_to(jnp.eye(rows.shape[-1], dtype=wide), gram.shape)
        scores = einsum("btnh,bnhg->btng", rows, product(gram, identity, parameter))
        within = 2 * constant * scaled + einsum("btnh,bnhg->btng", scores, gram) * scale
        squares = constant**2 + (scores * within).sum(axis=-1, keepdims=True)
        output = over_root(output, squares)
    return output.astype(value.dtype)


def with_ones(x: Float[Array, "B T N H"], scale: Array | float = 1.0) -> Array:
    """Return x with one more channel, 1/√scale.

    If x are queries, this channel adds 1 to every entry of scale · QQᵀ.
    """
    one = jnp.broadcast_to(jnp.asarray(scale, x.dtype) ** -0.5, (*x.shape[:-1], 1))
    return jnp.concatenate([x, one], axis=-1)


def parsed_function(who: str, function: Any, alpha: Any) -> tuple[str | None, Any]:
    """Return a function's name and alpha, or None and a polynomial's coefficients.

    Raises:
        ValueError: the function is unknown, or alpha is given and the function is no
            resolvent.
    """
    check_number(who, "alpha", alpha)
    if isinstance(function, str):
        if function not in FUNCTIONS:
            raise ValueError(
                f"{who}: function {function!r} is unknown: choose from "
                f"{', '.join(FUNCTIONS)}, or give the coefficients of a polynomial"
            )
        if FUNCTIONS[function][1] is _resolvent:
            return function, -1.0 if alpha is None else alpha
        name, parameter = function, None
    else:
        name = None
        parameter = as_array(who, "function", function)
        if parameter.ndim != 1 or not parameter.size:
            raise ValueError(
                f"{who}: the coefficients of a polynomial are a₀, a₁, …, got shape "
                f"{parameter.shape}"
            )
    if alpha is not None:
        raise ValueError(
            f"{who}: alpha belongs to a resolvent, got function {function!r}"
        )
    return name, parameter


def _exponential(gram: Array, weighted: Array, _: None) -> Array:
    """Return g(M) W for g(λ) = (e^λ − 1)/λ.

    A Taylor series gives g(M/2ᵏ). Its argument is doubled k times: with E = e^M − I,
    g(2M) = g(M)(I + E/2) and e^2M − I = E² + 2E. The error in float32 is at most 3e-6
    up to λ = 80.
    """
    small = gram / 2**DOUBLINGS
    identity = jnp.broadcast_to(jnp.eye(gram.shape[-1], dtype=gram.dtype), gram.shape)
    series = identity
    for degree in range(TERMS, 1, -1):
        series = identity + einsum("bnhg,bngk->bnhk", small, series) / degree

    def double(_: int, pair: tuple[Array, Array]) -> tuple[Array, Array]:
        minus_one, product = pair  # e^M − I and g(M) W
        product = product + einsum("bnhg,bngv->bnhv", minus_one, product) / 2
        square = einsum("bnhg,bngk->bnhk", minus_one, minus_one)
        return square + 2 * minus_one, product

    start = (
        einsum("bnhg,bngk->bnhk", small, series),
        einsum("bnhg,bngv->bnhv", series, weighted),
    )
    return jax.lax.fori_loop(0, DOUBLINGS, double, start)[1]


def _resolvent(gram: Array, weighted: Array, alpha: Array) -> Array:
    """Return g(M) W for g(λ) = α/(1 − αλ)."""
    identity = jnp.broadcast_to(jnp.eye(gram.shape[-1], dtype=gram.dtype), gram.shape)
    return jnp.linalg.solve(identity - alpha * gram, alpha * weighted)


def _polynomial(gram: Array, weighted: Array, coefficients: Array) -> Array:
    """Return g(M) W for g(λ) = a₁ + a₂ λ + a₃ λ² + …, by Horner's rule."""
    total = jnp.zeros_like(weighted)
    for coefficient in reversed(jnp.unstack(coefficients)[1:]):
        total = einsum("bnhg,bngv->bnhv", gram, total) + coefficient * weighted
    return total


def _ones_plus(gram: Array, weighted: Array, _: None) -> Array:
    """Return W divided by ‖A‖², except for its last row.

    This row belongs to the channel that `with_ones` has added to the queries.
    """
    squares = (gram[..., :-1, :-1] ** 2).sum(axis=(-1, -2))[..., None, None]
    scores = over(weighted[..., :-1, :], squares)
    return jnp.concatenate([scores, weighted[..., -1:, :]], axis=-2)


# Name → (f(0), (M, W, parameter) → g(M) W).
FUNCTIONS: dict[str, tuple[float, Callable]] = {
    "exp": (1.0, _exponential),
    "expm1": (0.0, _exponential),
    "resolvent": (1.0, _resolvent),
    "resolventm1": (0.0, _resolvent),
    "ones_plus": (0.0, _ones_plus),
}


def _check(
    query: Array, value: Array, mask: Array | None, segment_ids: Array | None
) -> None:
    """Raise if query, value and mask do not fit together, or segments are given."""
    if segment_ids is not None:
        raise ValueError(
            "matrix_function: segment_ids are not possible, since every segment would "
            f"need another matrix; hide tokens with mask, got {shown(segment_ids)}"
        )
    check_arrays("matrix_function", query=query, value=value)
    if query.shape[:3] != value.shape[:3]:
        raise ValueError(
            "matrix_function: query [B T N H] and value [B T N V] must agree in "
            f"batch, time and heads, got query {query.shape} and value {value.shape}"
        )
    if mask is not None:
        check_mask("matrix_function", mask, query)
