"""Weights of pairs that fade with the time between them, without a division.

A chunk of time is split as in a merge sort: the second half of each block of 2, 4, 8 …
tokens looks at the first half. A pair's decay is then the sum from the boundary to the
query plus the sum from the key to the boundary. Nothing is ever subtracted: every
factor is at most 1, no exponent loses digits to a stronger decay elsewhere, and −∞,
which forgets everything, is a decay like any other.

Short blocks are slow on accelerators, and long in programs. Blocks of up to 128 tokens
are therefore not split, or of 16 where each channel has its decay (8 in chunks below
128 tokens). Forward and backward, decays of heads take 25 Mcycles instead of 65, as
v5e's compiler estimates it (B 4, T 4096, N 16, H 64).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from symjax.attention.core.arguments import as_array, check_arrays
from symjax.attention.core.products import TILE, einsum, products
from symjax.attention.recurrent.chunks import Chunk

SMALL_TILE = 16  # tokens whose pairs take an exponential for each channel
SMALLEST_TILE = 8  # the same in chunks below 128 tokens, as on CPUs


class Faded(NamedTuple):
    """What a chunk's decays do, all of it as logarithms but the scores.

    since: from before the first token through each token. until: from after each token
    through the last. through: all of them.
    """

    since: Float[Array, "#B K T F"]
    until: Float[Array, "B K T F"]
    through: Float[Array, "B K F"]
    scores: Float[Array, "B K G T T"]  # Σ_h q_th k_sh exp(g_{s+1,h} + … + g_th), s ≤ t


def shared_or_own(
    who: str,
    log_decay: Float[Array, "#B #T K *F"] | Float[Array, " K"],
    key: Float[Array, "B T K H"],
    mask: Array | None = None,
    segment_ids: Array | None = None,
) -> tuple[Float[Array, "K 1"] | None, tuple[Array, ...]]:
    """The log-decay as what all tokens share, and as operands [#B #T K F] of each.

    One that is the same for all tokens is shared where none of them is hidden or the
    first of a segment: then all chunks fade alike.

    Raises:
        ValueError: it does not fit the keys.
    """
    check_arrays(who, key=key)
    batch, length, heads, size = key.shape
    log_decay = as_array(who, "log_decay", log_decay)
    given = log_decay.shape
    if given == (heads,):
        log_decay = log_decay[None, None]
    shape = log_decay.shape
    fits = len(shape) in (3, 4) and shape[2:] in ((heads,), (heads, size))
    if not fits or shape[0] not in (1, batch) or shape[1] not in (1, length):
        raise ValueError(
            f"{who}: log_decay must be [{heads}], [{batch} or 1, {length} or 1, "
            f"{heads}], or the latter and {size} channels, for key {key.shape}, "
            f"got {given}"
        )
    if log_decay.ndim == 3:
        log_decay = log_decay[..., None]
    alike = log_decay.shape[:2] == (1, 1) and log_decay.shape[3] == 1
    if alike and mask is None and segment_ids is None:
        return log_decay[0, 0], ()
    return None, (log_decay,)


def log_decays(chunk: Chunk) -> Float[Array, "B K T F"]:
    """The last operand of a chunk; the first token of a segment forgets everything."""
    log_decay = chunk.operands[-1]
    if chunk.starts_segment is None:
        return log_decay
    return jnp.where(chunk.starts_segment[:, None, :, None], -jnp.inf, log_decay)


def by_channel(operands: tuple[Array, ...]) -> bool:
    """Return whether the last operand is a log-decay of each channel [#B #T K H]."""
    return any(x.ndim == 4 and x.shape[-1] > 1 for x in operands[-1:])


def faded(
    shared: Float[Array, "K 1"] | None,
    query: Float[Array, "B K G T H"],
    key: Float[Array, "B K T H"],
    chunk: Chunk,
) -> Faded:
    """The decays of a chunk, and the scores of its pairs.

    F is 1 for a decay a head, H for one a channel, which adds O(T H log T)
    exponentials. A shared one costs O(T²) exponentials for all chunks together.

    Args:
        shared: the log-decay of every token; None: an operand of the chunk.
        query, key: in the dtype of the sums.
    """
    product = products(*chunk[:3])
    if shared is None:
        log_decay = log_decays(chunk).astype(key.dtype)
        form = _by_head if log_decay.shape[-1] == 1 else _by_channel
        since, until, scores = form(query, key, log_decay, product)
        return Faded(since, until, since[:, :, -1], scores)
    shared = shared.astype(key.dtype)
    time = jnp.arange(key.shape[2])[None, :, None]
    between = time - jnp.swapaxes(time, 1, 2)  # [1 T T]; hidden tokens come last
    weights = jnp.where(between >= 0, jnp.exp(_times(shared[:, :, None], between)), 0)
    scores = product("bkgth,bksh->bkgts", query, key) * weights[None, :, None]
    since = _times(shared[:, None], time + 1)[None]
    return Faded(since, *until_end(shared, chunk, key.dtype), scores)


def times_decay(x: Array, log_decay: Float[Array, "#B K T F"]) -> Array:
    """x [B K *G T H] times the decays: where F is 1 as a product, whose gradient XLA's
    compiler for CPUs adds up faster."""
    groups = x.ndim == 5
    if log_decay.shape[-1] > 1 or len(log_decay) != len(x):
        return x * jnp.exp(log_decay[:, :, None] if groups else log_decay)
    spec = "bkgth,bkt->bkgth" if groups else "bkth,bkt->bkth"
    return einsum(spec, x, jnp.exp(log_decay[..., 0]))


def until_end(
    shared: Float[Array, "K 1"], chunk: Chunk, dtype: Any
) -> tuple[Float[Array, "B K T F"], Float[Array, "B K F"]]:
    """Log-decays from after each token of a chunk through its last, and all of them."""
    count = jnp.cumsum(chunk.visible, axis=1)[:, None, :, None]  # [B 1 T 1]
    shared, total = shared.astype(dtype)[None, :, None], count[:, :, -1:]
    return _times(shared, total - count), _times(shared, total)[:, :, 0]


def _times(log_decay: Array, count: Int[Array, "*shape"]) -> Array:
    """So many decays, of which none is 0 even if each is −∞."""
    return jnp.where(count > 0, log_decay, 0) * count


def _by_head(
    query: Array, key: Array, log_decay: Array, product: Callable[..., Array]
) -> tuple[Array, Array, Array]:
    """q_t·k_s exp(g_{s+1} + … + g_t): one decay multiplies each product."""

    def across(since: Array, until: Array) -> Array:
        return since + jnp.swapaxes(until, -1, -2)

    length = key.shape[2]
    padded = _to_power_of_two(log_decay)
    own = _exponents(_blocks(padded, _tile(length, TILE)))[..., 0]
    since, until, exponents = _by_halves(padded, own, across, -jnp.inf)
    weights = jnp.exp(exponents[..., :length, :length])
    scores = product("bkgth,bksh->bkgts", query, key)
    scores = einsum("bkgts,bkts->bkgts", scores, weights)
    return since[:, :, :length], until[:, :, :length], scores


def _by_channel(
    query: Array, key: Array, log_decay: Array, product: Callable[..., Array]
) -> tuple[Array, Array, Array]:
    """Σ_h q_th k_sh exp(g_{s+1,h} + … + g_th), each half of the decay with its own."""
    length = key.shape[2]
    query, key, padded = map(_to_power_of_two, (query, key, log_decay))

    def across(since: Array, until: Array) -> Array:
        half = since.shape[-2]
        later = _halves(query, half)[1] * jnp.exp(since)[:, :, None]
        earlier = _halves(key, half)[0] * jnp.exp(until)
        return product("bkgnth,bknsh->bkgnts", later, earlier)

    tile = _tile(length, SMALL_TILE if length >= TILE else SMALLEST_TILE)
    given = [_blocks(x, tile) for x in (query, key, padded)]
    if tile == 1:  # nothing fades
        own = einsum("bkgnth,bknth->bkgnt", *given[:2])[..., None]
    else:
        own = _own_scores(*given)
    since, until, scores = _by_halves(padded, own, across, 0)
    scores = scores[..., :length, :length]
    return since[:, :, :length], until[:, :, :length], scores


def _tile(length: int, size: int) -> int:
    """Return the tokens of a block that is not split, a power of two."""
    return min(size, 1 << (length - 1).bit_length())


def _blocks(x: Float[Array, "*n T F"], size: int) -> Float[Array, "*n T/size size F"]:
    return x.reshape(*x.shape[:-2], x.shape[-2] // size, size, x.shape[-1])


def _exponents(log_decay: Float[Array, "*n T F"]) -> Float[Array, "*n T T F"]:
    """g_{s+1} + … + g_t for s ≤ t, else −∞: differences of sums that lose no digit.

    A decay is cut off where its exponential is 0, and split in two: into a multiple of
    a quantum so large that sums of them are exact, and a rest so small that what is
    rounded of its sums, T ε quantum, is nothing.
    """
    length, kind = log_decay.shape[-2], jnp.finfo(log_decay.dtype)
    lowest = 2 * math.log(kind.tiny)
    quantum = 2.0 ** math.ceil(math.log2(-lowest * length * kind.eps))
    log_decay = jnp.maximum(log_decay, lowest)
    coarse = jax.lax.stop_gradient(jnp.round(log_decay / quantum) * quantum)
    coarse, rest = (
        x[..., :, None, :] - x[..., None, :, :]
        for x in (jnp.cumsum(x, axis=-2) for x in (coarse, log_decay - coarse))
    )
    past = jnp.tril(jnp.ones((length, length), bool))
    past = jax.lax.expand_dims(past, (*range(coarse.ndim - 3), coarse.ndim - 1))
    return jnp.where(past, coarse + rest, -jnp.inf)


@jax.custom_vjp
def _own_scores(
    query: Float[Array, "B K G n T H"],
    key: Float[Array, "B K n T H"],
    log_decay: Float[Array, "B K n T H"],
) -> Float[Array, "B K G n T T"]:
    """`faded` scores of blocks so short that each pair takes its own exponentials.

    They are computed anew for each sum they are part of, and each group of queries,
    since they are T times as many as the keys, and memory is slower.
    """
    scores = []
    for group in range(query.shape[2]):
        if group:
            log_decay = jax.lax.optimization_barrier(log_decay)
        one = query[:, :, group, None]
        scores.append(_pair_weights(one, key, log_decay).sum(axis=-1))
    return jnp.concatenate(scores, axis=2)


def _own_scores_forward(query: Array, key: Array, log_decay: Array) -> tuple:
    return _own_scores(query, key, log_decay), (query, key, log_decay)


def _own_scores_backward(saved: tuple, scores: Array) -> tuple[Array, Array, Array]:
    """A decay's gradient is the sum of that of the exponents on both of its sides."""
    query, key, log_decay = saved
    to_query, to_key, ones = [], jnp.zeros_like(key), jnp.ones_like
    for group in range(query.shape[2]):
        given = query[:, :, group, None], key, log_decay, scores[:, :, group, None]
        one, key, log_decay, change = jax.lax.optimization_barrier(given)
        weights = _pair_weights(ones(one), key, log_decay, change)
        to_query.append(weights.sum(axis=-2))
        given = one, key, log_decay, change
        one, key, log_decay, change = jax.lax.optimization_barrier(given)
        weights = _pair_weights(one, ones(key), log_decay, change)
        to_key += weights.sum(axis=(2, -3))
    by_query = jnp.concatenate(to_query, axis=2)
    since = (query * by_query).sum(axis=2) - key * to_key
    return by_query, to_key, jax.lax.cumsum(since, axis=3, reverse=True)


_own_scores.defvjp(_own_scores_forward, _own_scores_backward)


def _pair_weights(
    query: Array, key: Array, log_decay: Array, scores: Array | None = None
) -> Float[Array, "B K G n T T H"]:
    """q_th k_sh exp(g_{s+1,h} + … + g_th), times a number for each pair."""
    weights = jnp.exp(_exponents(log_decay))[:, :, None]
    weights = weights * query[..., None, :] * key[:, :, None, :, None]
    return weights if scores is None else weights * scores[..., None]


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
    own: Float[Array, "*heads n size size"],
    across: Callable[[Array, Array], Array],
    nothing: float,
) -> tuple[
    Float[Array, "B K T F"], Float[Array, "B K T F"], Float[Array, "*heads T T"]
]:
    """Blocks of tokens joined two by two until one holds all T, a power of two.

    Args:
        own: what each block makes of itself.
        across: what second halves make of first halves, from the log-decays since the
            boundary between them and until it.
        nothing: what a token makes of a later one.
    Returns:
        Log-decays from before the first token through each token, those from after
        each token through the last, and the pairs.
    """
    pairs, half = own, own.shape[-1]
    blocks = _blocks(log_decay, half)
    later = jnp.pad(blocks[..., 1:, :], (*[(0, 0)] * 3, (0, 1), (0, 0)))
    since, until = (
        jax.lax.cumsum(x, axis=3, reverse=reverse).reshape(log_decay.shape)
        for x, reverse in ((blocks, False), (later, True))
    )
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
