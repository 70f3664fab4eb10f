"""Engine of FLASH (`flash.py`): attention in groups of consecutive tokens.

A row is the sum of two parts:

- The near part is quadratic attention to the group of the row, with weights relu². The
  row-block engine (`scores/rows.py`) takes each group as one example.
- The far part is linear attention without a denominator to earlier groups. Its state is
  the sum Σ k vᵀ over these groups. Its recurrence is `EarlierGroups`. Without causality
  the far part reads all groups.

`attend_groups` computes all tokens of a sequence, `prefill` continues from a state, and
`step` decodes one token. Hidden tokens and padding have zeros as keys and values, so
their weights are 0 in both parts.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from symjax.attention.core import operands
from symjax.attention.core.meshes import on_any_mesh, spec_of_rows, vary_alike
from symjax.attention.core.products import products, sum_dtype
from symjax.attention.core.sequence import id_changes
from symjax.attention.recurrent.chunks import (
    Chunk,
    Span,
    chunk_of,
    layout,
    merge_heads,
    scan,
    through_segments,
)
from symjax.attention.recurrent.schedule import run_as_one_chunk, state_before_device
from symjax.attention.scores.mechanism import ScoreMechanism


class FlashState(NamedTuple):
    """State of FLASH, of a size that does not depend on T.

    Attributes:
        key, linear_key, value: tokens of the group that is not full yet, then zeros.
        place: number of tokens in that group.
        sums: Σ k vᵀ over all full groups, with linear keys, float32 at least.
    """

    key: Float[Array, "B G K H"]
    linear_key: Float[Array, "B G K M"]
    value: Float[Array, "B G K V"]
    place: Int[Array, " B"]
    sums: Float[Array, "B K M V"]


class FlashTokens(NamedTuple):
    """Arrays of consecutive tokens; hidden keys and values are zeros."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B T K H"]
    linear_query: Float[Array, "B T N M"]
    linear_key: Float[Array, "B T K M"]
    value: Float[Array, "B T K V"]
    segment: Int[Array, "B T"] | None  # numbers the segments, from 0


@dataclass(frozen=True)
class EarlierGroups:
    """Recurrence of the far part, whose chunks are groups.

    Rows read the sums of the groups before theirs, and none of their own group.
    """

    def prepare(self, parameters: None, span: Span) -> Chunk:
        return chunk_of(span)

    def advance(
        self, state: Array, chunk: Chunk
    ) -> tuple[Array, Float[Array, "B T K G V"]]:
        empty = jnp.zeros_like(state)
        before, carried, reaches, joins = through_segments(chunk, state, empty)
        query, key = chunk.query.astype(state.dtype), chunk.key
        if reaches is not None and joins is not None:
            query = jnp.where(reaches[:, None, None, :, None], query, 0)
            key = jnp.where(joins[:, None, :, None], key, 0)
        product = products(*chunk[:3])
        rows = product("bkgtm,bkmv->btkgv", query, before)  # [B T …], as in outputs
        carried = carried + self._sum(key, chunk.value, state.dtype)
        return carried, rows

    def effect(self, chunk: Chunk) -> tuple[Array, None]:
        return self._sum(chunk.key, chunk.value, sum_dtype(*chunk[:3])), None

    def merge(self, one: tuple, two: tuple) -> tuple[Array, None]:
        return one[0] + two[0], None

    def _sum(self, key: Array, value: Array, dtype: Any) -> Array:
        arrays = key.astype(dtype), value.astype(dtype)
        return products(key, value)("bksm,bksv->bkmv", *arrays)


class FlashSettings(NamedTuple):
    """Static settings of one call.

    Attributes:
        group_size: tokens of a group.
        weights: row weights of the near part.
        is_causal: whether rows see no later tokens.
        linear_divisor: divisor of the far part.
    """

    group_size: int
    is_causal: bool
    weights: operands.RowWeights
    linear_divisor: float


@on_any_mesh("settings", "axis_name", specs=spec_of_rows)
def attend_groups(
    settings: FlashSettings,
    axis_name: str | None,
    tokens: FlashTokens,
    scale: Array | None,
) -> Float[Array, "B T N V"]:
    """Return the rows of a sequence that starts with the first token.

    Args:
        axis_name: the mesh axis that time is split over, or None. With it, the tokens
            are those of this device.
        scale: factor of the scores, or None for the default.
    """
    if _is_empty(tokens):
        return _no_rows(tokens)
    length = tokens.key.shape[1]
    size = min(settings.group_size, length)
    padded, sums = jax.tree.map(lambda x: _pad(x, -length % size), tokens), None
    if axis_name is not None:
        sums = state_before_device(
            EarlierGroups(), None, _linear_span(padded), size, axis_name
        )
    output = _attend_whole_groups(settings, size, padded, scale, sums)
    return output[:, :length].astype(tokens.value.dtype)


@on_any_mesh("settings")
def prefill(
    settings: FlashSettings,
    tokens: FlashTokens,
    scale: Array | None,
    state: FlashState,
    count: Int[Array, " B"],
) -> tuple[Float[Array, "B T N V"], FlashState]:
    """Return the rows of tokens that follow a state, and the state after the tokens.

    The tokens are written after those of the state's unfinished group. Each example has
    its own number of tokens in that group.

    Args:
        count: how many of the new tokens the new state reads, for each example. The
            caller updates `place`.
    """
    if _is_empty(tokens):
        return _no_rows(tokens), state
    size, length = settings.group_size, tokens.key.shape[1]
    total = -(-(size - 1 + length) // size) * size

    def after_group(new: Array, old: Array | None = None) -> Array:
        old = new[:, :0] if old is None else old
        base = old.astype(jnp.promote_types(old.dtype, new.dtype))
        return _put(_pad(base, total - base.shape[1]), new, state.place)

    placed = FlashTokens(
        after_group(tokens.query),
        after_group(tokens.key, state.key),
        after_group(tokens.linear_query),
        after_group(tokens.linear_key, state.linear_key),
        after_group(tokens.value, state.value),
        None if tokens.segment is None else after_group(tokens.segment),
    )
    output = _attend_whole_groups(settings, size, placed, scale, state.sums)
    positions = state.place[:, None] + jnp.arange(length)[None]
    output = _take(output, positions).astype(tokens.value.dtype)
    return output, _cast_like(state, _state_after(settings, placed, state, count))


def _state_after(
    settings: FlashSettings,
    placed: FlashTokens,
    state: FlashState,
    count: Int[Array, " B"],
) -> FlashState:
    """Return the state after `count` more tokens, with the old `place`.

    With segments, it has only tokens of the segment of the last token that was read.

    Args:
        placed: the tokens of the state's group and the new ones, from a group's start.
    """
    size, total = settings.group_size, placed.key.shape[1]
    read = state.place + count
    first = read // size * size  # first token of the unfinished group
    earlier = (jnp.arange(total)[None] < first[:, None])[:, :, None, None]
    sums = state.sums
    if placed.segment is not None:
        last = _take(placed.segment, jnp.maximum(read - 1, 0)[:, None])
        stays = (placed.segment == last)[:, :, None, None]
        placed = placed._replace(
            key=jnp.where(stays, placed.key, 0),
            linear_key=jnp.where(stays, placed.linear_key, 0),
        )
        sums = jnp.where(last[:, :, None, None] == 0, sums, 0)
    key = jnp.where(earlier, placed.linear_key, 0)
    group = first[:, None] + jnp.arange(size)[None]
    return FlashState(
        _take(placed.key, group),
        _take(placed.linear_key, group),
        _take(placed.value, group),
        state.place,
        sums + _key_value_sums(key, placed.value, sums.dtype),
    )


@on_any_mesh("settings")
def step(
    settings: FlashSettings, tokens: FlashTokens, scale: Array | None, state: FlashState
) -> tuple[Float[Array, "B 1 N V"], FlashState]:
    """Return the row of one token, and the state after it.

    The token sees its group and the sums. Keys and values of places without a token are
    zeros, so that their weights are 0. The caller updates `place`.
    """
    if _is_empty(tokens):
        return _no_rows(tokens), state
    new = tokens.key, tokens.linear_key, tokens.value
    key, linear_key, value = (
        _put(old.astype(jnp.promote_types(old.dtype, x.dtype)), x, state.place)
        for old, x in zip(state[:3], new, strict=True)
    )
    attend = ScoreMechanism("flash_step", settings.weights)
    near = attend(tokens.query, key, _in_range(value), scale=scale)
    far = _read_sums(tokens.linear_query, state.sums) / settings.linear_divisor
    full = state.place + 1 == settings.group_size

    def fold(group: FlashState) -> FlashState:
        """Add full groups to the sums, and empty them."""
        key, linear_key, value, place, sums = group
        done = full[:, None, None, None]
        new = _key_value_sums(jnp.where(done, linear_key, 0), value, sums.dtype)
        return FlashState(
            jnp.where(done, 0, key),
            jnp.where(done, 0, linear_key),
            jnp.where(done, 0, value),
            place,
            sums + new,
        )

    group = FlashState(key, linear_key, value, state.place, state.sums)
    group = jax.lax.cond(full.any(), fold, lambda group: group, group)
    return (near + far).astype(tokens.value.dtype), _cast_like(state, group)


def _is_empty(tokens: FlashTokens) -> bool:
    """Return whether there is no example or no token."""
    return 0 in tokens.query.shape[:2]


def _no_rows(tokens: FlashTokens) -> Float[Array, "B T N V"]:
    shape = (*tokens.query.shape[:3], tokens.value.shape[-1])
    return jnp.zeros(shape, tokens.value.dtype)


def _in_range(value: Array) -> Array:
    """Return float16 values as float32: relu² soon overflows or underflows float16."""
    return value.astype(jnp.float32) if value.dtype == jnp.float16 else value


def _attend_whole_groups(
    settings: FlashSettings,
    size: int,
    tokens: FlashTokens,
    scale: Array | None,
    sums: Array | None = None,
) -> Float[Array, "B T N V"]:
    """Return the rows of whole groups of `size` tokens.

    Args:
        sums: Σ k vᵀ over the groups before the first one; None: there are none.
    """
    dtype = sum_dtype(*tokens[:5])
    batch, length, heads = tokens.query.shape[:3]
    count = batch * (length // size)
    grouped = jax.tree.map(lambda x: x.reshape(count, size, *x.shape[2:]), tokens)
    near = ScoreMechanism("flash", settings.weights)(
        grouped.query,
        grouped.key,
        _in_range(grouped.value),
        scale=scale,
        is_causal=settings.is_causal,
        segment_ids=grouped.segment,
    ).astype(dtype)
    if settings.is_causal:
        far = _earlier_groups(tokens, size, sums)
    elif tokens.segment is None:
        far = _read_sums(
            tokens.linear_query, _key_value_sums(tokens.linear_key, tokens.value, dtype)
        )
    else:
        own_group = ScoreMechanism("flash", _unnormalised)(
            grouped.linear_query,
            grouped.linear_key,
            grouped.value.astype(dtype),
            scale=1.0,
            segment_ids=grouped.segment,
        )
        flipped = jax.tree.map(lambda x: jnp.flip(x, 1), tokens)
        later = jnp.flip(_earlier_groups(flipped, size), 1)
        far = _earlier_groups(tokens, size) + later + own_group.reshape(later.shape)
    near = near.reshape(batch, length, heads, near.shape[-1])
    return near + far / settings.linear_divisor


def _unnormalised(scores: Array, visible: Array | None) -> Array:
    """Return the scores as row weights: linear attention without a denominator."""
    return scores if visible is None else jnp.where(visible, scores, 0)


def _earlier_groups(
    tokens: FlashTokens, size: int, sums: Array | None = None
) -> Float[Array, "B T N V"]:
    """Return linear attention of rows to the groups before theirs, in their segment."""
    span, dtype = _linear_span(tokens), sum_dtype(*tokens[:5])
    if sums is None:
        batch, _, heads, features = span.key.shape
        sums = jnp.zeros((batch, heads, features, span.value.shape[-1]))
    sums, span = vary_alike((sums.astype(dtype), span))
    _, rows = scan(partial(run_as_one_chunk, EarlierGroups()), size, None, sums, span)
    return merge_heads(rows, dtype)


def _linear_span(tokens: FlashTokens) -> Span:
    arrays = tokens.linear_query, tokens.linear_key, tokens.value
    span, segment = layout(operands.Tokens(*arrays)), tokens.segment
    if segment is None:
        return span
    return span._replace(segment=segment, starts_segment=id_changes(segment))


def _key_value_sums(key: Array, value: Array, dtype: Any) -> Float[Array, "B K M V"]:
    arrays = key.astype(dtype), value.astype(dtype)
    return products(key, value)("bskm,bskv->bkmv", *arrays)


def _read_sums(query: Array, sums: Array) -> Float[Array, "B T N V"]:
    batch, length, heads, size = query.shape
    grouped = query.reshape(batch, length, sums.shape[1], -1, size).astype(sums.dtype)
    rows = products(query)("btkgm,bkmv->btkgv", grouped, sums)
    return rows.reshape(batch, length, heads, -1)


def _pad(x: Array, amount: int) -> Array:
    """Pad the end of time with zeros; a key of zeros has the weight 0."""
    return jnp.pad(x, [(0, amount if axis == 1 else 0) for axis in range(x.ndim)])


def _put(base: Array, new: Array, place: Int[Array, " B"]) -> Array:
    """Write `new` into `base` [B T …], each example from its own place on."""
    write = partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
    return jax.vmap(write)(base, new.astype(base.dtype), place)


def _take(x: Array, places: Int[Array, "B t"]) -> Array:
    """Return x [B T …] at the places of each example; zeros beyond the end."""
    places = places.reshape(*places.shape, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(x, places, axis=1, mode="fill", fill_value=0)


def _cast_like(old: FlashState, new: FlashState) -> FlashState:
    """Return a state in the dtypes of the state before it, as loops need."""
    return jax.tree.map(lambda x, like: x.astype(like.dtype), new, old)
