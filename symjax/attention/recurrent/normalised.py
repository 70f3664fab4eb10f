"""Linear attention with a denominator: the recurrence of linear, cosine and Performer.

`Normalised` is the `Recurrence`. One head, one token after the other, is:

    def normalised(log_q, log_k, v):         # log φ [T M] of both, v [T V]
        sums, total, running_max, out = 0, 0, -np.inf, []
        for t in range(len(v)):
            highest = np.maximum(running_max, log_k[t])
            fade, weights = np.exp(running_max - highest), np.exp(log_k[t] - highest)
            sums = sums * np.reshape(fade, (-1, 1)) + np.outer(weights, v[t])
            total, running_max = total * fade + weights, highest
            row = np.exp(log_q[t] + running_max - (log_q[t] + running_max).max())
            out.append(row @ sums / (row @ total))
        return np.stack(out)

Inside a chunk of T tokens the weights of all T² pairs are computed. Pairs with a later
key are set to 0. Tokens before the chunk are read from the state.

Exponents. `linear_state.py` divides a state by exp(running_max), and a row by
exp(shift), so that features stay in the range of float32:

- In a chunk each feature has one maximum c: the largest exponent that it has in the
  state and in the keys of the chunk. A key gets the weight exp(log_k − c), a query
  exp(log_q + c − shift). So c cancels in their product, and exp(shift) in the ratio. A
  later key of the chunk may change c, and so it changes a row by rounding errors. Rows
  of earlier chunks do not change at all.
- A row can underflow if the features of a key that it does not see (a later key of its
  chunk, or one of another segment) are e⁴⁶ times as large as those of all keys that it
  sees. `core/underflow.py` computes such a row again, divided by its own largest term.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from symjax.attention.core.feature_maps import UNDERFLOW, Features, LogFeatures
from symjax.attention.core.products import products, sum_dtype
from symjax.attention.core.underflow import (
    exact_product,
    exact_rows,
    recompute_underflow,
)
from symjax.attention.core.where import where
from symjax.attention.recurrent.chunks import (
    Chunk,
    Span,
    chunk_of,
    group_heads,
    past_pairs,
    through_segments,
    time_first,
)
from symjax.attention.recurrent.linear_state import (
    Arithmetic,
    LinearState,
    RowSums,
    divide,
    empty_like,
    highest_exponent,
    key_weights,
    merge,
    query_weights,
    rescale,
    sums_from_weights,
    update,
)
from symjax.attention.recurrent.recurrence import Schedule


class FeatureChunk(NamedTuple):
    """A chunk and its features: the result of `prepare`."""

    chunk: Chunk
    query: LogFeatures  # [B K G T M]
    divisor: Float[Array, "B K G T 1"] | None  # of the query's amplitude
    key: LogFeatures  # [B K T M]; φ is 0 for hidden keys
    value: Float[Array, "B K T V"]


class RowVisibility(NamedTuple):
    """Keys that the rows of a chunk see in the chunk, and rows that see the state."""

    pairs: Bool[Array, "B T S"]
    sees: Bool[Array, "B T"]  # rows that see a visible key in the chunk
    reaches: Bool[Array, "B T"] | None  # rows that see the state; None: all


class RowInputs(NamedTuple):
    """State before a chunk, and features and values of the chunk."""

    state: LinearState
    query: LogFeatures
    key: LogFeatures
    value: Float[Array, "B K S V"]


@dataclass(frozen=True)
class Normalised:
    """Recurrence of linear attention, with a feature map."""

    kernel = "features"
    features: Features

    def schedule(self) -> Schedule:
        return Schedule(only_as_batch=self.features.has_exponents)

    def empty(self, parameters: Any, sizes: tuple, dtype: Any) -> LinearState:
        batch, heads, size, value_size = sizes
        dtype = jnp.promote_types(dtype, jnp.float32)
        like = jax.ShapeDtypeStruct((batch, heads, size), dtype)
        key = jax.eval_shape(self.features.key, like, parameters)
        shape = jax.eval_shape(LogFeatures.weights, key).shape
        highest = None
        if key.exponent is not None:
            highest = jnp.full(key.exponent.shape, -jnp.inf, dtype)
        sums = jnp.zeros((*shape, value_size), dtype)
        return LinearState(sums, jnp.zeros(shape, dtype), highest)

    def advance(
        self, state: LinearState, prepared: FeatureChunk, divided: bool = True
    ) -> tuple[LinearState, Any]:
        """Return the state after a chunk, and its rows [B T K G V].

        Rows that underflow are computed again. In a chunk of one token no row
        underflows: there is neither a later key nor another segment.

        Args:
            divided: False returns `RowSums` instead of rows.
        """
        chunk, query, _, key, value = prepared
        arithmetic = self.arithmetic(chunk)
        empty = empty_like(state)
        before, carried, reaches, joins = through_segments(chunk, state, empty)
        pairs = past_pairs(chunk)
        if before.running_max is None or value.shape[2] == 1:
            rows: Any = self.row_sums(before, prepared, pairs, reaches)
            rows = divide(rows) if divided else rows
        else:
            sees = (pairs & chunk.visible[:, None, :]).any(axis=-1)
            pairs = jnp.broadcast_to(pairs, (*sees.shape, *pairs.shape[2:]))
            visibility = RowVisibility(pairs, sees, reaches)
            fast, exact = (
                (_fast_rows, _exact_rows) if divided else (_fast_sums, _exact_sums)
            )
            rows = recompute_underflow(
                partial(fast, arithmetic),
                partial(exact, arithmetic),
                visibility,
                RowInputs(before, query, key, value),
            )
        if joins is not None:
            key = key.where(joins[:, None])
        after = update(arithmetic, carried, key, value)
        return after, jax.tree.map(time_first, rows)

    def effect(self, prepared: FeatureChunk) -> tuple[LinearState, None]:
        """Return the sums over the keys, and None: earlier states stay as they are."""
        arithmetic = self.arithmetic(prepared.chunk)
        return update(arithmetic, None, prepared.key, prepared.value), None

    def merge(self, one: tuple, two: tuple) -> tuple[LinearState, None]:
        return merge(one[0], two[0]), None

    def prepare(self, parameters: Any, span: Span) -> FeatureChunk:
        """Return the features of a span, with 0 for hidden keys.

        The features of each query are divided by their largest amplitude, so that
        products of amplitudes do not overflow float32. This factor cancels in the
        division by the denominator. Bounded features are not divided.
        """
        chunk = chunk_of(span)
        dtype = sum_dtype(*chunk[:3])
        # Heads come before time, as in `chunk.key`: if queries and keys have the same
        # shape, XLA compiles one kernel for the features of both.
        query = jnp.swapaxes(span.query, 1, 2).astype(dtype)
        query = self.features.query(query, parameters)
        heads = chunk.key.shape[1]
        query = jax.tree.map(partial(group_heads, heads=heads), query)
        divisor = None
        if query.amplitude is not None and not self.features.bounded:
            divisor = jnp.abs(query.amplitude).max(axis=-1, keepdims=True)
            divisor = jax.lax.stop_gradient(where(divisor > 0, divisor, 1))
            query = query._replace(amplitude=query.amplitude / divisor)
        key = self.features.key(chunk.key.astype(dtype), parameters)
        key = key.where(chunk.visible[:, None])
        return FeatureChunk(chunk, query, divisor, key, chunk.value.astype(dtype))

    def arithmetic(self, chunk: Chunk) -> Arithmetic:
        signed, count_of = self.features.signed, self.features.nonnegative_count
        product = products(*chunk[:3], cancel=signed)
        count = count_of(chunk.key.shape[-1]) if count_of else 0
        return Arithmetic(product, signed, count, self.features.bounded)

    def row_sums(
        self,
        state: LinearState,
        prepared: FeatureChunk,
        pairs: Bool[Array, "#B T S"],
        reaches: Bool[Array, "B T"] | None = None,
    ) -> RowSums:
        """Return the sums of rows over visible keys of the chunk and over the state.

        Args:
            pairs: True where a row sees a key of the chunk.
            reaches: the rows that see the state; None: all.
        """
        chunk, query, divisor, key, value = prepared
        scores, arithmetic = None, self.arithmetic(chunk)
        if self.features.pairs is not None:
            scores = self.features.pairs(arithmetic.product, query, key, divisor)
            pairs = pairs & chunk.visible[:, None]
        inputs = RowInputs(state, query, key, value)
        return _sums_from_features(arithmetic, pairs, reaches, inputs, scores)


def _sums_from_features(
    arithmetic: Arithmetic,
    pairs: Bool[Array, "#B T S"],
    reaches: Bool[Array, "B T"] | None,
    inputs: RowInputs,
    scores: Float[Array, "B K G T S"] | None = None,
) -> RowSums:
    """Return the sums of rows over visible keys of the chunk and over the state.

    Args:
        pairs: True where a row sees a key of the chunk.
        reaches: the rows that see the state; None: all.
        scores: weights of pairs, if they were computed from queries and keys directly.
            None: they are products of features.
    """
    state, query, key, value = inputs
    highest = highest_exponent(state, key)
    row, shift = query_weights(query, highest)
    if scores is None:
        weights = key_weights(key, highest)
        scores = arithmetic.product("bkgtm,bksm->bkgts", row, weights)
    scores = scores * pairs[:, None, None].astype(scores.dtype)
    if reaches is not None:
        row = where(reaches[:, None, None, :, None], row, 0)
    return sums_from_weights(
        arithmetic, rescale(state, highest), row, shift, scores, value
    )


def _fast_sums(
    arithmetic: Arithmetic, visibility: RowVisibility, inputs: RowInputs
) -> tuple[RowSums, Bool[Array, "B K G T"]]:
    """Return sums of rows with one maximum per chunk, and which of them underflowed.

    A row has underflowed if it sees a key, in the chunk or in the state, but the sum of
    the |terms| of its denominator is below `UNDERFLOW`.
    """
    pairs, sees, reaches = visibility
    rows = _sums_from_features(arithmetic, pairs, reaches, inputs)
    highest = cast(Array, inputs.state.running_max)
    state_has_keys = (highest > -jnp.inf).any(axis=-1, keepdims=True)
    if reaches is not None:
        state_has_keys = state_has_keys & reaches[:, None]
    sees_a_key = (sees[:, None] | state_has_keys)[:, :, None]
    return rows, sees_a_key & (jax.lax.stop_gradient(rows.magnitude) < UNDERFLOW)


def _exact_sums(
    arithmetic: Arithmetic, visibility: RowVisibility, inputs: RowInputs
) -> RowSums:
    """Return sums of rows, each divided by the largest term of its denominator."""
    state, query, key, value = inputs
    read = partial(sums_from_weights, arithmetic._replace(product=exact_product), state)
    highest = cast(Array, state.running_max)
    return exact_rows(
        read, highest, query, key, value, visibility.pairs, visibility.reaches
    )


def _fast_rows(
    arithmetic: Arithmetic, visibility: RowVisibility, inputs: RowInputs
) -> tuple[Float[Array, "B K G T V"], Bool[Array, "B K G T"]]:
    """Return `_fast_sums` divided. Rows that underflowed have arbitrary values.

    The rows are divided here, inside `recompute_underflow`, and not after it. The
    gradient of a division needs the sums, so the backward pass of a later division
    would run one more `jax.lax.cond`.
    """
    rows, underflowed = _fast_sums(arithmetic, visibility, inputs)
    # 1 / denominator would be infinite, and its product with a gradient of 0 NaN.
    denominator = where(underflowed, 1, rows.denominator)
    return divide(rows._replace(denominator=denominator)), underflowed


def _exact_rows(
    arithmetic: Arithmetic, visibility: RowVisibility, inputs: RowInputs
) -> Float[Array, "B K G T V"]:
    """Return `_exact_sums` divided."""
    return divide(_exact_sums(arithmetic, visibility, inputs))
