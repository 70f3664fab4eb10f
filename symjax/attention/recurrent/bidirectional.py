"""Linear attention of encoders: every query sees all keys, earlier and later ones.

There are three cases:

- Many keys: all of them become one state, which every query reads.
- Few keys: the weights of all pairs are computed, as in a chunk.
- Segments: one causal pass over the tokens, and one over the tokens in reverse order.
  Their sums (`RowSums`) are added.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.core.feature_maps import finite
from symjax.attention.core.meshes import on_any_mesh, spec_of_rows, vary_alike
from symjax.attention.core.operands import Tokens
from symjax.attention.core.products import sum_dtype
from symjax.attention.core.sequence import id_changes
from symjax.attention.recurrent.arguments import check_tokens
from symjax.attention.recurrent.chunks import (
    Span,
    layout,
    merge_heads,
    scan,
    time_first,
)
from symjax.attention.recurrent.linear_state import (
    LinearState,
    RowSums,
    divide,
    query_state,
)
from symjax.attention.recurrent.normalised import FeatureChunk, Normalised


def attend(
    who: str,
    recurrence: Normalised,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    mask: Array | None,
    segment_ids: Array | None,
    *,
    parameters: Any = None,
) -> Float[Array, "B T N V"]:
    """Return rows in which a query sees every visible key of its segment.

    Args:
        who: name of the public function, for messages.
        parameters: the parameters of the feature map.
    Raises:
        ValueError: shapes that do not fit.
    """
    check_tokens(
        who, query, key, value, mask, segment_ids, causal=segment_ids is not None
    )
    tokens = Tokens(query, key, value, (), mask, segment_ids)
    return _attend_to_all(recurrence, tokens, parameters)


@on_any_mesh("recurrence", specs=spec_of_rows)
def _attend_to_all(
    recurrence: Normalised, tokens: Tokens, parameters: Any
) -> Float[Array, "B T N V"]:
    span = layout(tokens)
    batch, _, heads, size = span.key.shape
    sizes = batch, heads, size, span.value.shape[-1]
    state = recurrence.empty(parameters, sizes, sum_dtype(*span[:3]))
    if span.segment is None:
        prepared = recurrence.prepare(parameters, span)
        rows = time_first(divide(_sums_over_all_keys(recurrence, state, prepared)))
    else:
        state, span = vary_alike((state, span))
        rows = divide(_sums_over_segments(recurrence, parameters, state, span))
    return merge_heads(rows, tokens.value.dtype)


def _sums_over_all_keys(
    recurrence: Normalised, state: LinearState, prepared: FeatureChunk
) -> RowSums:
    """Return the sums of rows that see all visible keys.

    Args:
        state: the empty state.
    """
    length, size, features = *prepared.value.shape[2:], state.total.shape[-1]
    arithmetic = recurrence.arithmetic(prepared.chunk)
    if length == 0:
        return query_state(arithmetic, state, prepared.query)
    if length * (features + size) > features * size:
        if centred := recurrence.features.centred:
            return _read_centred(recurrence, centred, prepared)
        state, _ = recurrence.effect(prepared)
        return query_state(arithmetic, state, prepared.query)
    # Few keys: pairs cost less than a state, and fewer terms cancel.
    return recurrence.row_sums(state, prepared, jnp.ones((1, 1, 1), bool))


def _read_centred(
    recurrence: Normalised, centred: Callable, prepared: FeatureChunk
) -> RowSums:
    """Return the sums of rows that see all keys, by `Features.centred`.

    The first feature is 1, so the rounding error of a mean weight is about eps/2. If
    the mean weight of a row over its visible keys is smaller, the denominator of the
    row is only rounding error, and becomes 0.
    """
    chunk, value = prepared.chunk, prepared.value
    query, key = centred(prepared.query, prepared.key)
    weights = key.where(chunk.visible[:, None]).weights()
    arithmetic = recurrence.arithmetic(chunk)._replace(bounded=False)
    sums = arithmetic.product("bksm,bksv->bkmv", weights, value)
    state = LinearState(sums, weights.sum(axis=-2))
    rows = query_state(arithmetic, state, query)
    least = jnp.finfo(value.dtype).eps / 2 * state.total[:, :, None, None, 0]
    nonzero = jax.lax.stop_gradient(rows.denominator) > least
    return rows._replace(denominator=jnp.where(nonzero, rows.denominator, 0))


def _sums_over_segments(
    recurrence: Normalised, parameters: Any, state: LinearState, span: Span
) -> RowSums:
    """Return the sums of rows that see all keys of their segment.

    A causal pass gives a row the keys up to its own. A second causal pass runs over the
    flipped tokens. There keys and values are shifted by one token, so that a row gets
    the keys after its own.
    """
    flipped = jax.tree.map(lambda x: jnp.flip(x, 1), span)
    segment = flipped.segment
    same_segment = jnp.roll(segment, 1, axis=1) == segment
    same_segment = same_segment & (jnp.arange(segment.shape[1]) > 0)[None]
    backwards = flipped._replace(
        key=jnp.roll(flipped.key, 1, axis=1),
        value=jnp.roll(flipped.value, 1, axis=1),
        visible=jnp.roll(flipped.visible, 1, axis=1) & same_segment,
        starts_segment=id_changes(segment),
    )

    def advance(parameters: Any, state: LinearState, span: Span) -> tuple:
        prepared = recurrence.prepare(parameters, span)
        return recurrence.advance(state, prepared, divided=False)

    past, future = (
        scan(advance, 64, parameters, state, direction)[1]
        for direction in (span, backwards)
    )
    return _merge_row_sums(past, jax.tree.map(lambda x: jnp.flip(x, 1), future))


def _merge_row_sums(past: RowSums, future: RowSums) -> RowSums:
    """Return the sums of rows that see the keys of both sides.

    A row that sees no key on one side has the shift 0 there. This shift is replaced by
    −∞, because the shift of the other side may be far below 0.
    """
    shifts = [jnp.where(x.magnitude > 0, x.shift, -jnp.inf) for x in (past, future)]
    shift = finite(jnp.maximum(*shifts))
    a, b = (jnp.exp(x - shift) for x in shifts)
    return RowSums(
        past.numerator * a[..., None] + future.numerator * b[..., None],
        past.denominator * a + future.denominator * b,
        past.magnitude * a + future.magnitude * b,
        shift,
    )
