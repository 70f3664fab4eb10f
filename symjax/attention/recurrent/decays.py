"""Scores of pairs in a chunk, times the decay between key and query, without division.

The decay of a pair is exp(g_{s+1} + … + g_t), with the log-decays g ≤ 0 of the tokens
after key s up to query t. `chunk_decays` computes all of them for one chunk.

Blocks of tokens are joined two by two, as in a merge sort. Queries of the
second half see keys of the first half. The log-decay of such a pair is the sum from the
key to the boundary between the halves plus the sum from there to the query. Inside a
first block it is the difference of two cumulative sums; `_exponents` computes them in
two parts, which lose no digits. So every factor is at most 1, a strong decay does not
make other decays less exact, and −∞, which forgets everything, is a valid log-decay.

Short blocks are slow on accelerators and make programs long. The recursion therefore
starts with blocks of up to 128 tokens for decays per head. For decays per channel it
starts with 16 tokens, or with 8 in chunks below 128 tokens. For decays per head this
takes 25 million cycles instead of 65, forward and backward, by the estimate of the
compiler for a v5e (B 4, T 4096, N 16, H 64).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from symjax.attention.core.arguments import as_array, check_arrays, check_log_decay
from symjax.attention.core.products import TILE, einsum, products
from symjax.attention.core.selection import where
from symjax.attention.recurrent.chunks import Chunk, lower_triangle

SMALL_TILE = 16  # tokens of a first block, for decays per channel
SMALLEST_TILE = 8  # the same in chunks below 128 tokens, as on CPUs


class ChunkDecays(NamedTuple):
    """Log-decays of a chunk, and its scores, already multiplied by the decays.

    F is 1 for decays per head, and H for decays per channel.

    Attributes:
        since: at token t, g₀ + … + g_t: the log-decay by which token t reads the state
            before the chunk.
        until: at token s, the sum of g after s, through the last token: the log-decay
            of token s in the state after the chunk.
        through: the sum of g over all tokens: the log-decay of the state before the
            chunk in the state after it.
    """

    since: Float[Array, "#B K T F"]
    until: Float[Array, "B K T F"]
    through: Float[Array, "B K F"]
    scores: Float[Array, "B K G T T"]  # Σ_h q_th k_sh exp(g_{s+1,h} + … + g_th), s ≤ t


def shared_or_per_token(
    who: str,
    log_decay: Float[Array, "#B #T K *F"] | Float[Array, " K"],
    key: Float[Array, "B T K H"],
    mask: Array | None = None,
    segment_ids: Array | None = None,
) -> tuple[Float[Array, "K 1"] | None, tuple[Array, ...]]:
    """Return (shared log-decay or None, operands): one of the two has the log-decay.

    A log-decay per head that is the same for all tokens is shared if there is no mask
    and no segment: then every chunk has the same decays. Otherwise the only operand is
    the log-decay as an array [#B #T K F].

    Raises:
        ValueError: the log-decay does not fit the keys, or is known and above 0.
    """
    check_arrays(who, key=key)
    batch, length, heads, size = key.shape
    given, log_decay = log_decay, as_array(who, "log_decay", log_decay)
    given_shape = log_decay.shape
    if given_shape == (heads,):
        log_decay = log_decay[None, None]
    shape = log_decay.shape
    fits = len(shape) in (3, 4) and shape[2:] in ((heads,), (heads, size))
    if not fits or shape[0] not in (1, batch) or shape[1] not in (1, length):
        raise ValueError(
            f"{who}: log_decay must be [{heads}], [{batch} or 1, {length} or 1, "
            f"{heads}], or the latter and {size} channels, for key {key.shape}, "
            f"got {given_shape}"
        )
    check_log_decay(who, given if hasattr(given, "shape") else log_decay)
    if log_decay.ndim == 3:
        log_decay = log_decay[..., None]
    constant = log_decay.shape[:2] == (1, 1) and log_decay.shape[3] == 1
    if constant and mask is None and segment_ids is None:
        return log_decay[0, 0], ()
    return None, (log_decay,)


def log_decays(chunk: Chunk) -> Float[Array, "B K T F"]:
    """Return the log-decays of a chunk, its last operand.

    They are −∞ at the first token of a segment, so that it forgets everything.
    """
    log_decay = chunk.operands[-1]
    if chunk.starts_segment is None:
        return log_decay
    return where(chunk.starts_segment[:, None, :, None], -jnp.inf, log_decay)


def by_channel(operands: tuple[Array, ...]) -> bool:
    """Return whether the last operand is a log-decay per channel, [#B #T K H]."""
    return any(x.ndim == 4 and x.shape[-1] > 1 for x in operands[-1:])


def chunk_decays(
    shared: Float[Array, "K 1"] | None,
    query: Float[Array, "B K G T H"],
    key: Float[Array, "B K T H"],
    chunk: Chunk,
) -> ChunkDecays:
    """Return the decays of a chunk, and the scores of its pairs.

    Decays per head (F = 1) take O(T²) exponentials per head. Decays per channel (F = H)
    take O(T H log T), and T H times the tokens of a first block. A shared log-decay
    takes O(T²) for all chunks together.

    Args:
        shared: the log-decay that all tokens share; None: it is the last operand of the
            chunk.
        query, key: in the dtype of the sums.
    """
    product = products(*chunk[:3])
    if shared is None:
        log_decay = log_decays(chunk).astype(key.dtype)
        form = _scores_by_head if log_decay.shape[-1] == 1 else _scores_by_channel
        since, until, scores = form(query, key, log_decay, product)
        return ChunkDecays(since, until, since[:, :, -1], scores)
    shared = shared.astype(key.dtype)
    time = jnp.arange(key.shape[2])[None, :, None]
    between = time - jnp.swapaxes(time, 1, 2)  # [1 T T]; only padding is hidden
    weights = where(between >= 0, jnp.exp(_times(shared[:, :, None], between)), 0)
    scores = product("bkgth,bksh->bkgts", query, key) * weights[None, :, None]
    since = _times(shared[:, None], time + 1)[None]
    return ChunkDecays(since, *until_end(shared, chunk, key.dtype), scores)


def times_decay(x: Array, log_decay: Float[Array, "#B K T F"]) -> Array:
    """Return x [B K *G T H] times exp(log_decay).

    For decays per head this is an einsum, because XLA's compiler for CPUs sums the
    gradient of an einsum faster than that of a broadcast product.
    """
    groups = x.ndim == 5
    if log_decay.shape[-1] > 1 or len(log_decay) != len(x):
        return x * jnp.exp(log_decay[:, :, None] if groups else log_decay)
    spec = "bkgth,bkt->bkgth" if groups else "bkth,bkt->bkth"
    return einsum(spec, x, jnp.exp(log_decay[..., 0]))


def until_end(
    shared: Float[Array, "K 1"], chunk: Chunk, dtype: Any
) -> tuple[Float[Array, "B K T F"], Float[Array, "B K F"]]:
    """Return `until` and `through` of a shared log-decay; only visible tokens count."""
    count = jnp.cumsum(chunk.visible, axis=1)[:, None, :, None]  # [B 1 T 1]
    shared, total = shared.astype(dtype)[None, :, None], count[:, :, -1:]
    return _times(shared, total - count), _times(shared, total)[:, :, 0]


def _times(log_decay: Array, count: Int[Array, "*shape"]) -> Array:
    """Return count · log_decay, and 0 for count 0 even if the log-decay is −∞."""
    return where(count > 0, log_decay, 0) * count


def _scores_by_head(
    query: Array, key: Array, log_decay: Array, product: Callable[..., Array]
) -> tuple[Array, Array, Array]:
    """Return `since`, `until`, and scores q_t·k_s exp(g_{s+1} + … + g_t).

    One decay multiplies the product of each pair.
    """

    def across_boundary(since: Array, until: Array) -> Array:
        return since + jnp.swapaxes(until, -1, -2)

    length = key.shape[2]
    padded = _to_power_of_two(log_decay)
    within_blocks = _exponents(_blocks(padded, _tile(length, TILE)))[..., 0]
    since, until, exponents = _by_halves(
        padded, within_blocks, across_boundary, -jnp.inf
    )
    weights = jnp.exp(exponents[..., :length, :length])
    scores = product("bkgth,bksh->bkgts", query, key)
    scores = einsum("bkgts,bkts->bkgts", scores, weights)
    return since[:, :, :length], until[:, :, :length], scores


def _scores_by_channel(
    query: Array, key: Array, log_decay: Array, product: Callable[..., Array]
) -> tuple[Array, Array, Array]:
    """Return `since`, `until`, and scores Σ_h q_th k_sh exp(g_{s+1,h} + … + g_th).

    The decay from a key to a boundary multiplies the key. The decay from the boundary
    to a query multiplies the query.
    """
    length = key.shape[2]
    query, key, padded = map(_to_power_of_two, (query, key, log_decay))

    def across_boundary(since: Array, until: Array) -> Array:
        half = since.shape[-2]
        later = _halves(query, 3, half)[1] * jnp.exp(since)[:, :, None]
        earlier = _halves(key, 2, half)[0] * jnp.exp(until)
        return product("bkgnith,bknish->bkgnits", later, earlier)

    tile = _tile(length, SMALL_TILE if length >= TILE else SMALLEST_TILE)
    blocks = [_blocks(x, tile) for x in (query, key, padded)]
    if tile == 1:  # a token sees itself without decay
        within_blocks = einsum("bkgnth,bknth->bkgnt", *blocks[:2])[..., None]
    else:
        within_blocks = _short_block_scores(*blocks)
    since, until, scores = _by_halves(padded, within_blocks, across_boundary, 0)
    scores = scores[..., :length, :length]
    return since[:, :, :length], until[:, :, :length], scores


def _tile(length: int, size: int) -> int:
    """Return the size of the first blocks, a power of two."""
    return min(size, 1 << (length - 1).bit_length())


def _blocks(x: Float[Array, "*n T F"], size: int) -> Float[Array, "*n T/size size F"]:
    return x.reshape(*x.shape[:-2], x.shape[-2] // size, size, x.shape[-1])


def _exponents(log_decay: Float[Array, "*n T F"]) -> Float[Array, "*n T T F"]:
    """Return g_{s+1} + … + g_t for s ≤ t, else −∞, as differences of cumulative sums.

    The differences lose no digits. First each log-decay is clipped at a number whose
    exponential is 0. Then it is split in two parts. The coarse part is a multiple of a
    quantum, and the quantum is so large that sums of multiples are exact. The rest is
    smaller than the quantum, so that the rounding error of its sums, T ε quantum, is
    negligible.
    """
    length, limits = log_decay.shape[-2], jnp.finfo(log_decay.dtype)
    lowest = 2 * math.log(limits.tiny)
    quantum = 2.0 ** math.ceil(math.log2(-lowest * length * limits.eps))
    log_decay = jnp.maximum(log_decay, lowest)
    even = jax.lax.RoundingMethod.TO_NEAREST_EVEN
    coarse = jax.lax.stop_gradient(jax.lax.round(log_decay / quantum, even) * quantum)
    time = log_decay.ndim - 2
    coarse, rest = (
        x[..., :, None, :] - x[..., None, :, :]
        for x in (jax.lax.cumsum(x, time) for x in (coarse, log_decay - coarse))
    )
    past = lower_triangle(length)
    past = jax.lax.expand_dims(past, (*range(coarse.ndim - 3), coarse.ndim - 1))
    return where(past, coarse + rest, -jnp.inf)


@jax.custom_vjp
def _short_block_scores(
    query: Float[Array, "B K G n T H"],
    key: Float[Array, "B K n T H"],
    log_decay: Float[Array, "B K n T H"],
) -> Float[Array, "B K G n T T"]:
    """Return scores of first blocks, with one exponential per pair and channel.

    There are T times as many exponentials as numbers in the keys. Writing them to
    memory takes longer than computing them. So they are recomputed for every sum and
    for every group of queries.
    """
    scores = []
    for group in range(query.shape[2]):
        if group:
            log_decay = jax.lax.optimization_barrier(log_decay)
        group_query = query[:, :, group, None]
        scores.append(_pair_weights(group_query, key, log_decay).sum(axis=-1))
    return jnp.concatenate(scores, axis=2)


def _short_block_forward(query: Array, key: Array, log_decay: Array) -> tuple:
    return _short_block_scores(query, key, log_decay), (query, key, log_decay)


def _short_block_backward(
    saved: tuple, scores_gradient: Array
) -> tuple[Array, Array, Array]:
    """Return the gradients of queries, keys and log-decays.

    The log-decay of token r is in the exponent of all pairs s < r ≤ t. Its gradient is
    the cumulative sum, from the last token back to r, of (query · gradient of query) −
    (key · gradient of key).
    """
    query, key, log_decay = saved
    query_gradients, key_gradient, ones = [], jnp.zeros_like(key), jnp.ones_like
    for group in range(query.shape[2]):
        arrays = (
            query[:, :, group, None],
            key,
            log_decay,
            scores_gradient[:, :, group, None],
        )
        group_query, key, log_decay, gradient = jax.lax.optimization_barrier(arrays)
        weights = _pair_weights(ones(group_query), key, log_decay, gradient)
        query_gradients.append(weights.sum(axis=-2))
        arrays = group_query, key, log_decay, gradient
        group_query, key, log_decay, gradient = jax.lax.optimization_barrier(arrays)
        weights = _pair_weights(group_query, ones(key), log_decay, gradient)
        key_gradient += weights.sum(axis=(2, -3))
    query_gradient = jnp.concatenate(query_gradients, axis=2)
    decay_gradient = (query * query_gradient).sum(axis=2) - key * key_gradient
    return (
        query_gradient,
        key_gradient,
        jax.lax.cumsum(decay_gradient, axis=3, reverse=True),
    )


_short_block_scores.defvjp(_short_block_forward, _short_block_backward)


def _pair_weights(
    query: Array, key: Array, log_decay: Array, scores: Array | None = None
) -> Float[Array, "B K G n T T H"]:
    """Return q_th k_sh exp(g_{s+1,h} + … + g_th), times `scores` if they are given."""
    weights = _pair_decays(log_decay)[:, :, None]
    weights = weights * query[..., None, :] * key[:, :, None, :, None]
    return weights if scores is None else weights * scores[..., None]


@jax.jit  # one function of the program, which calls it several times
def _pair_decays(log_decay: Float[Array, "*n T H"]) -> Float[Array, "*n T T H"]:
    """Return exp(g_{s+1} + … + g_t) for s ≤ t, else 0."""
    return jnp.exp(_exponents(log_decay))


def _to_power_of_two(x: Array) -> Array:
    """Pad time with zeros: tokens that add nothing and do not decay."""
    length = x.shape[-2]
    more = (1 << (length - 1).bit_length()) - length
    if not more:
        return x
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, more), (0, 0)])


def _halves(
    x: Float[Array, "*heads_and_time F"], heads: int, half: int
) -> tuple[Float[Array, "*heads n 1 half F"], Float[Array, "*heads n 1 half F"]]:
    """Return the first and the second halves of blocks of 2·half tokens.

    Args:
        heads: number of axes before those of time.
    """
    lead, length = x.shape[:heads], math.prod(x.shape[heads:-1])
    blocks = x.reshape(*lead, length // (2 * half), 2, half, x.shape[-1])
    first, second = jax.lax.split(blocks, (1, 1), heads + 1)
    return first, second


def _by_halves(
    log_decay: Float[Array, "B K T F"],
    within_blocks: Float[Array, "*heads n size size"],
    across_boundary: Callable[[Array, Array], Array],
    fill: float,
) -> tuple[
    Float[Array, "B K T F"], Float[Array, "B K T F"], Float[Array, "*heads T T"]
]:
    """Join blocks of tokens two by two until one block has all T, a power of two.

    Args:
        within_blocks: values of the pairs inside each first block.
        across_boundary: (since, until) → values of the pairs that have the query in the
            second half and the key in the first. `since` are the log-decays from the
            boundary between the halves to each query, `until` those from each key to
            the boundary, both [B K n 1 T F].
        fill: value of pairs whose key is later than the query.
    Returns:
        `since` and `until` as in `ChunkDecays`, and the values of all pairs.
    """
    pairs, half = within_blocks, within_blocks.shape[-1]
    blocks = _blocks(log_decay, half)
    nothing = jnp.zeros((), log_decay.dtype)
    unchanged, one_later = (0, 0, 0), (-1, 1, 0)
    later = jax.lax.pad(blocks, nothing, [*[unchanged] * 3, one_later, unchanged])
    since = jax.lax.cumsum(blocks, axis=3)
    until = jax.lax.cumsum(later, axis=3, reverse=True)
    heads = pairs.ndim - 3
    while half < log_decay.shape[2]:
        since_first, since_second = _halves(since, 2, half)
        until_first, until_second = _halves(until, 2, half)
        first, second = _halves(pairs, heads, half)
        across = across_boundary(since_second, until_first)
        below = jnp.concatenate([across, second], -1)
        above = jnp.concatenate([first, jnp.full_like(first, fill)], -1)
        pairs = jnp.concatenate([above, below], -2)
        through_first, through_second = (
            since_first[..., -1:, :],
            since_second[..., -1:, :],
        )
        since = jnp.concatenate([since_first, through_first + since_second], -2)
        until = jnp.concatenate([until_first + through_second, until_second], -2)
        half *= 2
    since, until = (x.reshape(log_decay.shape) for x in (since, until))
    return since, until, pairs.reshape(*pairs.shape[:heads], half, half)
