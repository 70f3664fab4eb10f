"""Power series of the matrix QQᵀ of every prefix, as a recurrence.

Let M_t = Σ_{s≤t} q_s q_sᵀ and A_t = scale · M_t. The products M_t x_t for all tokens t
of a chunk are linear attention with queries x, and with q as keys and values. So each
term of a power series in A_t costs one linear attention, and M_t is not computed for
every token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.core.products import (
    einsum,
    over,
    over_root,
    products,
    sum_dtype,
)
from symjax.attention.recurrent.chunks import (
    Chunk,
    Span,
    chunk_of,
    product_and_arrays,
    time_first,
)
from symjax.attention.recurrent.decays import chunk_decays, times_decay
from symjax.attention.recurrent.recurrence import Schedule

# With so many terms e^A is exact up to rounding for eigenvalues of A up to 55 in
# float64, and up to 80 in float32.
TERMS = 128


class MatrixFunctionState(NamedTuple):
    """State of a power series of QQᵀ, in float32 at least."""

    sums: Float[Array, "B K H V"]  # S = Σ q vᵀ
    moments: Float[Array, "B K H H"]  # M = Σ q qᵀ


class SeriesParameters(NamedTuple):
    """Arrays that all tokens share.

    Attributes:
        scale: c, the factor of QQᵀ.
        coefficients: a₀, a₁, … of a polynomial; None for a named function.
        log_decay: the log-decay of each head if all tokens share it, or None.
    """

    scale: Float[Array, ""]
    coefficients: Float[Array, "degree+1"] | None
    log_decay: Float[Array, "K 1"] | None


class PreparedSeries(NamedTuple):
    """A chunk, its decays, and the parameters of the function."""

    chunk: Chunk
    since: Float[Array, "#B K T 1"]  # log-decays, as in `ChunkDecays`
    until: Float[Array, "B K T 1"]
    through: Float[Array, "B K 1"]
    pairs: Float[Array, "B K T T"]  # decays between tokens, 0 for later ones
    scale: Float[Array, ""]
    coefficients: Float[Array, "degree+1"] | None


@dataclass(frozen=True)
class PowerSeries:
    """Recurrence of a function of QQᵀ that is a power series.

    Attributes:
        name: "exp", "expm1" or "ones_plus"; None for a polynomial.
        unit_rows: divide every row of the matrix by its Euclidean norm.
    """

    kernel = None
    name: str | None
    unit_rows: bool = False

    def schedule(self) -> Schedule:
        # The derivative keeps all terms of a series, each as large as the queries, and
        # `_exponential` has branches that depend on data.
        return Schedule(only_as_batch=True)

    def empty(self, parameters: Any, sizes: tuple, dtype: Any) -> MatrixFunctionState:
        dtype = jnp.promote_types(dtype, jnp.float32)
        moments = jnp.zeros((*sizes[:3], sizes[2]), dtype)
        return MatrixFunctionState(jnp.zeros(sizes, dtype), moments)

    def prepare(self, parameters: SeriesParameters, span: Span) -> PreparedSeries:
        chunk = chunk_of(span)
        scale, coefficients, shared = parameters
        one = jnp.ones((*chunk.key.shape[:3], 1), sum_dtype(*chunk[:3]))
        since, until, through, pairs = chunk_decays(shared, one[:, :, None], one, chunk)
        decays = since, until, through, pairs[:, :, 0]
        return PreparedSeries(chunk, *decays, scale, coefficients)

    def advance(
        self, state: MatrixFunctionState, prepared: PreparedSeries
    ) -> tuple[MatrixFunctionState, Float[Array, "B T K 1 V"]]:
        product, _, key, value = product_and_arrays(prepared.chunk)

        def read(x: Array, sums: Array, written: Array) -> Array:
            """Return x_t · (Σ_{s≤t} q_s written_sᵀ), with decays."""
            past = times_decay(x, prepared.since)
            weights = prepared.pairs * product("bkth,bksh->bkts", x, key)
            inside = product("bkts,bksv->bktv", weights, written)
            return product("bkth,bkhv->bktv", past, sums) + inside

        def times_matrix(x: Array) -> Array:
            return prepared.scale * read(x, state.moments, key)

        constant, series = self._constant_and_series(state, prepared, key, times_matrix)
        rows = prepared.scale * read(series, state.sums, value) + constant * value
        if self.unit_rows:  # the sum of the squares of a row is constant² + squares
            factor = 2 * constant * key + times_matrix(series)
            squares = prepared.scale * (series * factor).sum(axis=-1)
            rows = over_root(rows, (constant**2 + squares)[..., None])
        own, through = self.effect(prepared)
        return _decayed_sum(state, own, through), time_first(rows[:, :, None])

    def _constant_and_series(
        self,
        state: MatrixFunctionState,
        prepared: PreparedSeries,
        key: Array,
        times_matrix: Callable[[Array], Array],
    ) -> tuple[Any, Array]:
        """Return f(0), and g(A_t) q_t of each token, with g(x) = (f(x) − f(0)) / x.

        "ones_plus" is no power series: every score scale · q_t·q_s is divided by
        ‖A_t‖², and 1 is added. The last channel of q, 1/√scale, adds the 1 and is not
        divided.
        """
        if prepared.coefficients is not None:
            coefficients = prepared.coefficients
            return coefficients[0], _horner(times_matrix, key, coefficients)
        if self.name == "ones_plus":
            norms = self._squared_norms(state, prepared, key[..., :-1])
            scores = over(key[..., :-1], norms[..., None])
            return 0, jnp.concatenate([scores, key[..., -1:]], axis=-1)
        trace = jnp.trace(state.moments, axis1=-2, axis2=-1)
        traces = trace + (key**2).sum(axis=(-1, -2))
        trace = prepared.scale * traces.max(initial=0)
        series = _exponential(times_matrix, key, trace)
        return 1 if self.name == "exp" else 0, series

    def _squared_norms(
        self,
        state: MatrixFunctionState,
        prepared: PreparedSeries,
        query: Float[Array, "B K T H"],
    ) -> Float[Array, "B K T"]:
        """Return ‖A_t‖², the sum of the squared scores of each prefix."""
        product = products(*prepared.chunk[:3])
        moments = state.moments[..., :-1, :-1]
        fade = jnp.exp(prepared.since[..., 0])
        crossed = einsum("bkth,bkhi,bkti->bkt", query, moments, query)
        crossed = fade * product("bkts,bks->bkt", prepared.pairs, crossed)
        scores = product("bkth,bksh->bkts", query, query)
        inside = product("bkts,bksr->bktr", prepared.pairs, scores**2)
        inside = (inside * prepared.pairs).sum(axis=-1)
        past = fade**2 * (moments**2).sum(axis=(-1, -2))[..., None]
        return prepared.scale**2 * (past + 2 * crossed + inside)

    def effect(
        self, prepared: PreparedSeries
    ) -> tuple[MatrixFunctionState, Float[Array, "B K 1"]]:
        product, _, key, value = product_and_arrays(prepared.chunk)
        faded = times_decay(key, prepared.until)
        moments = product("bkth,bkti->bkhi", faded, key)
        sums = product("bkth,bktv->bkhv", faded, value)
        return MatrixFunctionState(sums, moments), prepared.through

    def merge(self, one: tuple, two: tuple) -> tuple[MatrixFunctionState, Array]:
        return _decayed_sum(one[0], two[0], two[1]), one[1] + two[1]


def _decayed_sum(
    earlier: MatrixFunctionState,
    later: MatrixFunctionState,
    through: Float[Array, "B K 1"],
) -> MatrixFunctionState:
    """Return the earlier state, decayed by exp(through), plus the later one."""
    fade = jnp.exp(through)[..., None]
    return jax.tree.map(lambda x, y: fade * x + y, earlier, later)


def _horner(
    times_matrix: Callable[[Array], Array], query: Array, coefficients: Array
) -> Array:
    """Return (a₁ + a₂ A + a₃ A² + …) q."""
    total = jnp.zeros_like(query)
    for number, coefficient in enumerate(reversed(jnp.unstack(coefficients)[1:])):
        total = times_matrix(total) if number else total
        total = total + coefficient * query
    return total


def _exponential(
    times_matrix: Callable[[Array], Array], query: Array, trace: Float[Array, ""]
) -> Array:
    """Return (1 + A/2! + A²/3! + …) q, and NaN where it has not converged.

    No terms cancel, since A has no negative eigenvalue. So the norm of the sum is at
    least that of q. Term k is left out if traceᵏ/(k+1)! is at most ε/4.

    Args:
        trace: an upper bound of the traces of all A, and so of their eigenvalues.
    """

    def add(carry: tuple[Array, Array], number: Array) -> tuple[Array, Array]:
        total, term = carry
        term = times_matrix(term) / number
        return total + term, term

    @jax.checkpoint
    def add_if_needed(carry: tuple, inputs: tuple) -> tuple[tuple, None]:
        number, needed = inputs
        return jax.lax.cond(needed, add, lambda x, _: x, carry, number), None

    numbers = jnp.arange(2, TERMS + 1, dtype=query.dtype)
    epsilon = jnp.finfo(query.dtype).eps
    bounds = jnp.cumprod(jax.lax.stop_gradient(trace) / numbers)
    needed = ~(bounds <= epsilon / 4)  # also if the trace is NaN
    inputs = numbers, needed
    (total, term), _ = jax.lax.scan(add_if_needed, (query, query), inputs)
    size, rest = (jnp.abs(jax.lax.stop_gradient(x)).max(-1) for x in (total, term))
    converged = (rest <= 4 * epsilon * size) | ~needed[-1]
    return jnp.where(converged[..., None], total, jnp.nan)
