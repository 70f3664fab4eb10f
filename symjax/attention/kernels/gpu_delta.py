"""The delta rule, with a decay a head or a channel, on NVIDIA GPUs.

With P the faded products of a chunk's keys with earlier ones, and X = v − k S, token t
misses w_t at its key and writes u_t = β_t w_t:

    w + P β w = X,  so that  w = X − R β X  with the resolvent R = P (I + β P)⁻¹

R of blocks of 2, 4 … 64 tokens comes from those of half the size, with C the pairs of P
between them: R + (I − R β) C (I − β R). Where keys are nearly equal R β X takes away
most of X, so that these products keep 16 bits, as on a TPU.

Backward, with d what changes by u in the rows of the chunk and in the state after it,
the gradient of u is r = d − Rᵀ β d. Of values it is β r, of β r·w, and a key asks its
state like a query whose row has the gradient −β r.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from symjax.attention.kernels import gpu_channels, gpu_heads
from symjax.attention.kernels.blocks import in_parts
from symjax.attention.kernels.gpu_channels import LEVELS
from symjax.attention.kernels.gpu_chunks import (
    BLOCK,
    BY_LAST,
    CHUNK,
    TRANSPOSED,
    all_numbers,
    all_pairs,
    all_states,
    all_tokens,
    call,
    dot,
    first_part,
    iota,
    number_block,
    own_part,
    pair_block,
    state_block,
    sums_of,
    token_block,
    wide,
)


def forward(
    interpret: Any,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    log_decay: Float[Array, "B T K *H"],
    beta: Float[Array, "B T K"],
) -> tuple[Array, ...]:
    """The output; of key heads the state before each chunk and what tokens miss; the
    scores of a chunk's pairs; and of key heads their resolvent."""
    batch, length, heads, size = query.shape
    key_heads, width = value.shape[2:]
    count, dtype, shared = length // CHUNK, value.dtype, heads // key_heads
    sums, of_sums, all_sums = _sums(log_decay, 1)
    beta = jnp.swapaxes(beta, 1, 2)
    (resolvent,) = call(
        _resolve,
        (count, key_heads, batch),
        [(token_block(size), key), (of_sums, sums), (number_block(), beta)],
        [(pair_block(), (batch, key_heads, length, CHUNK), jnp.float32)],
        warps=4,
        interpret=interpret,
    )
    v = min(BLOCK, width)
    before, missing = call(
        _advance,
        (width // v, key_heads, batch),
        [
            (all_tokens(length, size, 1, first_part), key),
            (all_tokens(length, v, 1, own_part), value),
            (all_sums, sums),
            (all_numbers(length, 1), beta),
            (all_pairs(length, 1), resolvent),
        ],
        [
            _states(batch, count, key_heads, size, width, v, dtype),
            (all_tokens(length, v, 1, own_part), value.shape, dtype),
        ],
        warps=8,
        stages=_stages(log_decay),
        interpret=interpret,
    )
    output, scores = call(
        _rows,
        (count, heads, batch),
        [
            (token_block(size), query),
            (token_block(size, shared), key),
            (token_block(width, shared), missing),
            (_sums(log_decay, shared)[1], sums),
            (number_block(shared), beta),
            (state_block(size, width, shared), before),
        ],
        [
            (token_block(width), (batch, length, heads, width), dtype),
            (pair_block(), (batch, heads, length, CHUNK), dtype),
        ],
        warps=4,
        interpret=interpret,
    )
    return output, before, missing, scores, resolvent


def _sums(
    log_decay: Float[Array, "B T K *H"], shared: int
) -> tuple[Float[Array, "B T K H"] | Float[Array, "B K T"], Any, Any]:
    """The sums of decays, and their blocks: of a chunk, and of all time."""
    sums, length = sums_of(log_decay), log_decay.shape[1]
    if log_decay.ndim == 3:
        blocks = number_block(shared), all_numbers(length, shared)
        return jnp.swapaxes(sums, 1, 2), *blocks
    size = log_decay.shape[3]
    blocks = token_block(size, shared), all_tokens(length, size, shared, first_part)
    return sums, *blocks


def _stages(log_decay: Float[Array, "B T K *H"]) -> int:
    """How many chunks are loaded at a time, in the 99 KiB that smaller GPUs have."""
    return 2 if log_decay.ndim == 3 else 1


def _states(
    batch: int, count: int, heads: int, size: int, width: int, v: int, dtype: Any
) -> tuple:
    """Of programs that have all rows of a state and v of its columns."""
    block = all_states(count, size, v, first_part, own_part)
    return block, (batch, heads, count, size, width), dtype


def _form(sums: Any) -> Any:
    return gpu_channels if _by_channel(sums) else gpu_heads


def _by_channel(sums: Any) -> bool:
    return len(sums.shape) == 2


def _resolve(key, sums, beta, resolvent):
    pairs = _form(sums).scores_of(key, key, sums)
    apart, strength = iota(0) ^ iota(1), beta[...][None, :]
    found = jnp.where(apart == 1, pairs, 0.0)

    def step(level, found):
        corner = jnp.where(apart >> level == 1, pairs, 0.0)
        corner -= _closely(corner * strength, found)
        return found + corner - _closely(found * strength, corner)

    found = jax.lax.fori_loop(1, LEVELS, step, found)
    resolvent[...] = found.astype(resolvent.dtype)


def _chunk(i: Any, sums: Any, beta: Any) -> tuple[Any, Array, Array, Array, Array]:
    """Where a chunk is in time; of its tokens the decays since its start and until its
    end, all of them, and β."""
    here, end = pl.ds(i * CHUNK, CHUNK), i * CHUNK + CHUNK - 1
    if _by_channel(sums):
        since, last = sums[here, :], sums[end, :]
        until, through = last[None, :] - since, last[:, None]
    else:
        since, last = sums[here][:, None], sums[end]
        until, through = last - since, last
    since, until, through = map(jnp.exp2, (since, until, through))
    return here, since, until, through, beta[here][:, None]


def _closely(
    a: Float[Array, "CHUNK CHUNK"],
    b: Float[Array, "CHUNK _"],
    contract: tuple = ((1,), (0,)),
) -> Float[Array, "CHUNK _"]:
    """The product of float32 arrays with 16 of their 24 bits, in three of bfloat16."""
    (high, low), (much, little) = (in_parts(x, 2) for x in (a, b))
    found = dot(high, little, contract) + dot(low, much, contract)
    return found + dot(high, much, contract)


def _times(x: Array, factor: Array) -> Array:
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def _advance(key, value, sums, beta, resolvent, before, missing):
    dtype = value.dtype

    def step(i, state):
        here, since, until, through, strength = _chunk(i, sums, beta)
        keys, kept = key[here, :], state.astype(dtype)
        before[i] = kept
        found = value[here, :].astype(jnp.float32) - dot(_times(keys, since), kept)
        found -= _closely(resolvent[here, :], strength * found)
        missing[here, :] = found.astype(dtype)
        new = (strength * found).astype(dtype)
        return state * through + dot(_times(keys, until), new, TRANSPOSED)

    state = jnp.zeros((key.shape[1], value.shape[1]), jnp.float32)
    jax.lax.fori_loop(0, before.shape[0], step, state)


def _rows(query, key, missing, sums, beta, before, output, kept):
    written = _times(missing[...], beta[...][:, None])
    _form(sums).write_rows(query, key, written, sums, before, output, kept)


def backward(
    interpret: Any,
    given: Sequence[Array],
    kept: Sequence[Array],
    change: Float[Array, "B T N V"],
) -> tuple[Array, ...]:
    """Gradients of the five operands given to `forward`, each of query heads."""
    query, key, value, log_decay, beta = given
    *_, scores, resolvent = kept
    batch, length, heads, size = query.shape
    width, shared = value.shape[3], heads // key.shape[2]
    dtype = value.dtype
    sums, _, all_sums = _sums(log_decay, shared)
    beta = jnp.swapaxes(beta, 1, 2)
    v = min(BLOCK, width)
    after, of_written = call(
        _return,
        (width // v, heads, batch),
        [
            (all_tokens(length, size, 1, first_part), query),
            (all_tokens(length, size, shared, first_part), key),
            (all_sums, sums),
            (all_numbers(length, shared), beta),
            (all_tokens(length, v, 1, own_part), change),
            (all_pairs(length, 1), scores),
            (all_pairs(length, shared), resolvent),
        ],
        [
            _states(batch, length // CHUNK, heads, size, width, v, dtype),
            (all_tokens(length, v, 1, own_part), change.shape, dtype),
        ],
        warps=8,
        stages=_stages(log_decay),
        interpret=interpret,
    )
    passed = sums, beta, change, of_written, after
    found = _through_channels if log_decay.ndim == 4 else _through_heads
    return found(interpret, given, kept, passed)


def _blocks_of_rows(
    given: Sequence[Array], missing: Array, beta: Array, change: Array, written: Array
) -> tuple[tuple, list, list]:
    """The grid, operands and first two results of kernels that begin with `_of_rows`:
    of values, as they are added up over heads, and of β."""
    shared = given[0].shape[2] // given[1].shape[2]
    batch, length, heads, width = change.shape
    numbers, rows = number_block(shared), token_block(width)
    operands = [
        (token_block(width, shared), missing),
        (numbers, beta),
        (rows, change),
        (rows, written),
    ]
    results = [
        (rows, change.shape, _summed(given)),
        (number_block(), (batch, heads, length), jnp.float32),
    ]
    return (length // CHUNK, heads, batch), operands, results


def _summed(given: Sequence[Array]) -> Any:
    """The dtype of gradients that are added up over the query heads of a key head."""
    return given[2].dtype if given[0].shape[2] == given[1].shape[2] else jnp.float32


def _through_heads(
    interpret: Any, given: Sequence[Array], kept: Sequence[Array], passed: tuple
) -> tuple[Array, ...]:
    query, key, *_ = given
    before, missing, scores, _ = kept
    sums, beta, change, of_written, after = passed
    grid, operands, results = _blocks_of_rows(given, missing, beta, change, of_written)
    size, shared = key.shape[3], query.shape[2] // key.shape[2]
    width = change.shape[3]
    of_value, of_beta, of_query, of_key, of_decay = call(
        _gradients,
        grid,
        [
            *operands,
            (token_block(size), query),
            (token_block(size, shared), key),
            (number_block(shared), sums),
            (state_block(size, width, shared), before),
            (state_block(size, width), after),
            (pair_block(), scores),
        ],
        [
            *results,
            (token_block(size), query.shape, query.dtype),
            (token_block(size), query.shape, _summed(given)),
            results[1],
        ],
        warps=8,
        interpret=interpret,
    )
    of_decay, of_beta = (jnp.swapaxes(x, 1, 2) for x in (of_decay, of_beta))
    return of_query, of_key, of_value, of_decay, of_beta


def _through_channels(
    interpret: Any, given: Sequence[Array], kept: Sequence[Array], passed: tuple
) -> tuple[Array, ...]:
    query, key, *_ = given
    before, missing, scores, _ = kept
    sums, beta, change, of_written, after = passed
    grid, operands, results = _blocks_of_rows(given, missing, beta, change, of_written)
    rows = token_block(change.shape[3]), change.shape, missing.dtype
    pairs = pair_block(), scores.shape, scores.dtype
    of_value, of_beta, written, erased, of_queries, of_keys = call(
        _of_pairs,
        grid,
        operands,
        [*results, rows, rows, pairs, pairs],
        warps=8,
        interpret=interpret,
    )
    states = before, after
    of_query, of_key, of_decay = gpu_channels.of_channels(
        interpret,
        (query.dtype, jnp.float32, jnp.float32),
        *(query, key, written, sums, change, *states, of_queries),
    )
    keys = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
    asking, joined, decays = gpu_channels.of_channels(
        interpret,
        (jnp.float32,) * 3,
        *(keys, key, written, sums, erased, *states, of_keys),
        joins=False,
    )
    of_key = (of_key + asking + joined).astype(_summed(given))
    of_beta = jnp.swapaxes(of_beta, 1, 2)
    return of_query, of_key, of_value, of_decay + decays, of_beta


def _return(
    query, key, sums, beta, change, scores, resolvent, after, of_written
):  # fmt: skip
    """after: the gradient of the state after each chunk."""
    dtype = change.dtype

    def step(i, grown):
        i = after.shape[0] - 1 - i
        here, since, until, through, strength = _chunk(i, sums, beta)
        keys, asked, kept = key[here, :], change[here, :], grown.astype(dtype)
        after[i] = kept
        found = dot(_times(keys, until), kept)
        found += dot(scores[here, :], asked, TRANSPOSED)
        found -= _closely(resolvent[here, :], strength * found, TRANSPOSED)
        of_written[here, :] = found.astype(dtype)
        erased = (strength * found).astype(dtype)
        grown *= through
        grown += dot(_times(query[here, :], since), asked, TRANSPOSED)
        return grown - dot(_times(keys, since), erased, TRANSPOSED)

    grown = jnp.zeros((key.shape[1], change.shape[1]), jnp.float32)
    jax.lax.fori_loop(0, after.shape[0], step, grown)


def _of_rows(
    missing: Any, beta: Any, of_written: Any, of_value: Any, of_beta: Any
) -> tuple[Float[Array, "CHUNK V"], Float[Array, "CHUNK V"]]:
    """What is written, and the gradient of what keys read of the state; those of values
    and β are done."""
    dtype, strength = missing.dtype, beta[...][:, None]
    missed, changed = wide(missing), wide(of_written)
    of_beta[...] = (missed * changed).sum(axis=1)
    of_value[...] = (strength * changed).astype(of_value.dtype)
    return (strength * missed).astype(dtype), (-strength * changed).astype(dtype)


def _of_pairs(
    missing, beta, change, of_written,
    of_value, of_beta, written, erased, of_queries, of_keys,
):  # fmt: skip
    u, e = _of_rows(missing, beta, of_written, of_value, of_beta)
    written[...], erased[...] = u, e
    of_queries[...] = gpu_channels.mirrored(change[...], u)
    pairs = gpu_channels.mirrored(e, u)
    of_keys[...] = jnp.where(iota(0) == iota(1), jnp.zeros_like(pairs), pairs)


def _gradients(
    missing, beta, change, of_written, query, key, sums, before, after, scores,
    of_value, of_beta, of_query, of_key, of_decay,
):  # fmt: skip
    """A decay's gradient is the sum over what it fades: pairs across it, the state
    before, which queries and keys ask, and keys for the state after."""
    written, erased = _of_rows(missing, beta, of_written, of_value, of_beta)
    of_queries, fades = gpu_heads.of_pairs(change[...], written, wide(scores), sums)
    pairs = dot(key[...], key[...], BY_LAST) * gpu_heads.weights(sums, 1)
    of_keys, more = gpu_heads.of_pairs(erased, written, pairs, sums, since=1)
    block = min(BLOCK, query.shape[1])

    def part(i, fades):
        at = pl.ds(i * block, block)
        asking, keys, state = query.at[:, at], key.at[:, at], before.at[at, :]
        reading = gpu_heads.of_reading
        found, read = reading(asking, keys, change[...], of_queries, sums, state)
        of_query[:, at] = found.astype(of_query.dtype)
        whole = dot(of_queries, asking[...], TRANSPOSED)
        found, erases = reading(keys, keys, erased, of_keys, sums, state)
        whole += found + dot(of_keys, keys[...], TRANSPOSED)
        given = keys, written, sums, state, after.at[at, :]
        found, joins = gpu_heads.of_writing(*given)
        of_key[:, at] = (whole + found).astype(of_key.dtype)
        return fades + read + erases + joins

    of_decay[...] = jax.lax.fori_loop(0, query.shape[1] // block, part, fades + more)
