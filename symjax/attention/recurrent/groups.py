"""Attention in groups of tokens: quadratic inside a group, linear across groups.

The engine of `flash.py`. A group is a short sequence of its own to the row-block
engine; the groups before it are a sum of fixed size. Tokens that are hidden, or are not
there, have keys of zero, which weigh nothing in either part.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from symjax.attention.core import operands
from symjax.attention.core.meshes import on_any_mesh, rows_alone, vary_alike
from symjax.attention.core.products import products, sum_dtype
from symjax.attention.core.sequence import starts
from symjax.attention.gau import SquaredReLU
from symjax.attention.recurrent.chunks import (
    Chunk,
    Stretch,
    chunk_of,
    heads_joined,
    layout,
    scan,
    through_segments,
)
from symjax.attention.recurrent.schedule import in_one, state_before
from symjax.attention.scores.mechanism import ScoreMechanism


class FlashState(NamedTuple):
    """What FLASH keeps of the tokens it has read: its size has no T in it.

    The tokens of the group that is not full yet, with zeros where none is; how many
    they are; and Σ k vᵀ over the groups before, of linear keys, in float32 at least.
    """

    key: Float[Array, "B G K H"]
    linear_key: Float[Array, "B G K M"]
    value: Float[Array, "B G K V"]
    place: Int[Array, " B"]
    sums: Float[Array, "B K M V"]


class FlashTokens(NamedTuple):
    """A stretch of time; hidden keys and values are zero, and so weigh nothing."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B T K H"]
    linear_query: Float[Array, "B T N M"]
    linear_key: Float[Array, "B T K M"]
    value: Float[Array, "B T K V"]
    segment: Int[Array, "B T"] | None  # numbers the segments, from 0


@dataclass(frozen=True)
class Far:
    """The recurrence of the far part: a row reads the sums of the groups before it."""

    def prepare(self, parameters: None, stretch: Stretch) -> Chunk:
        return chunk_of(stretch)

    def advance(
        self, state: Array, chunk: Chunk
    ) -> tuple[Array, Float[Array, "B T K G V"]]:
        found = through_segments(chunk, state, jnp.zeros_like(state))
        before, carried, reaches, joins = found
        query, key = chunk.query.astype(state.dtype), chunk.key
        if reaches is not None and joins is not None:
            query = jnp.where(reaches[:, None, None, :, None], query, 0)
            key = jnp.where(joins[:, None, :, None], key, 0)
        product = products(*chunk[:3])
        rows = product("bkgtm,bkmv->btkgv", query, before)  # as outputs lie
        carried = carried + self._sum(key, chunk.value, state.dtype)
        return carried, rows

    def effect(self, chunk: Chunk) -> tuple[Array, None]:
        return self._sum(chunk.key, chunk.value, sum_dtype(*chunk[:3])), None

    def merge(self, one: tuple, two: tuple) -> tuple[Array, None]:
        return one[0] + two[0], None

    def _sum(self, key: Array, value: Array, dtype: Any) -> Array:
        given = key.astype(dtype), value.astype(dtype)
        return products(key, value)("bksm,bksv->bkmv", *given)


class FlashSettings(NamedTuple):
    """Static settings of one call."""

    group_size: int
    is_causal: bool
    divisor: float
    linear_divisor: float


@on_any_mesh("settings", "axis_name", specs=rows_alone)
def whole(
    settings: FlashSettings,
    axis_name: str | None,
    tokens: FlashTokens,
    scale: Array | None,
) -> Float[Array, "B T N V"]:
    """All tokens from the first one on, or a device's own stretch of them."""
    if _is_empty(tokens):
        return _no_rows(tokens)
    length = tokens.key.shape[1]
    size = min(settings.group_size, length)
    filled, sums = jax.tree.map(lambda x: _fill(x, -length % size), tokens), None
    if axis_name is not None:
        sums = state_before(Far(), None, _far_keys(filled), size, axis_name)
    output = _attend(settings, size, filled, scale, sums)
    return output[:, :length].astype(tokens.value.dtype)


@on_any_mesh("settings")
def prefill(
    settings: FlashSettings,
    tokens: FlashTokens,
    scale: Array | None,
    state: FlashState,
    count: Int[Array, " B"],
) -> tuple[Float[Array, "B T N V"], FlashState]:
    """The tokens put behind those of the state's group, each example at its place.

    Args:
        count: tokens that the state is to read; the caller moves its place.
    """
    if _is_empty(tokens):
        return _no_rows(tokens), state
    size, length = settings.group_size, tokens.key.shape[1]
    total = -(-(size - 1 + length) // size) * size

    def behind(new: Array, old: Array | None = None) -> Array:
        old = new[:, :0] if old is None else old
        base = old.astype(jnp.promote_types(old.dtype, new.dtype))
        return _put(_fill(base, total - base.shape[1]), new, state.place)

    laid = FlashTokens(
        behind(tokens.query),
        behind(tokens.key, state.key),
        behind(tokens.linear_query),
        behind(tokens.linear_key, state.linear_key),
        behind(tokens.value, state.value),
        None if tokens.segment is None else behind(tokens.segment),
    )
    output = _attend(settings, size, laid, scale, state.sums)
    own = state.place[:, None] + jnp.arange(length)[None]
    output = _take(output, own).astype(tokens.value.dtype)
    return output, _as(state, _after(settings, laid, state, count))


def _after(
    settings: FlashSettings,
    laid: FlashTokens,
    state: FlashState,
    count: Int[Array, " B"],
) -> FlashState:
    """The state `count` tokens on, at the old place: of the segment of the last of them
    alone."""
    size, total = settings.group_size, laid.key.shape[1]
    read = state.place + count
    first = read // size * size  # of the group that is not full
    earlier = (jnp.arange(total)[None] < first[:, None])[:, :, None, None]
    sums = state.sums
    if laid.segment is not None:
        last = _take(laid.segment, jnp.maximum(read - 1, 0)[:, None])
        stays = (laid.segment == last)[:, :, None, None]
        laid = laid._replace(
            key=jnp.where(stays, laid.key, 0),
            linear_key=jnp.where(stays, laid.linear_key, 0),
        )
        sums = jnp.where(last[:, :, None, None] == 0, sums, 0)
    key = jnp.where(earlier, laid.linear_key, 0)
    group = first[:, None] + jnp.arange(size)[None]
    return FlashState(
        _take(laid.key, group),
        _take(laid.linear_key, group),
        _take(laid.value, group),
        state.place,
        sums + _sum(key, laid.value, sums.dtype),
    )


@on_any_mesh("settings")
def step(
    settings: FlashSettings, tokens: FlashTokens, scale: Array | None, state: FlashState
) -> tuple[Float[Array, "B 1 N V"], FlashState]:
    """One token, which sees its group and the sums. Empty places weigh nothing, and the
    caller moves the state's."""
    if _is_empty(tokens):
        return _no_rows(tokens), state
    new = tokens.key, tokens.linear_key, tokens.value
    key, linear_key, value = (
        _put(old.astype(jnp.promote_types(old.dtype, x.dtype)), x, state.place)
        for old, x in zip(state[:3], new, strict=True)
    )
    attend = ScoreMechanism("flash_step", SquaredReLU(settings.divisor))
    near = attend(tokens.query, key, _in_range(value), scale=scale)
    far = _read(tokens.linear_query, state.sums) / settings.linear_divisor
    full = state.place + 1 == settings.group_size

    def fold(group: FlashState) -> FlashState:
        """Full groups become part of the sums."""
        key, linear_key, value, place, sums = group
        done = full[:, None, None, None]
        new = _sum(jnp.where(done, linear_key, 0), value, sums.dtype)
        return FlashState(
            jnp.where(done, 0, key),
            jnp.where(done, 0, linear_key),
            jnp.where(done, 0, value),
            place,
            sums + new,
        )

    group = FlashState(key, linear_key, value, state.place, state.sums)
    group = jax.lax.cond(full.any(), fold, lambda group: group, group)
    return (near + far).astype(tokens.value.dtype), _as(state, group)


def _is_empty(tokens: FlashTokens) -> bool:
    """No example, or no token in any."""
    return 0 in tokens.query.shape[:2]


def _no_rows(tokens: FlashTokens) -> Float[Array, "B T N V"]:
    shape = (*tokens.query.shape[:3], tokens.value.shape[-1])
    return jnp.zeros(shape, tokens.value.dtype)


def _in_range(value: Array) -> Array:
    """Values as float32 where they are float16, in which relu² is soon ∞ or 0."""
    return value.astype(jnp.float32) if value.dtype == jnp.float16 else value


def _attend(
    settings: FlashSettings,
    size: int,
    tokens: FlashTokens,
    scale: Array | None,
    sums: Array | None = None,
) -> Float[Array, "B T N V"]:
    """Whole groups of `size` tokens, after the groups summed up in `sums`."""
    dtype = sum_dtype(*tokens[:5])
    batch, length, heads = tokens.query.shape[:3]
    count = batch * (length // size)
    grouped = jax.tree.map(lambda x: x.reshape(count, size, *x.shape[2:]), tokens)
    near = ScoreMechanism("flash", SquaredReLU(settings.divisor))(
        grouped.query,
        grouped.key,
        _in_range(grouped.value),
        scale=scale,
        is_causal=settings.is_causal,
        segment_ids=grouped.segment,
    ).astype(dtype)
    if settings.is_causal:
        far = _earlier(tokens, size, sums)
    elif tokens.segment is None:
        far = _read(tokens.linear_query, _sum(tokens.linear_key, tokens.value, dtype))
    else:
        own = ScoreMechanism("flash", _products)(
            grouped.linear_query,
            grouped.linear_key,
            grouped.value.astype(dtype),
            scale=1.0,
            segment_ids=grouped.segment,
        )
        flipped = jax.tree.map(lambda x: jnp.flip(x, 1), tokens)
        later = jnp.flip(_earlier(flipped, size), 1)
        far = _earlier(tokens, size) + later + own.reshape(later.shape)
    near = near.reshape(batch, length, heads, near.shape[-1])
    return near + far / settings.linear_divisor


def _products(scores: Array, visible: Array | None) -> Array:
    """Row weights of linear attention without a denominator."""
    return scores if visible is None else jnp.where(visible, scores, 0)


def _earlier(
    tokens: FlashTokens, size: int, sums: Array | None = None
) -> Float[Array, "B T N V"]:
    """Every row's linear attention to the groups before its own, inside its segment."""
    stretch, dtype = _far_keys(tokens), sum_dtype(*tokens[:5])
    if sums is None:
        batch, _, heads, features = stretch.key.shape
        sums = jnp.zeros((batch, heads, features, stretch.value.shape[-1]))
    sums, stretch = vary_alike((sums.astype(dtype), stretch))
    _, rows = scan(partial(in_one, Far()), size, None, sums, stretch)
    return heads_joined(rows, dtype)


def _far_keys(tokens: FlashTokens) -> Stretch:
    given = tokens.linear_query, tokens.linear_key, tokens.value
    stretch, segment = layout(operands.Tokens(*given)), tokens.segment
    if segment is None:
        return stretch
    return stretch._replace(segment=segment, starts_segment=starts(segment))


def _sum(key: Array, value: Array, dtype: Any) -> Float[Array, "B K M V"]:
    given = key.astype(dtype), value.astype(dtype)
    return products(key, value)("bskm,bskv->bkmv", *given)


def _read(query: Array, sums: Array) -> Float[Array, "B T N V"]:
    batch, length, heads, size = query.shape
    grouped = query.reshape(batch, length, sums.shape[1], -1, size).astype(sums.dtype)
    rows = products(query)("btkgm,bkmv->btkgv", grouped, sums)
    return rows.reshape(batch, length, heads, -1)


def _fill(x: Array, amount: int) -> Array:
    """Zeros at the end of time: of keys they are as good as hidden."""
    return jnp.pad(x, [(0, amount if axis == 1 else 0) for axis in range(x.ndim)])


def _put(base: Array, new: Array, place: Int[Array, " B"]) -> Array:
    """`new` written over `base` [B T …], each example from its own place on."""
    write = partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
    return jax.vmap(write)(base, new.astype(base.dtype), place)


def _take(x: Array, places: Int[Array, "B t"]) -> Array:
    """Each example's own places of x [B T …]; zeros beyond the end."""
    places = places.reshape(*places.shape, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(x, places, axis=1, mode="fill", fill_value=0)


def _as(old: FlashState, new: FlashState) -> FlashState:
    """A state in the dtypes of the one before it, as loops need."""
    return jax.tree.map(lambda x, like: x.astype(like.dtype), new, old)
