"""Rows that are exact at any scale, where those of a chunk left float32.

A chunk whose factors all refer to its highest exponent is one matrix product, and loses
rows where a later key is e⁴⁶ times larger than all that they see. Here each row refers
to its own running maximum. Pairs are split as in a merge sort: at each level the second
half of a block looks at the first half, through the running maximum at the boundary.
Keys of the first half lie below it, and it lies below the maxima of the second half:
all factors are at most 1. log₂ T levels, each at the cost of the chunk itself.

Only features with exponents come here, and only if a row was lost.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.features import LogFeatures, finite, row_shift

# Without the other form that `chunks.einsum` has on a CPU: these rows are rare.
exact_product = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def with_exact_rows(
    read: Callable[..., Any],
    running_max: Float[Array, "B K M"],
    query: LogFeatures,
    key: LogFeatures,
    value: Float[Array, "B K T V"],
    segment: Int[Array, "B T"] | None,
    lost: Bool[Array, "B K G T"],
    rows: Any,
) -> Any:
    """The rows [B K G T …] of a chunk, exact ones in place of the lost ones.

    The others stay as they are, so that no example depends on what another one needed.

    Args:
        read: (weights for the state, shift, weights of pairs, values) → rows.
        running_max: of the state before the chunk.
        query, key: features [B K G T M] and [B K T M].
        segment: numbers the segments; None: the chunk is one.
    """
    length, constant = key.exponent.shape[2], jax.lax.stop_gradient(key.exponent)
    first = jnp.maximum(constant[:, :, :1], running_max[:, :, None])
    running = jnp.concatenate([first, constant[:, :, 1:]], axis=2)
    running = _running_max(running, segment)  # the state counts in its own segment
    shift = row_shift(query.raised(running[:, :, None]))
    query = query.raised(-shift)
    row = query.raised(running_max[:, :, None, None])
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
        pairs = exact_product("bkgtm,bksm->bkgts", later.weights(), earlier.weights())
        inside = (block[:, None] == block[None, :])[None, None, None]
        return scores + pairs * inside.astype(pairs.dtype), None

    own = query.raised(key.exponent[:, :, None]).weights()
    if key.amplitude is not None:
        own = own * key.amplitude[:, :, None]
    oneself = jnp.eye(length, dtype=own.dtype)[None, None, None]
    halves = 2 ** jnp.arange(max(length - 1, 0).bit_length())
    scores, _ = jax.lax.scan(level, own.sum(axis=-1)[..., None] * oneself, halves)
    exact = read(row.weights(), shift[..., 0], scores, value)

    def chosen(exact: Array, quick: Array) -> Array:
        ones = (1,) * (quick.ndim - lost.ndim)
        return jnp.where(lost.reshape(*lost.shape, *ones), exact, quick)

    return jax.tree.map(chosen, exact, rows)


def _running_max(exponent: Array, segment: Array | None) -> Float[Array, "B K T M"]:
    """Running maximum along time that starts anew with each segment [B T]."""
    if segment is None:
        return jax.lax.cummax(exponent, axis=2)

    def latest(one: tuple, two: tuple) -> tuple:
        """Of two stretches of time, by the last segment of each."""
        highest = jnp.where(one[1] == two[1], jnp.maximum(one[0], two[0]), two[0])
        return highest, two[1]

    numbered = exponent, segment[:, None, :, None]
    return jax.lax.associative_scan(latest, numbered, axis=2)[0]
