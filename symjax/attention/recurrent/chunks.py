"""Tokens laid out in spans and chunks of time, and the scan over spans.

A `Span` holds the arrays of some consecutive tokens, in the layout of the arguments,
[B T …]. A `Chunk` is a span that is computed at once, with heads before time,
[B K T …]. `chunk_of` converts a span to a chunk.

A hidden token, or one that pads the last span, leaves every state unchanged:

- `layout` and `pad_into_spans` replace its key, its value and its operands by zeros.
  With β = 0 and a log-decay of 0 the delta rule neither erases, writes nor decays.
- `visible` is False for it. Linear attention sets the features of its key to zero,
  because φ(0) need not be 0.

A decay may be one number for all tokens. With a mask or segments it becomes an operand,
an array with an entry per token, which can be 0 at a hidden token
(`decays.shared_or_per_token`). Otherwise it stays one number, a parameter of the
recurrence. Then the only hidden tokens are those that pad the last span, and
`decays.until_end` does not count them.

A hidden token still has a row, which is computed from its query.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.operands import Tokens
from symjax.attention.core.products import products, sum_dtype
from symjax.attention.core.sequence import choose, id_changes, segment_runs_over
from symjax.attention.core.visibility import visible_keys


class Span(NamedTuple):
    """Consecutive tokens, time before heads.

    The keys, values and operands of hidden tokens are zeros.

    Attributes:
        operands: further arrays of the recurrence with one entry per token.
        segment: numbers of the segments; None if there are no segments.
        starts_segment: True where a token has another segment than the token before it;
            None without segments. It is False for the first token of the call, which
            continues from the given state.
    """

    query: Float[Array, "B T N H"]
    key: Float[Array, "B T K H"]
    value: Float[Array, "B T K V"]
    operands: tuple[Any, ...]  # [B T K …]
    visible: Bool[Array, "B T"]
    segment: Int[Array, "B T"] | None
    starts_segment: Bool[Array, "B T"] | None


class Chunk(NamedTuple):
    """A span that is computed at once, heads before time.

    The G query heads that share a key head are an axis. Attributes as in `Span`.
    """

    query: Float[Array, "B K G T H"]
    key: Float[Array, "B K T H"]
    value: Float[Array, "B K T V"]
    operands: tuple[Any, ...]  # [B K T …]
    visible: Bool[Array, "B T"]
    segment: Int[Array, "B T"] | None
    starts_segment: Bool[Array, "B T"] | None


def layout(tokens: Tokens, axis_name: str | None = None) -> Span:
    """Return all tokens as one span, with zeros for hidden keys, values and operands.

    A NaN in a hidden key, value or operand therefore reaches no sum and no gradient. A
    NaN in a hidden query reaches its own row, and the gradients of everything that the
    row reads.

    Args:
        axis_name: the mesh axis that time is split over, or None.
    """
    query, key, value, operands, mask, segment_ids = tokens
    batch, length = key.shape[:2]
    visible = visible_keys(mask, batch, length)

    def hidden_as_zeros(x: Array) -> Array:
        x = jnp.broadcast_to(x, (batch, length, *x.shape[2:]))
        if mask is not None:
            x = jnp.where(visible.reshape(batch, length, *[1] * (x.ndim - 2)), x, 0)
        return x

    segment = None
    if segment_ids is not None:
        segment, _ = segment_runs_over(segment_ids, axis_name)
    return Span(
        query,
        hidden_as_zeros(key),
        hidden_as_zeros(value),
        jax.tree.map(hidden_as_zeros, operands),
        visible,
        segment,
        None if segment is None else id_changes(segment),
    )


def chunk_of(span: Span) -> Chunk:
    """Return the span with heads before time, and query heads grouped by key head."""
    query, key, value = span[:3]
    heads_first = partial(jnp.swapaxes, axis1=1, axis2=2)
    return Chunk(
        group_heads(heads_first(query), key.shape[2]),
        heads_first(key),
        heads_first(value),
        jax.tree.map(heads_first, span.operands),
        span.visible,
        span.segment,
        span.starts_segment,
    )


def group_heads(x: Float[Array, "B N *rest"], heads: int) -> Array:
    """Return x with an axis of key heads, then one of the query heads of a key head."""
    return x.reshape(len(x), heads, x.shape[1] // max(1, heads), *x.shape[2:])


def product_and_arrays(
    chunk: Chunk,
) -> tuple[
    Callable[..., Array],
    Float[Array, "B K G T H"],
    Float[Array, "B K T H"],
    Float[Array, "B K T V"],
]:
    """Return the einsum for a chunk, and its query, key and value.

    The arrays are in the dtype of sums, float32 at least. The einsum is as precise as
    the dtypes of the chunk require (`core.products`).
    """
    query, key, value = chunk[:3]
    dtype = sum_dtype(query, key, value)
    arrays = query.astype(dtype), key.astype(dtype), value.astype(dtype)
    return products(query, key, value), *arrays


def time_first(rows: Float[Array, "B K G T *V"]) -> Float[Array, "B T K G *V"]:
    """Return rows of a chunk with time before heads, as `advance` returns them."""
    return jnp.moveaxis(rows, 3, 1)


def merge_heads(rows: Float[Array, "B T K G V"], dtype: Any) -> Float[Array, "B T N V"]:
    """Return rows with one axis of query heads, in the dtype of the output."""
    return rearrange(rows, "b t k g v -> b t (k g) v").astype(dtype)


# (parameters, state, span) → (the state after the span, its rows).
RunSpan = Callable[[Any, Any, Span], tuple[Any, Any]]


def scan(
    run_span: RunSpan, size: int, parameters: Any, state: Any, span: Span
) -> tuple[Any, Any]:
    """Run all of time, one span of `size` tokens after the other.

    The backward pass recomputes a span from the state before it.

    Returns:
        The state after the last span, and the rows [B T …] of all spans.
    """
    length = span.visible.shape[1]
    body = jax.checkpoint(partial(run_span, parameters), prevent_cse=False)
    state, rows = jax.lax.scan(body, state, split_into_spans(span, size))
    return state, join_rows(rows, length)


def split_into_spans(span: Span, size: int) -> Span:
    """Return spans of `size` tokens, stacked along a new first axis."""
    return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), pad_into_spans(span, size))


def pad_into_spans(span: Span, size: int) -> Span:
    """Return n spans [B n size …]; hidden tokens pad the last span."""
    length = span.visible.shape[1]
    size = max(1, min(size, length))
    count = -(-length // size)

    def fill(x: Array, mode: str = "constant") -> Array:
        if missing := count * size - length:
            widths = [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)
            x = jnp.pad(x, widths, mode=mode)
        return x.reshape(x.shape[0], count, size, *x.shape[2:])

    segment = span.segment
    rest = jax.tree.map(fill, span._replace(segment=None))
    return rest._replace(segment=None if segment is None else fill(segment, "edge"))


def join_rows(rows: Any, length: int) -> Any:
    """Return the rows [B T …] of spans [n B size …], without those of the padding."""

    def join(x: Array) -> Array:
        return jax.lax.collapse(jnp.moveaxis(x, 0, 1), 1, 3)[:, :length]

    return jax.tree.map(join, rows)


def lower_triangle(length: int) -> Bool[Array, "T T"]:
    """Return True for pairs [t, s] with s ≤ t.

    The program is shorter than that of `jnp.tril`.
    """
    rows, columns = (
        jax.lax.broadcasted_iota(jnp.int32, (length, length), axis) for axis in (0, 1)
    )
    return rows >= columns


def past_pairs(chunk: Chunk) -> Bool[Array, "#B T T"]:
    """Return True for pairs [t, s] with s ≤ t in one segment.

    Pairs with hidden keys are True as well. Hidden tokens add nothing, because their
    keys and values are zeros, and because mechanisms set their features to zero.
    """
    past = lower_triangle(chunk.value.shape[2])[None]
    if chunk.segment is None:
        return past
    return past & (chunk.segment[:, :, None] == chunk.segment[:, None, :])


def through_segments(
    chunk: Chunk, state: Any, empty: Any
) -> tuple[Any, Any, Array | None, Array | None]:
    """Return the states for the first and for the last segment of a chunk.

    A state sums the tokens of one segment. The rows of the first segment read `before`,
    and the tokens of the last one are added to `carried`. The other results say which
    rows and which tokens these are.

    Args:
        state: the state after the token before the chunk.
        empty: the state before any token, with arrays of the same shapes.
    Returns:
        before: the state that the first rows of the chunk read: `state`, or `empty` if
            a segment starts at the first token.
        carried: the state to which the tokens of the last segment of the chunk are
            added. It is `before` if the chunk has one segment, `empty` if it has
            several.
        reaches: [B T], True for the rows of the first segment of the chunk, which read
            `before`. None without segments: all rows read it.
        joins: [B T], True for the tokens of the last segment of the chunk, which are
            added to `carried`. None without segments: all tokens are added.
    """
    if chunk.segment is None or chunk.starts_segment is None:
        return state, state, None, None
    segment = chunk.segment
    first, last = segment == segment[:, :1], segment == segment[:, -1:]
    state = choose(chunk.starts_segment[:, 0], empty, state)
    return state, choose(first[:, -1], state, empty), first, last
