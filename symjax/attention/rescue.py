"""Weights that are exact at any scale, for the rows of a chunk that left float32.

A chunk whose factors all refer to its highest exponent is one matrix product, and loses
rows where a later key is e⁴⁶ times larger than all that they see. Here each row refers
to its own running maximum. Pairs are split as in a merge sort: at each level the second
half of a block looks at the first half, through the running maximum at the boundary.
Keys of the first half lie below it, and it lies below the maxima of the second half:
all factors are at most 1. log₂ T levels, each at the cost of the chunk itself.

Only features with exponents come here, and only if a row was lost.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from symjax.attention.chunks import einsum
from symjax.attention.features import LogFeatures


def exact_weights(
    before: Float[Array, "B K M"],
    query: LogFeatures,
    key: LogFeatures,
    segment: Int[Array, "B T"] | None,
) -> tuple[
    Float[Array, "B K G T M"], Float[Array, "B K G T"], Float[Array, "B K G T T"]
]:
    """Feature weights for the state, the rows' shifts, and the weights of pairs.

    Args:
        before: the running maximum of the state before the chunk, to which it refers.
        query, key: features [B K G T M] and [B K T M].
        segment: numbers the segments.
    """
    length, constant = key.exponent.shape[2], jax.lax.stop_gradient(key.exponent)
    first = jnp.maximum(constant[:, :, :1], before[:, :, None])
    running = jnp.concatenate([first, constant[:, :, 1:]], axis=2)
    running = _running_max(running, segment)  # the state counts in its own segment
    shift = finite(largest_exponent(query.raised(running[:, :, None])))
    query = query.raised(-shift)
    row = query.raised(before[:, :, None, None])
    if segment is not None:
        row = row.where((segment == segment[:, :1])[:, None, None])

    @jax.checkpoint
    def level(scores: Array, half: Array) -> tuple[Array, None]:
        """Between the second half and the first of every block of 2·half rows."""
        time = jnp.arange(length)
        block, second = time // (2 * half), (time // half) % 2 == 1
        last = jnp.minimum(block * 2 * half + half - 1, length - 1)  # of the first half
        boundary = running[:, :, last]
        near, far = second[None], ~second[None]
        if segment is not None:
            same = segment == segment[:, last]
            near, far = near & same, far & same
        earlier = key.raised(-finite(boundary)).where(far[:, None])
        later = query.raised(boundary[:, :, None]).where(near[:, None, None])
        pairs = einsum("bkgtm,bksm->bkgts", later.weights(), earlier.weights())
        inside = (block[:, None] == block[None, :])[None, None, None]
        return scores + pairs * inside.astype(pairs.dtype), None

    own = query.raised(key.exponent[:, :, None]).weights()
    if key.amplitude is not None:
        own = own * key.amplitude[:, :, None]
    oneself = jnp.eye(length, dtype=own.dtype)[None, None, None]
    halves = 2 ** jnp.arange(max(length - 1, 0).bit_length())
    scores, _ = jax.lax.scan(level, own.sum(axis=-1)[..., None] * oneself, halves)
    return row.weights(), shift[..., 0], scores


def finite(exponent: Array) -> Array:
    """An exponent to subtract: 0 where no key was seen, since −inf − (−inf) is NaN."""
    return jnp.where(jnp.isneginf(exponent), 0, exponent)


def largest_exponent(query: LogFeatures) -> Array:
    """That of each row, a constant to the gradient."""
    return jax.lax.stop_gradient(query.exponent.max(axis=-1, keepdims=True))


def _running_max(exponent: Array, segment: Array | None) -> Float[Array, "B K T M"]:
    """Running maximum along time that starts anew with each segment [B T]."""
    if segment is None:
        return jax.lax.cummax(exponent, axis=2)
    shift = 1
    while shift < exponent.shape[2]:  # windows of 1, 2, 4 … tokens
        same = jnp.pad(segment[:, shift:] == segment[:, :-shift], ((0, 0), (shift, 0)))
        widths = ((0, 0), (0, 0), (shift, 0), (0, 0))
        earlier = jnp.pad(exponent[:, :, :-shift], widths)
        highest = jnp.maximum(exponent, earlier)
        exponent = jnp.where(same[:, None, :, None], highest, exponent)
        shift *= 2
    return exponent
