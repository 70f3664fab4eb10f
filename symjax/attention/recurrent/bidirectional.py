"""Linear attention to all keys: of the past and of the future alike.

All keys become one state, which every query reads; few keys stand beside the queries as
in a chunk. With segments, rows of their past and of their future are merged.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.core.arguments import check_tokens
from symjax.attention.core.feature_maps import finite
from symjax.attention.core.meshes import on_any_mesh, rows_alone, vary_alike
from symjax.attention.core.operands import Tokens
from symjax.attention.core.products import sum_dtype
from symjax.attention.core.sequence import starts
from symjax.attention.recurrent.chunks import (
    Stretch,
    heads_joined,
    layout,
    scan,
    time_first,
)
from symjax.attention.recurrent.normalised import (
    LinearState,
    Mapped,
    Normalised,
    Rows,
    divide,
    query_state,
)


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


@on_any_mesh("recurrence", specs=rows_alone)
def _attend(
    recurrence: Normalised, tokens: Tokens, parameters: Any
) -> Float[Array, "B T N V"]:
    stretch = layout(tokens)
    batch, _, heads, size = stretch.key.shape
    sizes = batch, heads, size, stretch.value.shape[-1]
    state = recurrence.empty(parameters, sizes, sum_dtype(*stretch[:3]))
    if stretch.segment is None:
        mapped = recurrence.prepare(parameters, stretch)
        rows = time_first(divide(_all_keys(recurrence, state, mapped)))
    else:
        state, stretch = vary_alike((state, stretch))
        rows = divide(_both_sides(recurrence, parameters, state, stretch))
    return heads_joined(rows, tokens.value.dtype)


def _all_keys(recurrence: Normalised, state: LinearState, mapped: Mapped) -> Rows:
    """Rows that see all visible keys, from an empty state."""
    length, size, features = *mapped.value.shape[2:], state.total.shape[-1]
    if length * (features + size) > features * size:
        if around := recurrence.features.around:
            return _read_around(recurrence, around, mapped)
        state, _ = recurrence.effect(mapped)
        how = recurrence.arithmetic(mapped.chunk)
        return query_state(how, state, mapped.query)
    # Few keys: their pairs cost less than sums, and no digit where signs cancel.
    return recurrence.rows(state, mapped, jnp.ones((1, 1, 1), bool))


def _read_around(recurrence: Normalised, around: Callable, mapped: Mapped) -> Rows:
    """Rows that see all keys by features that are made for these keys.

    They are zero where keys weigh less than the rounding error of 1 in the mean.
    """
    chunk, value = mapped.chunk, mapped.value
    arrays = (x.astype(value.dtype) for x in (chunk.query, chunk.key))
    query, key = around(*arrays)
    weights = key.where(chunk.visible[:, None]).weights()
    how = recurrence.arithmetic(chunk)
    sums = how.product("bksm,bksv->bkmv", weights, value)
    state = LinearState(sums, weights.sum(axis=-2))
    rows = query_state(how, state, query)
    least = jnp.finfo(value.dtype).eps / 2 * state.total[:, :, None, None, 0]
    some = jax.lax.stop_gradient(rows.denominator) > least
    return rows._replace(denominator=jnp.where(some, rows.denominator, 0))


def _both_sides(
    recurrence: Normalised, parameters: Any, state: LinearState, stretch: Stretch
) -> Rows:
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

    def advance(parameters: Any, state: LinearState, stretch: Stretch) -> tuple:
        mapped = recurrence.prepare(parameters, stretch)
        return recurrence.advance(state, mapped, divided=False)

    past, future = (
        scan(advance, 64, parameters, state, side)[1] for side in (stretch, backwards)
    )
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
