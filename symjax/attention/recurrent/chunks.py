"""Tokens laid out in chunks of time, and the scan over them."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.operands import Tokens
from symjax.attention.core.products import products, sum_dtype
from symjax.attention.core.sequence import choose, segment_runs_over, starts
from symjax.attention.core.visibility import visible_keys


class Stretch(NamedTuple):
    """A stretch of time, time before heads. Of hidden tokens all but the query is 0.

    `segment` numbers the segments; `starts_segment` marks the first token of each but
    the one that continues from the state. Both are None where there are no segments.
    """

    query: Float[Array, "B T N H"]
    key: Float[Array, "B T K H"]
    value: Float[Array, "B T K V"]
    operands: tuple[Any, ...]  # more of each token, [B T K …]
    visible: Bool[Array, "B T"]
    segment: Int[Array, "B T"] | None
    starts_segment: Bool[Array, "B T"] | None


class Chunk(NamedTuple):
    """A stretch that is computed at once, heads before time, queries by key head."""

    query: Float[Array, "B K G T H"]
    key: Float[Array, "B K T H"]
    value: Float[Array, "B K T V"]
    operands: tuple[Any, ...]  # more of each token, [B K T …]
    visible: Bool[Array, "B T"]
    segment: Int[Array, "B T"] | None
    starts_segment: Bool[Array, "B T"] | None


def layout(tokens: Tokens, axis_name: str | None = None) -> Stretch:
    """All tokens as one stretch.

    Zeros stand for hidden keys, values and operands: a NaN in these reaches no sum and
    no gradient. One in a hidden query reaches its own row, and through that row's
    cotangent the gradients of all that the row reads.
    """
    query, key, value, operands, mask, segment_ids = tokens
    batch, length = key.shape[:2]
    visible = visible_keys(mask, batch, length)

    def seen(x: Array) -> Array:
        x = jnp.broadcast_to(x, (batch, length, *x.shape[2:]))
        if mask is not None:
            x = jnp.where(visible.reshape(batch, length, *[1] * (x.ndim - 2)), x, 0)
        return x

    segment = None
    if segment_ids is not None:
        segment, _ = segment_runs_over(segment_ids, axis_name)
    return Stretch(
        query,
        seen(key),
        seen(value),
        jax.tree.map(seen, operands),
        visible,
        segment,
        None if segment is None else starts(segment),
    )


def chunk_of(stretch: Stretch) -> Chunk:
    """The same, heads before time."""
    query, key, value = stretch[:3]
    heads_first = partial(jnp.swapaxes, axis1=1, axis2=2)
    return Chunk(
        rearrange(query, "b t (k g) h -> b k g t h", k=key.shape[2]),
        heads_first(key),
        heads_first(value),
        jax.tree.map(heads_first, stretch.operands),
        stretch.visible,
        stretch.segment,
        stretch.starts_segment,
    )


def widened(
    chunk: Chunk,
) -> tuple[
    Callable[..., Array],
    Float[Array, "B K G T H"],
    Float[Array, "B K T H"],
    Float[Array, "B K T V"],
]:
    """How to multiply queries, keys and values, and these in the dtype of sums."""
    query, key, value = chunk[:3]
    dtype = sum_dtype(query, key, value)
    given = query.astype(dtype), key.astype(dtype), value.astype(dtype)
    return products(query, key, value), *given


def time_first(rows: Float[Array, "B K G T *V"]) -> Float[Array, "B T K G *V"]:
    return jnp.moveaxis(rows, 3, 1)


def heads_joined(
    rows: Float[Array, "B T K G V"], dtype: Any
) -> Float[Array, "B T N V"]:
    return rearrange(rows, "b t k g v -> b t (k g) v").astype(dtype)


# (parameters, state, stretch) → the state after it, and its rows.
Advance = Callable[[Any, Any, Stretch], tuple[Any, Any]]


def scan(
    advance: Advance, size: int, parameters: Any, state: Any, stretch: Stretch
) -> tuple[Any, Any]:
    """`advance` over all of time, a stretch of `size` after the other.

    The backward pass recomputes a stretch from the state before it.
    """
    length = stretch.visible.shape[1]
    body = jax.checkpoint(partial(advance, parameters), prevent_cse=False)
    state, rows = jax.lax.scan(body, state, cut(stretch, size))
    return state, joined(rows, length)


def cut(stretch: Stretch, size: int) -> Stretch:
    """Stretches of `size` stacked in front."""
    return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), filled(stretch, size))


def filled(stretch: Stretch, size: int) -> Stretch:
    """[B n size …]; the last of n stretches is filled up with hidden tokens."""
    length = stretch.visible.shape[1]
    size = max(1, min(size, length))
    count = -(-length // size)

    def fill(x: Array, mode: str = "constant") -> Array:
        if missing := count * size - length:
            widths = [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)
            x = jnp.pad(x, widths, mode=mode)
        return x.reshape(x.shape[0], count, size, *x.shape[2:])

    segment = stretch.segment
    rest = jax.tree.map(fill, stretch._replace(segment=None))
    return rest._replace(segment=None if segment is None else fill(segment, "edge"))


def joined(rows: Any, length: int) -> Any:
    """Rows [B T …] of stretches stacked in front, as one."""

    def join(x: Array) -> Array:
        return jax.lax.collapse(jnp.moveaxis(x, 0, 1), 1, 3)[:, :length]

    return jax.tree.map(join, rows)


def past_pairs(chunk: Chunk) -> Bool[Array, "#B T T"]:
    """Who may see whom: the past and oneself, inside one segment."""
    length = chunk.value.shape[2]
    past = jnp.tril(jnp.ones((1, length, length), bool))
    if chunk.segment is None:
        return past
    return past & (chunk.segment[:, :, None] == chunk.segment[:, None, :])


def through_segments(
    chunk: Chunk, state: Any, empty: Any
) -> tuple[Any, Any, Array | None, Array | None]:
    """What the segments of a chunk do to a state that adds up one segment's tokens.

    Returns:
        The state before the chunk, which a segment's start forgets; what is left of it
        after the chunk; the rows [B T] that reach it, and the tokens [B T] that join
        it, those of the chunk's first and last segment (None: all).
    """
    if chunk.segment is None or chunk.starts_segment is None:
        return state, state, None, None
    segment = chunk.segment
    first, last = segment == segment[:, :1], segment == segment[:, -1:]
    state = choose(chunk.starts_segment[:, 0], empty, state)
    return state, choose(first[:, -1], state, empty), first, last
