"""Linear attention over all keys, those of the future too."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.causal import one_by_one
from symjax.attention.checks import check
from symjax.attention.chunks import (
    Chunk,
    Tokens,
    einsum,
    heads_last,
    layout,
    starts,
    sum_dtype,
)
from symjax.attention.linear_state import (
    LinearState,
    finite,
    highest_exponent,
    rescale,
    update,
)
from symjax.attention.meshes import on_any_mesh, vary_alike
from symjax.attention.normalised import Normalised
from symjax.attention.quotients import Rows, divide, row_weights, rows_of


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
    check(who, query, key, value, mask, segment_ids, causal=segment_ids is not None)
    tokens = Tokens(query, key, value, (), mask, segment_ids)
    return _attend(recurrence, tokens, parameters)[0]


@on_any_mesh(1)
def _attend(
    recurrence: Normalised, tokens: Tokens, parameters: Any
) -> tuple[Float[Array, "B T N V"], tuple]:
    rows = _whole(recurrence, parameters, layout(tokens))
    return heads_last(rows, tokens.value.dtype), ()


def _whole(
    recurrence: Normalised, parameters: Any, chunk: Chunk
) -> Float[Array, "B K G T V"]:
    """Rows that see all visible keys of their segment."""
    state, features = recurrence.empty_for(parameters, chunk), recurrence.features
    if chunk.segment is not None:
        return divide(_both_sides(recurrence, parameters, *vary_alike((state, chunk))))
    query, key, value, divisor = recurrence.operands(parameters, chunk)
    leading, signed = recurrence.leading(chunk), features.signed
    length, size, count = *value.shape[2:], state.total.shape[-1]
    if length * (count + size) > count * size:
        if features.around is not None:
            return divide(_read_around(features.around, chunk, leading))
        state = update(state, key, value)
        weights = row_weights(query, state.running_max)
        return divide(rows_of(state, weights, value, signed, leading))
    # Few keys: their pairs cost less than sums, and no digit where signs cancel.
    highest = highest_exponent(state, key)
    weights = recurrence.weights(chunk, query, key, highest, divisor)
    return divide(rows_of(rescale(state, highest), weights, value, signed))


def _read_around(around: Callable, chunk: Chunk, leading: int) -> Rows:
    """Rows that see all keys by features that are made for these keys.

    They are zero where keys weigh less than the rounding error of 1 in the mean.
    """
    dtype = sum_dtype(chunk.query, chunk.key, chunk.value)
    query, key, value = (x.astype(dtype) for x in chunk[:3])
    asking, key = around(query, key)
    weights = key.where(chunk.visible[:, None]).weights()
    sums = einsum("bksm,bksv->bkmv", weights, value)
    state = LinearState(sums, weights.sum(axis=-2))
    rows = rows_of(state, row_weights(asking, None), value, True, leading)
    least = jnp.finfo(dtype).eps / 2 * state.total[:, :, None, None, 0]
    some = jax.lax.stop_gradient(rows.denominator) > least
    return rows._replace(denominator=jnp.where(some, rows.denominator, 0))


def _both_sides(
    recurrence: Normalised, parameters: Any, state: LinearState, chunk: Chunk
) -> Rows:
    """Rows that see all of their segment: the past with itself, and the future without.

    Seen backwards, the future without itself is a past whose keys come a token late.
    """
    segment = jnp.flip(jnp.asarray(chunk.segment), 1)
    late = jnp.roll(segment, 1, axis=1) == segment
    late = late & (jnp.arange(segment.shape[1]) > 0)[None]
    backwards = chunk._replace(
        query=jnp.flip(chunk.query, 3),
        key=jnp.roll(jnp.flip(chunk.key, 2), 1, axis=2),
        value=jnp.roll(jnp.flip(chunk.value, 2), 1, axis=2),
        visible=jnp.roll(jnp.flip(chunk.visible, 1), 1, axis=1) & late,
        segment=segment,
        starts_segment=starts(segment),
    )
    given = replace(recurrence, divided=False), 64, parameters, state
    rows: list[Any] = [one_by_one(*given, x)[1] for x in (chunk, backwards)]
    past, future = rows
    return _merge_rows(past, jax.tree.map(lambda x: jnp.flip(x, 3), future))


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
