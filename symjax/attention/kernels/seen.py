"""Which pairs of a chunk of time see each other, for kernels that keep a state.

A kernel gets the flags of each token, in one integer, and the number of its segment, or
None where all tokens are visible and of one segment.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.chunks import Tokens
from symjax.attention.kernels.blocks import column
from symjax.attention.masks import only_seen, visible_keys
from symjax.attention.segments import segment_runs, starts

# What flags say of a token.
VISIBLE, SEES, REACHES, JOINS, KEEPS = 1, 2, 4, 8, 16


class Shown(NamedTuple):
    """Query, key and value in one dtype, those of hidden tokens 0."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B T K H"]
    value: Float[Array, "B T K V"]
    visible: Bool[Array, "B T"] | None  # None: all are
    segment: Int[Array, "B T"] | None  # the number of it

    @classmethod
    def of(cls, tokens: Tokens):
        query, key, value, _, mask, segment_ids = tokens
        dtype = jnp.result_type(query, key, value)
        query, key, value = (x.astype(dtype) for x in (query, key, value))
        visible = segment = None
        if mask is not None:
            visible = visible_keys(mask, *key.shape[:2])
            key, value = only_seen(visible, key, value)
        if segment_ids is not None:
            segment = segment_runs(segment_ids)
        return cls(query, key, value, visible, segment)


class Seen(NamedTuple):
    """Columns [c 1] of 0 and 1, None: all 1."""

    pairs: Bool[Array, "c c"]  # by time and segment, hidden keys among them
    visible: Any = None
    sees: Any = None  # some key
    segment: Any = None  # the number of it
    reaches: Any = None  # the state before the chunk
    joins: Any = None  # the state after it
    keeps: Any = None  # [1 1]: whether the state before is part of the one after


def described(
    visible: Bool[Array, "B T"] | None,
    segment: Int[Array, "B T"] | None,
    query: Float[Array, "B T N H"],
    length: int,
    block: int,
) -> tuple[Int[Array, "B 1 length"] | None, Int[Array, "B 1 length"] | None]:
    """Flags and segments of the tokens of queries, filled up with hidden ones to
    `length`."""
    missing = length - query.shape[1]
    if not missing and visible is None and segment is None:
        return None, None
    visible = jnp.ones(query.shape[:2], bool) if visible is None else visible
    visible = jnp.pad(visible, ((0, 0), (0, missing)))
    if segment is None:
        return _flags(visible, None, block)[:, None], None
    segment = jnp.pad(segment, ((0, 0), (0, missing)), mode="edge")
    return _flags(visible, segment, block)[:, None], segment[:, None]


def _flags(
    visible: Bool[Array, "B T"], segment: Int[Array, "B T"] | None, block: int
) -> Int[Array, "B T"]:
    seen = jnp.cumsum(visible, axis=1)
    if segment is None:
        return visible * VISIBLE + (seen > 0) * SEES
    before = jnp.where(starts(segment), seen - visible, 0)  # the segment's first token
    sees = seen > jax.lax.cummax(before, axis=1)
    chunks = segment.reshape(segment.shape[0], -1, block)
    last = chunks[..., -1:]
    first = jnp.concatenate([chunks[:, :1, :1], last[:, :-1]], axis=1)
    of_state = REACHES * (chunks == first) + JOINS * (chunks == last)
    of_state += KEEPS * (first == last)
    flags = visible * VISIBLE + sees * SEES
    return flags + of_state.reshape(flags.shape)


def seen_in_chunk(size: int, flags: Any, segment: Any) -> Seen:
    """Of a chunk of `size` tokens, by its blocks [1 size] of these."""
    row, key = (jax.lax.broadcasted_iota(jnp.int32, (size, size), x) for x in (0, 1))
    if flags is None:
        return Seen(key <= row)
    flags = flags[...]
    in_column = column(flags)

    def bit(kind: int, flags=in_column) -> Array:
        return jnp.where((flags & kind) > 0, 1.0, 0.0)

    if segment is None:
        return Seen(key <= row, bit(VISIBLE), bit(SEES))
    segment = segment[...]
    number = column(segment)
    same = number == jnp.broadcast_to(segment, (size, size))
    columns = bit(VISIBLE), bit(SEES), number, bit(REACHES), bit(JOINS)
    return Seen((key <= row) & same, *columns, bit(KEEPS, flags[:, :1]))


def where(keep: Any, x: Array, other: Any) -> Float[Array, "..."]:
    """x where the 0 and 1 of `keep`, a row or a column, say so."""
    if keep is None:
        return x
    return jnp.where(jnp.broadcast_to(keep, x.shape) > 0, x, other)
