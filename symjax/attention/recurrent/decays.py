"""Scores of pairs in a chunk, times the decay between key and query, without division.

The decay of a pair is exp(g_{s+1} + … + g_t), with the log-decays g ≤ 0 of the tokens
after key s up to query t. `chunk_decays` computes all of them for one chunk.

A chunk is split into blocks. Inside a block the sum of log-decays of a pair is the
difference of two cumulative sums; `_exponents` splits these so that the difference
loses no digits. For two tokens of different blocks the sum has three parts: from the
key to the end of its block, from there to the beginning of the query's block, and from
there to the query. So every factor is at most 1, a strong decay does not make other
decays less exact, and −∞, which forgets everything, is a valid log-decay.

Decays per head have blocks of up to 128 tokens, since short blocks are slow on
accelerators. Decays per channel have about √T blocks in a chunk of T tokens: a pair
inside a block takes one exponential per channel; for other pairs keys are multiplied by
a decay once per block of queries.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.arguments import as_array, check_arrays, check_log_decay
from symjax.attention.core.meshes import batched_alike
from symjax.attention.core.products import TILE, einsum, in_six_passes, products
from symjax.attention.core.selection import where
from symjax.attention.recurrent.chunks import Chunk, lower_triangle


class ChunkDecays(NamedTuple):
    """Log-decays of a chunk, and the scores of its pairs times their decays.

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
    take O(T H √T) exponentials, multiplications and memory. A shared log-decay takes
    O(T²) exponentials for all chunks together.

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
    length = key.shape[2]
    blocks = _blocks(log_decay, min(TILE, length))
    sums = _block_sums(blocks)
    exponents = sums.pairs[..., None, :, 0]
    count, size = blocks.shape[2:4]
    if count > 1:
        rows, between = sums.since[..., None, :], sums.between[:, :, :, None]
        across = rows + between + sums.until[:, :, None, None, :, :, 0]
        exponents = where(_same_block(count), exponents, across)
    exponents = exponents.reshape(*blocks.shape[:2], count * size, count * size)
    weights = jnp.exp(exponents[..., :length, :length])
    scores = product("bkgth,bksh->bkgts", query, key)
    scores = einsum("bkgts,bkts->bkgts", scores, weights)
    since, until = _chunk_sums(sums)
    return since[:, :, :length], until[:, :, :length], scores


def _scores_by_channel(
    query: Array, key: Array, log_decay: Array, product: Callable[..., Array]
) -> tuple[Array, Array, Array]:
    """Return `since`, `until`, and scores Σ_h q_th k_sh exp(g_{s+1,h} + … + g_th)."""
    length = key.shape[2]
    if length == 1:  # a token sees itself without decay
        scores = product("bkgth,bksh->bkgts", query, key)
        return log_decay, jnp.zeros_like(log_decay), scores
    size = 1 << ((length - 1).bit_length() + 1) // 2  # about √length
    query, key, log_decay = (_blocks(x, size) for x in (query, key, log_decay))
    results: Any = _block_scores(product, query, key, log_decay)
    since, until, scores = results
    return since[:, :, :length], until[:, :, :length], scores[..., :length, :length]


def _blocks(x: Float[Array, "*heads T F"], size: int) -> Float[Array, "*heads n m F"]:
    """Split time into blocks of `size` tokens.

    Zeros pad the last block: tokens that add nothing and do not decay.
    """
    *heads, length, channels = x.shape
    count = -(-length // size)
    if missing := count * size - length:
        x = jnp.pad(x, [(0, 0)] * len(heads) + [(0, missing), (0, 0)])
    return x.reshape(*heads, count, size, channels)


def _same_block(count: int) -> Bool[Array, "n 1 n 1"]:
    """Return True for pairs [i, ·, j, ·] of a query and a key in the same block."""
    return jnp.eye(count, dtype=bool)[:, None, :, None]


class _BlockSums(NamedTuple):
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


def _block_sums(log_decay: Float[Array, "B K n m F"]) -> _BlockSums:
    pairs = _exponents(log_decay)
    since, until = log_decay[..., :1, :] + pairs[..., 0, :], pairs[..., -1, :, :]
    total = since[..., -1, :]
    if total.shape[2] == 1:
        zeros = jnp.zeros_like(total)[:, :, None]
        return _BlockSums(pairs, since, until, zeros - jnp.inf, zeros, zeros)
    blocks = _exponents(total)
    before = _one_later(total[:, :, :1] + blocks[..., 0, :], 0)[..., None, :]
    after = blocks[..., -1, :, :][..., None, :]
    return _BlockSums(pairs, since, until, _one_later(blocks, -jnp.inf), before, after)


def _chunk_sums(sums: _BlockSums) -> tuple[Array, Array]:
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
def _block_scores(
    product: Callable[..., Array],
    query: Float[Array, "B K G n m H"],
    key: Float[Array, "B K n m H"],
    log_decay: Float[Array, "B K n m H"],
) -> tuple[
    Float[Array, "B K n*m H"], Float[Array, "B K n*m H"], Float[Array, "B K G n*m n*m"]
]:
    """Return `since`, `until`, and the scores of all pairs.

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
    sums = _block_sums(log_decay)
    rows = query * jnp.exp(sums.since)[:, :, None]
    columns = (key * jnp.exp(sums.until))[:, :, None]
    columns = columns * jnp.exp(sums.between)[..., None, :]
    across = product("bkgith,bkish->bkgits", rows, jax.lax.collapse(columns, 3, 5))
    across = across.reshape(*across.shape[:-1], *key.shape[2:4])
    inside = _scores_inside(query, key, sums.pairs)[..., None, :]
    scores = across + where(_same_block(key.shape[2]), inside, 0)
    scores = jax.lax.collapse(jax.lax.collapse(scores, 5, 7), 3, 5)
    results = batched_alike((*_chunk_sums(sums), scores))
    return results, (query, key, sums, rows, columns)


def _block_backward(
    product: Callable, saved: tuple, gradients: tuple
) -> tuple[Array, Array, Array]:
    """Return the gradients of queries, keys and log-decays.

    The sum of log-decays through a token is added to the exponents of its pairs as a
    query, and subtracted from those of its pairs as a key. Its gradient is (query ·
    gradient of query) − (key · gradient of key). The gradient of a log-decay is the sum
    of these over its own token and all later ones.
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
    of_inside = where(_same_block(count), of_scores, 0).sum(axis=5)
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


_block_scores.defvjp(_block_forward, _block_backward)


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
        exponents, gradient, _, one = jax.lax.optimization_barrier(arrays)
        weights = jnp.exp(exponents) * one[..., None, :] * gradient[..., None]
        of_key = of_key + weights.sum(axis=-3)
    return jnp.stack(of_query, axis=2), of_key
