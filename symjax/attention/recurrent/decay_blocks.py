"""Sums of log-decays in the blocks of a chunk, and scores with decays per channel.

`decays.py` says why a chunk is split into blocks.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from symjax.attention.core.meshes import batched_alike
from symjax.attention.core.products import einsum, in_six_passes
from symjax.attention.core.where import where
from symjax.attention.recurrent.chunks import lower_triangle


def split_into_blocks(
    x: Float[Array, "*heads T F"], size: int
) -> Float[Array, "*heads n m F"]:
    """Split time into blocks of `size` tokens.

    Zeros pad the last block: tokens that add nothing and do not decay.
    """
    *heads, length, channels = x.shape
    count = -(-length // size)
    if missing := count * size - length:
        x = jnp.pad(x, [(0, 0)] * len(heads) + [(0, missing), (0, 0)])
    return x.reshape(*heads, count, size, channels)


def same_block(count: int) -> Bool[Array, "n 1 n 1"]:
    """Return a mask [i, ·, j, ·], True if query block i is key block j."""
    return jnp.eye(count, dtype=bool)[:, None, :, None]


class BlockSums(NamedTuple):
    """Sums of log-decays of a chunk of n blocks with m tokens each.

    Attributes:
        pairs: [t, s]: the sum after token s through token t of the same block; −∞ if s
            is later than t.
        since: the sum from the first token of the block through each token.
        until: the sum after each token through the last one of its block.
        between: [i, j]: the sum over the blocks after j and before i; −∞ unless block j
            is earlier than block i.
        before, after: the sum over all blocks before each block, and after it.
    """

    pairs: Float[Array, "B K n m m F"]
    since: Float[Array, "B K n m F"]
    until: Float[Array, "B K n m F"]
    between: Float[Array, "B K n n F"]
    before: Float[Array, "B K n 1 F"]
    after: Float[Array, "B K n 1 F"]


def block_sums(log_decay: Float[Array, "B K n m F"]) -> BlockSums:
    pairs = _exponents(log_decay)
    since, until = log_decay[..., :1, :] + pairs[..., 0, :], pairs[..., -1, :, :]
    total = since[..., -1, :]
    if total.shape[2] == 1:
        zeros = jnp.zeros_like(total)[:, :, None]
        return BlockSums(pairs, since, until, zeros - jnp.inf, zeros, zeros)
    blocks = _exponents(total)
    before = _one_later(total[:, :, :1] + blocks[..., 0, :], 0)[..., None, :]
    after = blocks[..., -1, :, :][..., None, :]
    return BlockSums(pairs, since, until, _one_later(blocks, -jnp.inf), before, after)


def chunk_sums(sums: BlockSums) -> tuple[Array, Array]:
    """Return `since` and `until` of `ChunkDecays`."""
    since, until = sums.since + sums.before, sums.until + sums.after
    return jax.lax.collapse(since, 2, 4), jax.lax.collapse(until, 2, 4)


def _one_later(x: Float[Array, "B K n *rest"], first: float) -> Array:
    """Move an array one block later: `first` fills block 0, the last is dropped."""
    move = [(0, 0, 0)] * x.ndim
    move[2] = 1, -1, 0
    return jax.lax.pad(x, jnp.asarray(first, x.dtype), move)


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


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def block_scores(
    product: Callable[..., Array],
    query: Float[Array, "B K G n m H"],
    key: Float[Array, "B K n m H"],
    log_decay: Float[Array, "B K n m H"],
) -> tuple[
    Float[Array, "B K n*m H"], Float[Array, "B K n*m H"], Float[Array, "B K G n*m n*m"]
]:
    """Return `since` and `until` of `ChunkDecays`, and the scores of all pairs.

    Pairs inside a block take one exponential per pair and channel. The decay of other
    pairs has three factors: from the key to the end of its block, from there to the
    beginning of the block of the query, and from there to the query. The first two
    multiply the keys, once for each block of queries. The last one multiplies the
    query.
    """
    return _block_forward(product, query, key, log_decay)[0]


def _block_forward(
    product: Callable, query: Array, key: Array, log_decay: Array
) -> tuple[tuple, tuple]:
    sums = block_sums(log_decay)
    rows = query * jnp.exp(sums.since)[:, :, None]
    columns = (key * jnp.exp(sums.until))[:, :, None]
    columns = columns * jnp.exp(sums.between)[..., None, :]
    across = product("bkgith,bkish->bkgits", rows, jax.lax.collapse(columns, 3, 5))
    across = across.reshape(*across.shape[:-1], *key.shape[2:4])
    inside = _scores_inside(query, key, sums.pairs)[..., None, :]
    scores = across + where(same_block(key.shape[2]), inside, 0)
    scores = jax.lax.collapse(jax.lax.collapse(scores, 5, 7), 3, 5)
    results = batched_alike((*chunk_sums(sums), scores))
    return results, (query, key, sums, rows, columns)


def _block_backward(
    product: Callable, saved: tuple, gradients: tuple
) -> tuple[Array, Array, Array]:
    """Return the gradients of queries, keys and log-decays.

    Let c_t be the sum of log-decays through token t. The exponent of a pair of query t
    and key s is c_t − c_s. So the gradient of c_t is (query t · its gradient) − (key t
    · its gradient). The gradient of a log-decay is the sum of the gradients of c at its
    own token and all later ones.
    """
    query, key, sums, rows, columns = saved
    of_since, of_until, of_scores = gradients
    count, size = key.shape[2:4]
    of_scores = of_scores.reshape(*query.shape[:5], count * size)
    columns = jax.lax.collapse(columns, 3, 5)
    of_rows = product("bkgits,bkish->bkgith", of_scores, columns)
    of_scores = of_scores.reshape(*query.shape[:5], count, size)
    between = jnp.swapaxes(jnp.exp(sums.between), 2, 3)[:, :, :, None, :, None]
    of_columns = product(
        "bkgitjs,bkjgith->bkjsh", of_scores, rows[:, :, None] * between
    )
    of_inside = where(same_block(count), of_scores, 0).sum(axis=5)
    inside = _gradients_inside(query, key, sums.pairs, of_inside)
    since, until = jnp.exp(sums.since)[:, :, None], jnp.exp(sums.until)
    of_query, of_key = of_rows * since + inside[0], of_columns * until + inside[1]
    of_sums = (rows * of_rows + query * inside[0]).sum(axis=2)
    of_sums = of_sums - (key * until * of_columns + key * inside[1])
    of_sums = jax.lax.collapse(of_sums, 2, 4) + of_since - of_until
    later = lower_triangle(count * size).astype(of_sums.dtype)
    later = jnp.broadcast_to(later, (*key.shape[:2], *later.shape))
    exact = einsum if product is einsum else in_six_passes  # terms cancel
    of_log_decay = exact("bkts,bkth->bksh", later, of_sums)
    of_log_decay = of_log_decay + of_until.sum(axis=2, keepdims=True)
    return of_query, of_key, of_log_decay.reshape(key.shape)


block_scores.defvjp(_block_forward, _block_backward)


def _scores_inside(
    query: Array, key: Array, exponents: Float[Array, "B K n m m H"]
) -> Float[Array, "B K G n m m"]:
    """Return the scores of pairs inside blocks.

    Writing the exponentials to memory takes longer than computing them. So they are
    recomputed for each of the G query heads, and in the backward pass for each sum.
    """
    scores = []
    for group in range(query.shape[2]):
        if group:
            exponents = jax.lax.optimization_barrier(exponents)
        weights = jnp.exp(exponents) * query[:, :, group, ..., None, :]
        scores.append((weights * key[:, :, :, None]).sum(axis=-1))
    return jnp.stack(scores, axis=2)


def _gradients_inside(
    query: Array, key: Array, exponents: Array, scores: Float[Array, "B K G n m m"]
) -> tuple[Float[Array, "B K G n m H"], Float[Array, "B K n m H"]]:
    """Return the gradients of queries and keys from those of `_scores_inside`."""
    of_query, of_key = [], jnp.zeros_like(key)
    for group in range(query.shape[2]):
        arrays = exponents, scores[:, :, group], key, query[:, :, group]
        exponents, gradient, key, _ = jax.lax.optimization_barrier(arrays)
        weights = jnp.exp(exponents) * key[:, :, :, None] * gradient[..., None]
        of_query.append(weights.sum(axis=-2))
        arrays = exponents, gradient, key, query[:, :, group]
        exponents, gradient, _, queries = jax.lax.optimization_barrier(arrays)
        weights = jnp.exp(exponents) * queries[..., None, :] * gradient[..., None]
        of_key = of_key + weights.sum(axis=-3)
    return jnp.stack(of_query, axis=2), of_key
