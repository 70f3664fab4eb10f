"""Weights of pairs that fade with the time between them, without a division.

A chunk of time is split as in a merge sort: the second half of each block of 2, 4, 8 …
tokens looks at the first half. A pair's decay is then the sum from the boundary to the
query plus the sum from the key to the boundary. Nothing is ever subtracted: every
factor is at most 1, no exponent loses digits to a stronger decay elsewhere, and −∞,
which forgets everything, is a decay like any other.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.chunks import Chunk, einsum

Scores = tuple[
    Float[Array, "B K T F"], Float[Array, "B K T F"], Float[Array, "B K G T T"]
]


def log_decays(chunk: Chunk) -> Float[Array, "B K T F"]:
    """The last operand of a chunk; the first token of a segment forgets everything."""
    log_decay = chunk.operands[-1]
    if chunk.starts_segment is None:
        return log_decay
    return jnp.where(chunk.starts_segment[:, None, :, None], -jnp.inf, log_decay)


def faded_scores(
    query: Float[Array, "B K G T H"],
    key: Float[Array, "B K T H"],
    log_decay: Float[Array, "B K T F"],
) -> Scores:
    """Σ_h q_th k_sh exp(g_{s+1,h} + … + g_th) for s ≤ t, else 0.

    F is 1 for a decay a head, H for one a channel, which adds O(T H log T)
    exponentials.

    Returns:
        Log-decays from before the first token through each token, those from after
        each token through the last, and the scores.
    """
    form = _by_head if log_decay.shape[-1] == 1 else _by_channel
    return form(query, key, log_decay)


def _by_head(query: Array, key: Array, log_decay: Array) -> Scores:
    """q_t·k_s exp(g_{s+1} + … + g_t): one decay multiplies each product."""

    def across(since: Array, until: Array) -> Array:
        return since + jnp.swapaxes(until, -1, -2)

    length = key.shape[2]
    padded = _to_power_of_two(log_decay)
    own = jnp.zeros_like(padded)[..., None]
    since, until, exponents = _by_halves(padded, own, across, -jnp.inf)
    weights = jnp.exp(exponents[..., :length, :length])[:, :, None]
    scores = einsum("bkgth,bksh->bkgts", query, key) * weights
    return since[:, :, :length], until[:, :, :length], scores


def _by_channel(query: Array, key: Array, log_decay: Array) -> Scores:
    """Σ_h q_th k_sh exp(g_{s+1,h} + … + g_th), each half of the decay with its own."""
    length = key.shape[2]
    query, key, padded = map(_to_power_of_two, (query, key, log_decay))

    def across(since: Array, until: Array) -> Array:
        half = since.shape[-2]
        later = _halves(query, half)[1] * jnp.exp(since)[:, :, None]
        earlier = _halves(key, half)[0] * jnp.exp(until)
        return einsum("bkgnth,bknsh->bkgnts", later, earlier)

    own = einsum("bkgth,bkth->bkgt", query, key)[..., None, None]
    since, until, scores = _by_halves(padded, own, across, 0)
    scores = scores[..., :length, :length]
    return since[:, :, :length], until[:, :, :length], scores


def _to_power_of_two(x: Array) -> Array:
    """Zeros at the end of time: tokens that add nothing and do not decay."""
    length = x.shape[-2]
    more = (1 << (length - 1).bit_length()) - length
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, more), (0, 0)])


def _halves(x: Array, half: int) -> tuple[Array, Array]:
    """[… T F] → the first and the second halves of blocks, both [… T/2half half F]."""
    count = x.shape[-2] // (2 * half)
    blocks = x.reshape(*x.shape[:-2], count, 2, half, x.shape[-1])
    return blocks[..., 0, :, :], blocks[..., 1, :, :]


def _rejoin(first: Array, second: Array) -> Array:
    """The inverse of `_halves`."""
    blocks = jnp.concatenate([first, second], axis=-2)
    return jax.lax.collapse(blocks, blocks.ndim - 3, blocks.ndim - 1)


def _by_halves(
    log_decay: Float[Array, "B K T F"],
    own: Float[Array, "*heads T 1 1"],
    across: Callable[[Array, Array], Array],
    nothing: float,
) -> tuple[
    Float[Array, "B K T F"], Float[Array, "B K T F"], Float[Array, "*heads T T"]
]:
    """Blocks of one token joined two by two until one holds all T, a power of two.

    Args:
        own: what each token makes of itself.
        across: what second halves make of first halves, from the log-decays since the
            boundary between them and until it.
        nothing: what a token makes of a later one.
    Returns:
        Log-decays from before the first token through each token, those from after
        each token through the last, and the pairs.
    """
    since, until, pairs = log_decay, jnp.zeros_like(log_decay), own
    half = 1
    while half < log_decay.shape[2]:
        (since_first, since_second) = _halves(since, half)
        (until_first, until_second) = _halves(until, half)
        first, second = pairs[..., 0::2, :, :], pairs[..., 1::2, :, :]
        below = jnp.concatenate([across(since_second, until_first), second], -1)
        above = jnp.concatenate([first, jnp.full_like(first, nothing)], -1)
        pairs = jnp.concatenate([above, below], -2)
        through_first, through_second = (
            since_first[..., -1:, :],
            since_second[..., -1:, :],
        )
        since = _rejoin(since_first, through_first + since_second)
        until = _rejoin(until_first + through_second, until_second)
        half *= 2
    return since, until, pairs[..., 0, :, :]
