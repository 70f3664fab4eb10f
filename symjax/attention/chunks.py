"""Tokens laid out in chunks of time, and the scan over them."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.masks import visible_keys
from symjax.attention.meshes import split_by_xla
from symjax.attention.segments import starts
from symjax.attention.shards import choose, segment_runs_over


def _einsum(precision: jax.lax.Precision, spec: str, *arrays: Array) -> Array:
    """`jnp.einsum`; on a CPU with B and K as one axis, and G and T, where they are side
    by side and no mesh may split them. It stands inside `on_any_mesh`.

    XLA's compiler for CPUs transposes the operands of products with two batch axes, and
    computes once more what these are made of.
    """
    plain = partial(jnp.einsum, spec, precision=precision)
    *names, output = terms = re.split(",|->", spec)
    pairs = [
        pair
        for pair in ("bk", "gt")
        if pair in spec and all(pair in x or not {*pair} & {*x} for x in terms)
    ]
    if not pairs or split_by_xla():
        return plain(*arrays)
    shapes = [n for x in arrays for n in x.shape]
    every = list(zip("".join(names), shapes, strict=True))
    sizes = dict(every)
    if any(sizes[c] != n for c, n in every):  # one of them is broadcast
        return plain(*arrays)

    def merged(*arrays: Array) -> Array:
        short, both = spec, dict(sizes)
        for one, two in pairs:
            short = short.replace(one + two, one)
            both[one] *= sizes[two]
        operands = [
            x.reshape([both[c] for c in name])
            for x, name in zip(arrays, re.split(",|->", short), strict=False)
        ]
        found = jnp.einsum(short, *operands, precision=precision)
        return found.reshape([sizes[c] for c in output])

    return jax.lax.platform_dependent(*arrays, cpu=merged, default=plain)


einsum = partial(_einsum, jax.lax.Precision.HIGHEST)
on_tensor_cores = partial(_einsum, jax.lax.Precision.HIGH)
TILE = 128  # accelerators multiply by tiles of so many rows


class Tokens(NamedTuple):
    """What a mechanism is given, as it is given."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]
    operands: tuple[Any, ...] = ()  # more of each token, [#B #T K …]
    mask: Bool[Array, "#B 1 1 #S"] | None = None
    segment_ids: Int[Array, "B T"] | None = None


class Chunk(NamedTuple):
    """A stretch of time, heads before time. Of hidden tokens all but the query is 0.

    `segment` numbers the segments; `starts_segment` marks the first token of each but
    the one that continues from the state. Both are None where there are no segments.
    """

    query: Float[Array, "B K G T H"]
    key: Float[Array, "B K T H"]
    value: Float[Array, "B K T V"]
    operands: tuple[Any, ...]  # more of each token, [B K T …]
    visible: Bool[Array, "B T"]
    segment: Int[Array, "B T"] | None
    starts_segment: Bool[Array, "B T"] | None


def sum_dtype(*arrays: Array) -> Any:
    """The dtype of sums over time: that of the arrays, float32 at least."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def products(*arrays: Array) -> Callable[..., Array]:
    """`einsum` of float32 sums, as exact as what they are sums of.

    Where all arrays have 16 bits that is three passes on TPUs and TF32 on GPUs, whose
    tensor cores do not multiply in full precision.
    """
    narrow = jnp.result_type(*arrays).itemsize == 2
    return on_tensor_cores if narrow else einsum


def layout(tokens: Tokens, axis_name: str | None = None) -> Chunk:
    """All tokens [B T …] as one chunk: heads before time, queries by their key head.

    Zeros stand for hidden keys, values and operands: a NaN in these reaches no sum and
    no gradient. One in a hidden query reaches its own row, and through that row's
    cotangent the gradients of all that the row reads.
    """
    query, key, value, operands, mask, segment_ids = tokens
    batch, length, heads, _ = key.shape
    visible = jnp.ones((batch, length), bool)
    if mask is not None:
        visible = visible_keys(mask, batch, length)

    def seen(x: Array) -> Array:
        x = jnp.broadcast_to(x, (batch, length, *x.shape[2:]))
        if mask is not None:
            x = jnp.where(visible.reshape(batch, length, *[1] * (x.ndim - 2)), x, 0)
        return jnp.swapaxes(x, 1, 2)

    segment = None
    if segment_ids is not None:
        segment, _ = segment_runs_over(segment_ids, axis_name)
    return Chunk(
        rearrange(query, "b t (k g) h -> b k g t h", k=heads),
        seen(key),
        seen(value),
        jax.tree.map(seen, operands),
        visible,
        segment,
        None if segment is None else starts(segment),
    )


def heads_last(rows: Float[Array, "B K G T V"], dtype: Any) -> Float[Array, "B T N V"]:
    return rearrange(rows, "b k g t v -> b t (k g) v").astype(dtype)


def scan(advance: Any, state: Any, chunk: Chunk, chunk_size: int) -> tuple[Any, Any]:
    """All of time, a chunk after the other: the last state, and rows [B K G T …].

    The backward pass recomputes a chunk from the state before it.
    """
    length = chunk.key.shape[2]
    body = jax.checkpoint(advance, prevent_cse=False)
    state, rows = jax.lax.scan(body, state, in_chunks(chunk, chunk_size))
    return state, joined(rows, length)


def in_chunks(chunk: Chunk, chunk_size: int) -> Chunk:
    """Chunks stacked in front; the last is filled up with hidden tokens."""
    size = max(1, min(chunk_size, chunk.key.shape[2]))
    return Chunk(
        cut(chunk.query, size, 3),
        cut(chunk.key, size, 2),
        cut(chunk.value, size, 2),
        jax.tree.map(lambda x: cut(x, size, 2), chunk.operands),
        cut(chunk.visible, size, 1),
        None if chunk.segment is None else cut(chunk.segment, size, 1, "edge"),
        jax.tree.map(lambda x: cut(x, size, 1), chunk.starts_segment),
    )


def joined(rows: Any, length: int) -> Any:
    """Rows of chunks stacked in front, as one."""

    def join(x: Array) -> Array:
        return jax.lax.collapse(jnp.moveaxis(x, 0, 3), 3, 5)[:, :, :, :length]

    return jax.tree.map(join, rows)


def cut(x: Array, size: int, axis: int, mode: str = "constant") -> Array:
    """Chunks of time stacked in front; the last is filled up, with zeros by default."""
    length = x.shape[axis]
    count = -(-length // size)
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, count * size - length)
    x = jnp.pad(x, widths, mode=mode)
    x = x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


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
