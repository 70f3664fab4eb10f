"""The delta rule, with a decay a head or a channel, on NVIDIA GPUs.

With P the faded products of a chunk's keys with earlier ones, and X = v − k S, token t
misses w_t at its key and writes u_t = β_t w_t:

    w + P β w = X,  so that  w = X − R β X  with the resolvent R = P (I + β P)⁻¹

R of blocks of 2, 4 … 64 tokens comes from those of half the size, with C the pairs of P
between them: R + (I − R β) C (I − β R). Where keys are nearly equal R β X takes away
most of X, so that these products keep 16 bits, as on a TPU.

Backward, with d what changes by u in the rows of the chunk and in the state after it,
the gradient of u is r = d − Rᵀ β d. `gpu_delta_gradients` has what follows from it.

Gradients of the delta rule on NVIDIA GPUs, of all chunks side by side.

With w what tokens miss, u = β w what they write, and r the gradient of u, that of
values is β r, that of β is r·w, and a key asks its state like a query whose row has the
gradient −β r.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from symjax.attention.kernels.gpu import gated, gated_channels
from symjax.attention.kernels.gpu.chunks import (
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
    summed,
    sums_of,
    token_block,
    wide,
)
from symjax.attention.kernels.gpu.gated_channels import LEVELS
from symjax.attention.kernels.operands import in_parts


def gradients(
    interpret: Any,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    missing: Float[Array, "B T K V"],
    sums: Float[Array, "B T K H"] | Float[Array, "B K T"],
    beta: Float[Array, "B K T"],
    change: Float[Array, "B T N V"],
    of_written: Float[Array, "B T N V"],
    before: Float[Array, "B K chunks H V"],
    after: Float[Array, "B N chunks H V"],
    scores: Float[Array, "B N T CHUNK"],
) -> tuple[Array, ...]:
    """Those of query, key, value, decay and β, each of query heads.

    Args:
        of_written, after: gradients, of u and of the state after each chunk.
    """
    batch, length, heads, size = query.shape
    width, shared = change.shape[3], heads // key.shape[2]
    grid = length // CHUNK, heads, batch
    rows, numbers, pairs = token_block(width), number_block(shared), pair_block()
    operands = [
        (token_block(width, shared), missing),
        (numbers, beta),
        (rows, change),
        (rows, of_written),
    ]
    dtype = summed(key, shared)
    of_numbers = number_block(), (batch, heads, length), jnp.float32
    results = [(rows, change.shape, dtype), of_numbers]
    if sums.ndim == 3:
        of_value, of_beta, of_query, of_key, of_decay = call(
            _gradients,
            grid,
            [
                *operands,
                (token_block(size), query),
                (token_block(size, shared), key),
                (numbers, sums),
                (state_block(size, width, shared), before),
                (state_block(size, width), after),
                (pairs, scores),
            ],
            [
                *results,
                (token_block(size), query.shape, query.dtype),
                (token_block(size), query.shape, dtype),
                of_numbers,
            ],
            warps=4,
            interpret=interpret,
        )
        of_decay = jnp.swapaxes(of_decay, 1, 2)
    else:
        narrow = [(rows, change.shape, key.dtype), (pairs, scores.shape, key.dtype)]
        of_value, of_beta, written, erased, of_queries, of_keys = call(
            _of_pairs,
            grid,
            operands,
            results + [x for x in narrow for _ in range(2)],
            warps=8,
            interpret=interpret,
        )
        states = before, after
        of_query, of_key, of_decay = gated_channels.of_channels(
            interpret,
            (query.dtype, jnp.float32, jnp.float32),
            *(query, key, written, sums, change, *states, of_queries),
        )
        asking, joined, decays = gated_channels.of_channels(
            interpret,
            (jnp.float32,) * 3,
            jnp.repeat(key, shared, axis=2),
            *(key, written, sums, erased, *states, of_keys),
            joins=False,
        )
        of_key = (of_key + asking + joined).astype(dtype)
        of_decay += decays
    return of_query, of_key, of_value, of_decay, jnp.swapaxes(of_beta, 1, 2)


def _of_rows(
    missing: Any, beta: Any, of_written: Any, of_value: Any, of_beta: Any
) -> tuple[Float[Array, "CHUNK V"], Float[Array, "CHUNK V"]]:
    """Writes the gradients of values and β. Returns what is written to the state, and
    the gradient of what keys read of it."""
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
    of_queries[...] = gated_channels.mirrored(change[...], u)
    pairs = gated_channels.mirrored(e, u)
    of_keys[...] = jnp.where(iota(0) == iota(1), jnp.zeros_like(pairs), pairs)


def _gradients(
    missing, beta, change, of_written, query, key, sums, before, after, scores,
    of_value, of_beta, of_query, of_key, of_decay,
):  # fmt: skip
    """A decay's gradient is the sum over what it fades: pairs across it, the state
    before, which queries and keys ask, and keys for the state after."""
    written, erased = _of_rows(missing, beta, of_written, of_value, of_beta)
    of_queries, fades = gated.of_pairs(change[...], written, wide(scores), sums)
    pairs = dot(key[...], key[...], BY_LAST) * gated.weights(sums, 1)
    of_keys, more = gated.of_pairs(erased, written, pairs, sums, since=1)
    block = min(BLOCK, query.shape[1])

    def part(i, fades):
        at = pl.ds(i * block, block)
        asking, keys, state = query.at[:, at], key.at[:, at], before.at[at, :]
        reading = gated.of_reading
        found, read = reading(asking, keys, change[...], of_queries, sums, state)
        of_query[:, at] = found.astype(of_query.dtype)
        whole = dot(of_queries, asking[...], TRANSPOSED)
        found, erases = reading(keys, keys, erased, of_keys, sums, state)
        whole += found + dot(of_keys, keys[...], TRANSPOSED)
        given = keys, written, sums, state, after.at[at, :]
        found, joins = gated.of_writing(*given)
        of_key[:, at] = (whole + found).astype(of_key.dtype)
        return fades + read + erases + joins

    of_decay[...] = jax.lax.fori_loop(0, query.shape[1] // block, part, fades + more)


COLUMNS = 32  # of a state that a program takes through time, one of few on the GPU


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
    sums, (of_sums, all_sums) = _sums(log_decay), _blocks(log_decay, 1)
    beta = jnp.swapaxes(beta, 1, 2)
    (resolvent,) = call(
        _resolve,
        (count, key_heads, batch),
        [(token_block(size), key), (of_sums, sums), (number_block(), beta)],
        [(pair_block(), (batch, key_heads, length, CHUNK), jnp.float32)],
        warps=4,
        interpret=interpret,
    )
    v = min(COLUMNS, width)
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
        warps=4,
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
            (_blocks(log_decay, shared)[0], sums),
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
    log_decay: Float[Array, "B T K *H"],
) -> Float[Array, "B T K H"] | Float[Array, "B K T"]:
    sums = sums_of(log_decay)
    return jnp.swapaxes(sums, 1, 2) if sums.ndim == 3 else sums


def _blocks(log_decay: Float[Array, "B T K *H"], shared: int) -> tuple[Any, Any]:
    """Of the sums of decays: those of a chunk, and of all time."""
    length = log_decay.shape[1]
    if log_decay.ndim == 3:
        return number_block(shared), all_numbers(length, shared)
    size = log_decay.shape[3]
    every = all_tokens(length, size, shared, first_part)
    return token_block(size, shared), every


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
    return gated_channels if _by_channel(sums) else gated


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
    resolvent[...] = found


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
    before, missing, scores, resolvent = kept
    batch, length, heads, size = query.shape
    width, shared = value.shape[3], heads // key.shape[2]
    dtype = value.dtype
    sums, (_, all_sums) = _sums(log_decay), _blocks(log_decay, shared)
    beta = jnp.swapaxes(beta, 1, 2)
    v = min(COLUMNS, width)
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
        warps=4,
        stages=_stages(log_decay),
        interpret=interpret,
    )
    return gradients(
        interpret,
        query,
        key,
        missing,
        sums,
        beta,
        change,
        of_written,
        before,
        after,
        scores,
    )


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
