"""Scores of pairs in a chunk, times the decay between key and query.

The decay of a pair is exp(g_{s+1} + … + g_t), with the log-decays g ≤ 0 of the tokens
after key s up to query t. `chunk_decays` computes all of them for one chunk.

A chunk is split into blocks. Inside a block the sum of log-decays of a pair is the
difference of two cumulative sums; `decay_blocks.py` splits these so that the difference
loses no digits. For two tokens of different blocks the sum has three parts: from the
key to the end of its block, from there to the beginning of the query's block, and from
there to the query. So every factor is at most 1, nothing is divided by a decay, and a
strong decay does not make others less exact. A log-decay may be −∞: its token forgets
everything before it.

Decays per head have blocks of up to 128 tokens, since short blocks are slow on
accelerators. Decays per channel have about √T blocks in a chunk of T tokens. This
balances two costs: an exponential per channel of each pair inside a block, and for each
block of queries a product of all earlier keys with their decays.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from symjax.attention.core.arguments import as_array, check_arrays, check_log_decay
from symjax.attention.core.products import TILE, einsum, products
from symjax.attention.core.where import where
from symjax.attention.recurrent.chunks import Chunk
from symjax.attention.recurrent.decay_blocks import (
    block_scores,
    block_sums,
    chunk_sums,
    same_block,
    split_into_blocks,
)


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
    and there are no segments: then every chunk has the same decays. Otherwise the only
    operand is the log-decay as an array [#B #T K F].

    Raises:
        ValueError: the log-decay does not fit the keys, or is above 0 and not traced.
    """
    check_arrays(who, key=key)
    batch, length, heads, size = key.shape
    argument, log_decay = log_decay, as_array(who, "log_decay", log_decay)
    argument_shape = log_decay.shape
    if argument_shape == (heads,):
        log_decay = log_decay[None, None]
    shape = log_decay.shape
    fits = len(shape) in (3, 4) and shape[2:] in ((heads,), (heads, size))
    if not fits or shape[0] not in (1, batch) or shape[1] not in (1, length):
        raise ValueError(
            f"{who}: log_decay must be [{heads}], [{batch} or 1, {length} or 1, "
            f"{heads}] or [{batch} or 1, {length} or 1, {heads}, {size}] for key "
            f"{key.shape}, got {argument_shape}"
        )
    check_log_decay(who, argument if hasattr(argument, "shape") else log_decay)
    if log_decay.ndim == 3:
        log_decay = log_decay[..., None]
    constant = log_decay.shape[:2] == (1, 1) and log_decay.shape[3] == 1
    if constant and mask is None and segment_ids is None:
        return log_decay[0, 0], ()
    return None, (log_decay,)


def log_decays(chunk: Chunk) -> Float[Array, "B K T F"]:
    """Return the log-decays of a chunk, its last operand.

    They are −∞ at the first token of a segment, which forgets the state before it.
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
    O(T²) exponentials per head, once for all examples.

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
    # With a shared decay only tokens that pad the end are hidden. So the position of a
    # visible token is the number of visible tokens before it.
    time = jnp.arange(key.shape[2])[None, :, None]
    between = time - jnp.swapaxes(time, 1, 2)  # [1 T T]
    weights = where(between >= 0, jnp.exp(_times(shared[:, :, None], between)), 0)
    scores = product("bkgth,bksh->bkgts", query, key) * weights[None, :, None]
    since = _times(shared[:, None], time + 1)[None]
    return ChunkDecays(since, *until_end(shared, chunk, key.dtype), scores)


def times_decay(x: Array, log_decay: Float[Array, "#B K T F"]) -> Array:
    """Return x [B K *G T H] times exp(log_decay).

    For decays per head with an entry for each example, this is an einsum, because XLA's
    compiler for CPUs sums the gradient of an einsum faster than that of a broadcast
    product.
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
    blocks = split_into_blocks(log_decay, min(TILE, length))
    sums = block_sums(blocks)
    exponents = sums.pairs[..., None, :, 0]
    count, size = blocks.shape[2:4]
    if count > 1:
        rows, between = sums.since[..., None, :], sums.between[:, :, :, None]
        across = rows + between + sums.until[:, :, None, None, :, :, 0]
        exponents = where(same_block(count), exponents, across)
    exponents = exponents.reshape(*blocks.shape[:2], count * size, count * size)
    weights = jnp.exp(exponents[..., :length, :length])
    scores = product("bkgth,bksh->bkgts", query, key)
    scores = einsum("bkgts,bkts->bkgts", scores, weights)
    since, until = chunk_sums(sums)
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
    query, key, log_decay = (
        split_into_blocks(x, size) for x in (query, key, log_decay)
    )
    results: Any = block_scores(product, query, key, log_decay)
    since, until, scores = results
    return since[:, :, :length], until[:, :, :length], scores[..., :length, :length]
