"""Documents in a row, and the operands that hide tokens from a mechanism.

`Segments` holds the documents of packed rows. `row_operands` makes two operands of
mechanisms: "mask" [B 1 1 T] from padding, and "segment_ids" [B T] from documents. Score
mechanisms give a hidden key the weight 0. A hidden key does not change the state of a
recurrence. In decoding from a cache, score mechanisms get `positions` instead of a mask
(`Mixer.decode`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.sequence import id_changes
from symjax.layers.sharded import Operand


class Segments(NamedTuple):
    """Documents of packed rows.

    Attributes:
        ids: tokens of one document have equal ids; documents do not see each other.
        positions: position of each token in its document, from 0.
    """

    ids: Int[Array, "B T"]
    positions: Int[Array, "B T"]


def segments_of(ids: Int[Array, "B T"]) -> Segments:
    """Return the documents of rows, with positions that restart in each document."""
    columns = jnp.broadcast_to(jnp.arange(ids.shape[1])[None], ids.shape)
    first = jax.lax.cummax(jnp.where(id_changes(ids), columns, 0), axis=1)
    return Segments(ids, columns - first)


def document_lengths(segments: Segments) -> Int[Array, "B T"]:
    """Count the tokens in the document of every token."""
    count = segments.ids.shape[1]
    columns = jnp.arange(count)[None]
    is_last = jnp.roll(id_changes(segments.ids), -1, axis=1).at[:, -1].set(True)
    end = jax.lax.cummin(jnp.where(is_last, columns, count), axis=1, reverse=True)
    return end - columns + segments.positions + 1


def positions_of(
    x: Float[Array, "B T D"], segments: Segments | None
) -> Int[Array, "#B T"]:
    """Return the position of each token in its document.

    Without segments it is the position in the row.
    """
    return jnp.arange(x.shape[1])[None] if segments is None else segments.positions


def row_operands(
    padding_mask: Bool[Array, "B T"] | None, segments: Segments | None
) -> dict[str, Operand]:
    """Return the operands that hide padding and other documents from a token."""
    operands = {}
    if padding_mask is not None:
        operands["mask"] = Operand(padding_mask[:, None, None], "B")
    if segments is not None:
        operands["segment_ids"] = Operand(segments.ids, "BT")
    return operands
