"""Causal functions of QQᵀ: each row is computed from the matrix of its own prefix.

    def causal(q, v, f, c):              # one head: q [T H], v [T V], f of numbers
        out = []
        for t in range(1, len(q) + 1):
            values, vectors = np.linalg.eigh(c * q[:t] @ q[:t].T)
            out.append((vectors * f(values)) @ (vectors.T @ v[:t]))
        return np.stack([x[-1] for x in out])

The lower triangle of f(A), with A = c QQᵀ, is a different function and not causal: the
powers of A connect two tokens through a later one. With M_t = Σ_{s≤t} q_s q_sᵀ,
S_t = Σ_{s≤t} q_s v_sᵀ and g(μ) = (f(μ) − f(0))/μ,

    out_t = f(0) v_t + c q_tᵀ g(c M_t) S_t

so a state of H² + H V numbers is enough, and no later token changes a row. A resolvent
is computed by a ridge regression, as in `symjax.attention.mesa_layer`. Its state has
other matrices than S and M (`symjax.attention.recurrent.ridge`). The other functions
are in `symjax.attention.recurrent.power_series`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.arguments import check_arrays, check_choice, check_positive
from symjax.attention.core.products import over, sum_dtype
from symjax.attention.matrix_function import NORMALISE, parsed_function, with_ones
from symjax.attention.recurrent.arguments import state_sizes
from symjax.attention.recurrent.decays import shared_or_per_token
from symjax.attention.recurrent.engine import attend_causal, attend_step
from symjax.attention.recurrent.power_series import (
    MatrixFunctionState,
    PowerSeries,
    SeriesParameters,
)
from symjax.attention.recurrent.ridge import Mesa, MesaState


def matrix_function_causal(
    query: Float[Array, "B T N H"],
    value: Float[Array, "B T N V"],
    function: Any,
    mask: Bool[Array, "B 1 1 T"] | None = None,
    *,
    scale: float | Float[Array, ""],
    alpha: float | Float[Array, ""] | None = None,
    normalise: str = "none",
    log_decay: Float[Array, "#B #T N"] | Float[Array, " N"] | None = None,
    chunk_size: int = 64,
    state: MatrixFunctionState | MesaState | None = None,
    return_state: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    axis_name: str | None = None,
) -> Any:
    """Return the last row of `matrix_function` over each token and its past.

    out[t] is the last row of f(A_t) V_t, where A_t = scale · Q_t Q_tᵀ is the matrix of
    the scores of tokens 0 … t. Functions, `alpha` and `normalise` are those of
    `matrix_function`; `normalise` divides the last row of f(A_t).

    Time O(T (H (H + V) + chunk_size (H + V))) times the number of terms of the
    function: 1 for resolvents and ones_plus, and the degree for a polynomial. For exp
    and expm1 the number of terms grows with the largest trace of an A_t: 23 for a trace
    of 5 in float32, and at most 128. Resolvents also take O(T chunk_size²). Sums run in
    float32 at least. The backward pass saves one state per chunk, or per group of
    chunks that run in parallel. A hidden token changes no other row, and its own row is
    zero.

    The series of exp and expm1 converges for eigenvalues of A_t up to 80 in float32,
    and up to 55 in float64. A row whose series does not converge is NaN. If α is above
    0 and α times an eigenvalue of A_t reaches 1, all rows from that chunk on are NaN.

    A resolvent with α < 0 loses as many digits in float32 as `mesa_causal` with ridge 1
    and keys √(|α| scale) q. `matrix_function` does not lose them.

    Args:
        scale: c, above 0, the same for all tokens. For texts of at most n tokens,
            1 / (n √H) keeps the eigenvalues at or below the largest |q|²/√H, as the
            default of `matrix_function` does. c cannot fall with the number of tokens
            read: each token would then change the factor of all earlier tokens, and the
            update of (I − αcM)⁻¹ would not have rank one.
        log_decay: at most 0, [N] or [B or 1, T or 1, N]: M and S are multiplied by
            exp(log_decay) before a token is added. Resolvents have no decay: it would
            need a factorisation at every token. normalise "l2" cannot be combined with
            a decay.
        mask: True = attend; it may only hide keys.
        state: from `matrix_function_state`, `matrix_function_step` or an earlier call
            with the same function, alpha and scale.
        chunk_size, return_state, segment_ids, axis_name: as in `linear_causal`. Devices
            also exchange matrices [H H].
    Raises:
        ValueError: shapes that do not fit; an unknown function; alpha with a function
            that is no resolvent; log_decay with a resolvent or with normalise "l2"; a
            mask that hides pairs; a state of other sizes; `state` or `return_state`
            together with axis_name.
    Source: this library. For the resolvent with α < 0, v − output is the output of the
        Mesa layer (von Oswald et al. 2025, arXiv:2506.05233) with K = Q.
    """
    who = "matrix_function_causal"
    _check(who, query, value, scale)
    options = {"alpha": alpha, "normalise": normalise, "log_decay": log_decay}
    options |= {"mask": mask, "segment_ids": segment_ids}
    call = _engine_arguments(who, query, value, function, scale, **options)
    result = attend_causal(
        who,
        call.recurrence,
        *call.tokens,
        mask,
        parameters=call.parameters,
        operands=call.operands,
        chunk_size=chunk_size,
        state=state,
        return_state=return_state,
        segment_ids=segment_ids,
        axis_name=axis_name,
    )
    rows, *end = result if return_state else (result,)
    rows = over_their_sums(rows) if normalise == "rows" else rows
    return (rows, *end) if return_state else rows


def matrix_function_step(
    state: MatrixFunctionState | MesaState,
    query: Float[Array, "B 1 N H"],
    value: Float[Array, "B 1 N V"],
    function: Any,
    *,
    scale: float | Float[Array, ""],
    alpha: float | Float[Array, ""] | None = None,
    normalise: str = "none",
    log_decay: Float[Array, "#B 1 N"] | Float[Array, " N"] | None = None,
) -> tuple[Float[Array, "B 1 N V"], Any]:
    """Return the output for one more token of `matrix_function_causal`, and the state.

    Time O(H² + H V) times the number of terms of the function, which is 1 for
    resolvents.

    Raises:
        ValueError: as `matrix_function_causal`; more than one token.
    """
    who = "matrix_function_step"
    _check(who, query, value, scale)
    options = {"alpha": alpha, "normalise": normalise, "log_decay": log_decay}
    call = _engine_arguments(who, query, value, function, scale, **options)
    more = {"parameters": call.parameters, "operands": call.operands}
    rows, state = attend_step(who, call.recurrence, state, *call.tokens, **more)
    return over_their_sums(rows) if normalise == "rows" else rows, state


def matrix_function_state(
    batch: int,
    heads: int,
    head_size: int,
    value_size: int,
    function: Any,
    *,
    scale: float | Float[Array, ""] | None = None,
    alpha: float | Float[Array, ""] | None = None,
    normalise: str = "none",
    dtype: Any = jnp.float32,
) -> MatrixFunctionState | MesaState:
    """Return the state of `matrix_function_causal` before the first token.

    It has H (H + V) numbers per head, float32 at least. The state of a resolvent is a
    `MesaState`. H is larger by 1 with "ones_plus", and V is larger by 1 with
    normalise="rows". The empty state does not depend on `scale` and `alpha`.

    Raises:
        ValueError: a size or a dtype that is wrong, or an unknown function.
    """
    who = "matrix_function_state"
    sizes = state_sizes(who, batch, heads, head_size, value_size, dtype)
    name, _ = parsed_function(who, function, alpha)
    check_choice(who, "normalise", normalise, NORMALISE)
    recurrence = Mesa() if _is_resolvent(name) else PowerSeries(name)
    more = (0, 0, int(name == "ones_plus"), int(normalise == "rows"))
    sizes = tuple(x + y for x, y in zip(sizes, more, strict=True))
    return recurrence.empty(None, sizes, dtype)


def _is_resolvent(name: str | None) -> bool:
    return name in ("resolvent", "resolventm1")


def _check(who: str, query: Array, value: Array, scale: Any) -> None:
    """Raise if query and value do not fit together or the scale is not above 0."""
    check_arrays(who, query=query, value=value)
    if query.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"{who}: query [B T N H] and value [B T N V] must agree in batch, time and "
            f"heads, got query {query.shape} and value {value.shape}"
        )
    check_positive(who, "scale", scale, needed=True)


def over_their_sums(rows: Float[Array, "B T N V+1"]) -> Float[Array, "B T N V"]:
    """Return rows divided by their last channel, which is the sum of the weights."""
    return over(rows[..., :-1], rows[..., -1:])


class _EngineArguments(NamedTuple):
    """Arguments for the engine of recurrences.

    Attributes:
        tokens: query, key and value. The queries are the keys.
    """

    recurrence: Any
    tokens: tuple[Array, Array, Array]
    parameters: Any
    operands: tuple[Array, ...] = ()


def _engine_arguments(
    who: str,
    query: Array,
    value: Array,
    function: Any,
    scale: Any,
    *,
    alpha: Any,
    normalise: str,
    log_decay: Any,
    mask: Array | None = None,
    segment_ids: Array | None = None,
) -> _EngineArguments:
    """Check the arguments, and return those of the engine for this function."""
    dtype = sum_dtype(query, value)
    name, parameter = parsed_function(who, function, alpha)
    check_choice(who, "normalise", normalise, NORMALISE)
    scale = jnp.asarray(scale, dtype)
    if name == "ones_plus":
        query = with_ones(query.astype(dtype), scale)
    if normalise == "rows":
        value = with_ones(value)
    tokens, unit_rows = (query, query, value), normalise == "l2"
    if _is_resolvent(name):
        if log_decay is not None:
            raise ValueError(
                f"{who}: log_decay is not possible with function {name!r}, whose state "
                "would need a factorisation at every token"
            )
        recurrence = Mesa("error" if name == "resolvent" else "change", unit_rows)
        return _EngineArguments(
            recurrence, tokens, -scale * jnp.asarray(parameter, dtype)
        )
    if log_decay is not None and unit_rows:
        raise ValueError(
            f"{who}: log_decay is not possible with normalise 'l2': the length of a "
            "row needs the squares of its decays, which the state does not have"
        )
    if parameter is not None:
        parameter = jnp.asarray(parameter, dtype)
    if log_decay is None:
        log_decay = jnp.zeros(query.shape[2], dtype)
    shared, operands = shared_or_per_token(who, log_decay, query, mask, segment_ids)
    if any(x.shape[-1] > 1 for x in operands):
        raise ValueError(
            f"{who}: log_decay must have one number per head, [N] or [B T N], got "
            f"{jnp.shape(log_decay)}"
        )
    parameters = SeriesParameters(scale, parameter, shared)
    return _EngineArguments(PowerSeries(name, unit_rows), tokens, parameters, operands)
