"""Documents packed into one row: which tokens belong together, and their places."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.sequence import starts
from symjax.layers.sharded import Operand


class Segments(NamedTuple):
    """
    Attributes:
        ids: a run of equal ids is a document; its tokens see no other.
        positions: of each token in its run, from 0.
    """

    ids: Int[Array, "B T"]
    positions: Int[Array, "B T"]


def segments_of(ids: Int[Array, "B T"]) -> Segments:
    places = jnp.broadcast_to(jnp.arange(ids.shape[1])[None], ids.shape)
    first = jax.lax.cummax(jnp.where(starts(ids), places, 0), axis=1)
    return Segments(ids, places - first)


def document_lengths(segments: Segments) -> Int[Array, "B T"]:
    """Count the tokens in the document of every token."""
    count = segments.ids.shape[1]
    places = jnp.arange(count)[None]
    last = jnp.roll(starts(segments.ids), -1, axis=1).at[:, -1].set(True)
    end = jax.lax.cummin(jnp.where(last, places, count), axis=1, reverse=True)
    return end - places + segments.positions + 1


def places(x: Float[Array, "B T D"], segments: Segments | None) -> Int[Array, "#B T"]:
    """The position of every token: in its row, or in its document."""
    return jnp.arange(x.shape[1])[None] if segments is None else segments.positions


def row_operands(
    padding_mask: Bool[Array, "B T"] | None, segments: Segments | None
) -> dict[str, Operand]:
    """What a mechanism is told of who sees whom in a row."""
    found = {}
    if padding_mask is not None:
        found["mask"] = Operand(padding_mask[:, None, None], "B")
    if segments is not None:
        found["segment_ids"] = Operand(segments.ids, "BT")
    return found
