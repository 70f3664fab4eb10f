"""Linear attention with a denominator: the recurrence of linear, cosine and Performer.

    def normalised(log_q, log_k, v):         # one head: log φ [T M] of both, v [T V]
        sums, total, running_max, out = 0, 0, -np.inf, []
        for t in range(len(v)):
            highest = np.maximum(running_max, log_k[t])
            fade, weights = np.exp(running_max - highest), np.exp(log_k[t] - highest)
            sums = sums * np.reshape(fade, (-1, 1)) + np.outer(weights, v[t])
            total, running_max = total * fade + weights, highest
            row = np.exp(log_q[t] + running_max - (log_q[t] + running_max).max())
            out.append(row @ sums / (row @ total))
        return np.stack(out)

A chunk of time is quadratic inside, where numerator and denominator share the weights
of pairs; what came before is read from the state.

The state of features with an exponent refers to `running_max`, the largest exponent of
a key so far for each feature, and a query to its own largest exponent beside that:
where amplitudes are 1, the key that set the maximum then adds at least 1 to the
denominator. Every factor is at most 1, nothing that matters underflows, no ε is needed,
and nothing depends on the future. The maxima cancel in the ratio, and are constants to
the gradient.

Features that change sign lose digits where their products cancel. Weights of pairs in a
chunk are therefore computed without features where these are polynomials or cosines.
A state holds features in float32: what it adds to a row is off by about ε|φ(q)|Σ|φ(k)|,
with ε = 2⁻²³, in numerator and denominator alike; `quotients.py` bounds what that does.

With bfloat16 inputs the features of the Performer are rounded to bfloat16 in products,
by numerator and denominator alike; `benchmarks/precision.py` has what that costs.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from symjax.attention.chunks import (
    Chunk,
    einsum,
    operand_dtype,
    scan,
    sum_dtype,
    through_segments,
)
from symjax.attention.features import Features, LogFeatures
from symjax.attention.linear_state import (
    LinearState,
    highest_exponent,
    key_weights,
    merge,
    rescale,
    update,
)
from symjax.attention.meshes import vary_alike
from symjax.attention.quotients import Rows, Weights, divide, row_weights, rows_of
from symjax.attention.recurrence import Recurrence
from symjax.attention.rescue import exact_weights, if_any

# Below this a chunk that refers to its highest exponent has lost its early rows.
_LOST = 1e-20


@dataclass(frozen=True)
class Normalised(Recurrence):
    """The recurrence, given by its features. Its rows may be left undivided."""

    features: Features
    divided: bool = True

    def may_stand_side_by_side(self, state: LinearState, chunk: Chunk) -> bool:
        return state.running_max is None  # features of the exponential are many

    def empty(self, parameters: Any, sizes: tuple, dtype: Any) -> LinearState:
        batch, heads, size, value_size = sizes
        dtype = jnp.promote_types(dtype, jnp.float32)
        count, exponents = self.features.sizes(size, parameters)
        highest = None
        if exponents:
            highest = jnp.full((batch, heads, exponents), -jnp.inf, dtype)
        sums = jnp.zeros((batch, heads, count, value_size), dtype)
        return LinearState(sums, jnp.zeros((batch, heads, count), dtype), highest)

    def advance(
        self,
        parameters: Any,
        state: LinearState,
        chunk: Chunk,
        exactly: bool = False,
    ) -> tuple[LinearState, tuple[Any, Bool[Array, "B K G T"] | None]]:
        """Rows, and which of them are lost.

        All factors of a row refer to the highest exponent in its chunk, which may lie
        in the row's future. It cancels, but a later key that is far larger pushes
        earlier ones out of range: their rows are lost.

        Args:
            exactly: each row refers to its own highest exponent, and none is lost.
        """
        query, key, value, divisor = self.operands(parameters, chunk)
        nothing = self.empty_for(parameters, chunk)
        before, carried, reaches, joins = through_segments(chunk, state, nothing)
        pairs = _past_pairs(chunk)
        if exactly:
            given = before.running_max, query, key, pairs, reaches
            weights, read = exact_weights(*given), before
        else:
            highest = highest_exponent(before, key)
            weights = self.weights(chunk, query, key, highest, divisor, pairs)
            read = rescale(before, highest)
        if reaches is not None:
            row = jnp.where(reaches[:, None, None, :, None], weights.row, 0)
            weights = weights._replace(row=row)
        signed = self.features.signed
        rows = rows_of(read, weights, value, signed, self.leading(chunk))
        lost = None
        if before.running_max is not None and value.shape[2] > 1 and not exactly:
            sees = (pairs & chunk.visible[:, None, :]).any(axis=-1)
            lost = _lost(rows, sees, reaches, before.running_max)
        if joins is not None:
            key = key.where(joins[:, None])
        after = update(carried, key, value)
        if self.divided:
            return after, (divide(rows).astype(chunk.value.dtype), lost)
        return after, (rows, lost)

    def finish(
        self,
        parameters: Any,
        state: LinearState,
        chunk: Chunk,
        rows: tuple,
        chunk_size: int,
    ) -> Any:
        """The rows, those that are lost replaced by exact ones, if there are any.

        Row by row, so that no example depends on what another one needed.
        """
        rows, lost = rows
        if lost is None:
            return rows

        def exact(fixed: tuple, arrays: tuple) -> Any:
            parameters, state, *tokens = arrays
            advance = partial(self.advance, parameters, exactly=True)
            return scan(advance, state, Chunk(*tokens, *fixed), chunk_size)[1][0]

        def replaced(one: Array, two: Array) -> Array:
            where = lost.reshape(lost.shape + (1,) * (one.ndim - lost.ndim))
            return jnp.where(where, two, one)

        fixed, arrays = chunk[4:], (parameters, state, *chunk[:4])
        given = lost.any(), fixed, arrays, jax.tree.map(jnp.zeros_like, rows)
        return jax.tree.map(replaced, rows, if_any(exact, *vary_alike(given)))

    def stretch(self, parameters: Any, chunk: Chunk) -> tuple[LinearState, None]:
        _, key, value, _ = self.operands(parameters, chunk)
        return update(self.empty_for(parameters, chunk), key, value), None

    def merge(self, one: tuple, two: tuple) -> tuple[LinearState, None]:
        return merge(one[0], two[0]), None

    def leading(self, chunk: Chunk) -> int:
        leading = self.features.leading
        return 0 if leading is None else leading(chunk.key.shape[-1])

    def operand_dtype(self, chunk: Chunk) -> Any:
        """That of operands of products."""
        rounded = operand_dtype if self.features.rounded else sum_dtype
        return rounded(chunk.query, chunk.key, chunk.value)

    def empty_for(self, parameters: Any, chunk: Chunk) -> LinearState:
        batch, heads, _, size = chunk.key.shape
        sizes = batch, heads, size, chunk.value.shape[-1]
        dtype = sum_dtype(chunk.query, chunk.key, chunk.value)
        return self.empty(parameters, sizes, dtype)

    def operands(
        self, parameters: Any, chunk: Chunk
    ) -> tuple[LogFeatures, LogFeatures, Array, Array | None]:
        """φ of queries and of keys, 0 for hidden ones; values, in the dtype of operands
        of products; the queries' divisor.

        The largest amplitude of a query cancels in the ratio, so it is made 1: products
        of amplitudes would leave the range of float32 long before the amplitudes do.
        """
        given = chunk.query, chunk.key, chunk.value
        dtype = self.operand_dtype(chunk)
        query, key, value = (x.astype(dtype) for x in given)
        asking = self.features.query(query, parameters)
        divisor = None
        if asking.amplitude is not None:
            divisor = jnp.abs(asking.amplitude).max(axis=-1, keepdims=True)
            divisor = jax.lax.stop_gradient(jnp.where(divisor > 0, divisor, 1))
            asking = asking._replace(amplitude=asking.amplitude / divisor)
        key = self.features.key(key, parameters).where(chunk.visible[:, None])
        return asking, key, value, divisor

    def weights(
        self,
        chunk: Chunk,
        query: LogFeatures,
        key: LogFeatures,
        highest: Array | None,
        divisor: Array | None,
        pairs: Bool[Array, "#B T S"] | None = None,
    ) -> Weights:
        """Those of all pairs relative to the highest exponent, 0 for hidden keys."""
        weights = row_weights(query, highest)
        if self.features.pairs is None or divisor is None:
            dtype = self.operand_dtype(chunk)
            columns = key_weights(key, highest).astype(dtype)
            scores = einsum("bkgtm,bksm->bkgts", weights.row.astype(dtype), columns)
        else:
            given = [x.astype(divisor.dtype) for x in (chunk.query, chunk.key)]
            scores = self.features.pairs(given[0], given[1], divisor)
            scores = scores * chunk.visible[:, None, None, None].astype(scores.dtype)
        if pairs is not None:
            scores = scores * pairs[:, None, None].astype(scores.dtype)
        return weights._replace(scores=scores)


def _past_pairs(chunk: Chunk) -> Bool[Array, "#B T T"]:
    """Who may see whom: the past and oneself, inside one segment."""
    length = chunk.value.shape[2]
    past = jnp.tril(jnp.ones((1, length, length), bool))
    if chunk.segment is None:
        return past
    return past & (chunk.segment[:, :, None] == chunk.segment[:, None, :])


def _lost(
    rows: Rows, sees: Array, reaches: Array | None, running_max: Array
) -> Bool[Array, "B K G T"]:
    """Rows that see a key, but whose keys all left float32."""
    remembers = ~jnp.isneginf(running_max).all(axis=-1)[..., None]
    if reaches is not None:
        remembers = remembers & reaches[:, None]
    some = (sees[:, None] | remembers)[:, :, None]
    return some & (jax.lax.stop_gradient(rows.size) < _LOST)
