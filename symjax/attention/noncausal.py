"""Linear attention to all keys: of the past and of the future alike.

All keys become one state, which every query reads; few keys stand beside the queries as
in a chunk. With segments, rows of their past and of their future are merged.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.chunks import (
    Chunk,
    Stretch,
    Tokens,
    chunk_of,
    einsum,
    heads_joined,
    layout,
    scan,
    time_first,
)
from symjax.attention.features import finite
from symjax.attention.meshes import on_any_mesh, rows_alone, vary_alike
from symjax.attention.normalised import (
    LinearState,
    Normalised,
    Rows,
    divide,
    highest_exponent,
    key_weights,
    query_state,
    rescale,
    row_weights,
    rows_of,
    update,
)
from symjax.attention.recurrences import check_tokens
from symjax.attention.segments import starts


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
    """Every query sees every visible key of its segment."""
    check_tokens(
        who, query, key, value, mask, segment_ids, causal=segment_ids is not None
    )
    tokens = Tokens(query, key, value, (), mask, segment_ids)
    return _attend(recurrence, tokens, parameters)


@on_any_mesh(1, rows_alone)
def _attend(
    recurrence: Normalised, tokens: Tokens, parameters: Any
) -> Float[Array, "B T N V"]:
    stretch = layout(tokens)
    state = recurrence.nothing(parameters, stretch)
    if stretch.segment is None:
        rows = _all_keys(recurrence, parameters, state, chunk_of(stretch))
        rows = time_first(divide(rows))
    else:
        state, stretch = vary_alike((state, stretch))
        advance = partial(recurrence.advance, parameters, divided=False)
        rows = divide(_both_sides(advance, state, stretch))
    return heads_joined(rows, tokens.value.dtype)


def _all_keys(
    recurrence: Normalised, parameters: Any, state: LinearState, chunk: Chunk
) -> Rows:
    """Rows that see all visible keys, from an empty state."""
    query, key, value, divisor = recurrence.mapped(parameters, chunk)
    how = recurrence.arithmetic(chunk)
    length, size, features = *value.shape[2:], state.total.shape[-1]
    if length * (features + size) > features * size:
        if around := recurrence.features.around:
            return _read_around(recurrence, around, chunk, value)
        state = update(how, state, key, value)
        return query_state(how, state, query)
    # Few keys: their pairs cost less than sums, and no digit where signs cancel.
    highest = highest_exponent(state, key)
    row, shift = row_weights(query, highest)
    scores = recurrence.scores(chunk, row, key_weights(key, highest), divisor, how)
    state = rescale(state, highest)
    return rows_of(how, state, row, shift, scores, value)


def _read_around(
    recurrence: Normalised, around: Callable, chunk: Chunk, value: Array
) -> Rows:
    """Rows that see all keys by features that are made for these keys.

    They are zero where keys weigh less than the rounding error of 1 in the mean.
    """
    arrays = (x.astype(value.dtype) for x in (chunk.query, chunk.key))
    query, key = around(*arrays)
    weights = key.where(chunk.visible[:, None]).weights()
    sums = einsum("bksm,bksv->bkmv", weights, value)
    state = LinearState(sums, weights.sum(axis=-2))
    rows = query_state(recurrence.arithmetic(chunk), state, query)
    least = jnp.finfo(value.dtype).eps / 2 * state.total[:, :, None, None, 0]
    some = jax.lax.stop_gradient(rows.denominator) > least
    return rows._replace(denominator=jnp.where(some, rows.denominator, 0))


def _both_sides(advance: Any, state: LinearState, stretch: Stretch) -> Rows:
    """Rows that see all of their segment: the past with itself, and the future without.

    Seen backwards, the future without itself is a past whose keys come a token late.
    """
    flipped = jax.tree.map(lambda x: jnp.flip(x, 1), stretch)
    segment = flipped.segment
    late = jnp.roll(segment, 1, axis=1) == segment
    late = late & (jnp.arange(segment.shape[1]) > 0)[None]
    backwards = flipped._replace(
        key=jnp.roll(flipped.key, 1, axis=1),
        value=jnp.roll(flipped.value, 1, axis=1),
        visible=jnp.roll(flipped.visible, 1, axis=1) & late,
        starts_segment=starts(segment),
    )
    _, past = scan(advance, state, stretch, 64)
    _, future = scan(advance, state, backwards, 64)
    return _merge_rows(past, jax.tree.map(lambda x: jnp.flip(x, 1), future))


def _merge_rows(one: Rows, two: Rows) -> Rows:
    """Rows that see the keys of both, which must be different keys.

    A side without keys has shift −∞: that of the other may be far below 0.
    """
    shifts = [jnp.where(x.size > 0, x.shift, -jnp.inf) for x in (one, two)]
    shift = finite(jnp.maximum(*shifts))
    a, b = (jnp.exp(own - shift) for own in shifts)
    return Rows(
        one.numerator * a[..., None] + two.numerator * b[..., None],
        one.denominator * a + two.denominator * b,
        one.size * a + two.size * b,
        shift,
    )
