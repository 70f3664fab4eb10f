"""The delta rule with a decay a head, forward and backward, on NVIDIA GPUs.

With P the faded products of a chunk's keys with earlier ones, and X = v − k S, token t
misses w_t at its key and writes u_t = β_t w_t:

    w + P β w = X,  so that  w = X − R β X  with the resolvent R = P (I + β P)⁻¹

R of blocks of 2, 4 … 64 tokens comes from those of half the size, with C the pairs of P
between them: R + (I − R β) C (I − β R). It has nothing on the diagonal, so that what is
rounded of it is a part of what it corrects.

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
from symjax.attention.kernels.gpu_heads import (
    of_pairs,
    of_reading,
    of_writing,
    weights,
    write_rows,
)

LEVELS = CHUNK.bit_length() - 1


def forward(
    interpret: Any,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    log_decay: Float[Array, "B T K"],
    beta: Float[Array, "B T K"],
) -> tuple[Array, ...]:
    """The output, the state before each chunk, what tokens miss, and of each chunk's
    pairs the scores and the resolvent."""
    batch, length, heads, size = query.shape
    width, shared = value.shape[3], heads // key.shape[2]
    count, dtype = length // CHUNK, value.dtype
    sums, beta = _by_head(log_decay, beta)
    pairs = pair_block(), (batch, heads, length, CHUNK), dtype
    rows = batch, length, heads, width
    (resolvent,) = call(
        _resolve,
        (count, heads, batch),
        [
            (token_block(size, shared), key),
            (number_block(shared), sums),
            (number_block(shared), beta),
        ],
        [pairs],
        warps=4,
        interpret=interpret,
    )
    v = min(BLOCK, width)
    before, missing = call(
        _advance,
        (width // v, heads, batch),
        [
            (all_tokens(length, size, shared, first_part), key),
            (all_tokens(length, v, shared, own_part), value),
            (all_numbers(length, shared), sums),
            (all_numbers(length, shared), beta),
            (all_pairs(length), resolvent),
        ],
        [
            _states(batch, count, heads, size, width, dtype),
            (all_tokens(length, v, 1, own_part), rows, dtype),
        ],
        warps=4,
        stages=2,
        interpret=interpret,
    )
    output, scores = call(
        _rows,
        (count, heads, batch),
        [
            (token_block(size), query),
            (token_block(size, shared), key),
            (token_block(width), missing),
            (number_block(shared), sums),
            (number_block(shared), beta),
            (state_block(size, width), before),
        ],
        [(token_block(width), rows, dtype), pairs],
        warps=4,
        interpret=interpret,
    )
    return output, before, missing, scores, resolvent


def _by_head(*numbers: Float[Array, "B T K"]) -> list[Float[Array, "B K T"]]:
    log_decay, beta = numbers
    return [jnp.swapaxes(x, 1, 2) for x in (sums_of(log_decay), beta)]


def _states(
    batch: int, count: int, heads: int, size: int, width: int, dtype: Any
) -> tuple:
    """Of programs that have all rows of a state and some of its columns."""
    block = all_states(count, size, min(BLOCK, width), first_part, own_part)
    return block, (batch, heads, count, size, width), dtype


def _resolve(key, sums, beta, resolvent):
    pairs = dot(key[...], key[...], BY_LAST) * weights(sums)
    apart = iota(0) ^ iota(1)
    found = jnp.where(apart == 1, pairs, 0.0)

    def step(level, found):
        corner = jnp.where(apart >> level == 1, pairs, 0.0)
        corner -= dot(corner * beta[...][None, :], found)
        return found + corner - dot(found * beta[...][None, :], corner)

    found = jax.lax.fori_loop(1, LEVELS, step, found)
    resolvent[...] = found.astype(resolvent.dtype)


def _chunk(i: Any, sums: Any, beta: Any) -> tuple[Any, Array, Array, Array, Array]:
    """Where a chunk is in time; of its tokens the decays since its start and until its
    end [CHUNK 1], all of them, and β."""
    here = pl.ds(i * CHUNK, CHUNK)
    since, last = sums[here], sums[i * CHUNK + CHUNK - 1]
    since, until = (jnp.exp2(x)[:, None] for x in (since, last - since))
    return here, since, until, jnp.exp2(last), beta[here][:, None]


def _advance(key, value, sums, beta, resolvent, before, missing):
    dtype = value.dtype

    def step(i, state):
        here, since, until, through, strength = _chunk(i, sums, beta)
        keys, kept = key[here, :], state.astype(dtype)
        before[i] = kept
        found = value[here, :].astype(jnp.float32) - since * dot(keys, kept)
        found -= dot(resolvent[here, :], (strength * found).astype(dtype))
        missing[here, :] = found.astype(dtype)
        new = (strength * until * found).astype(dtype)
        return state * through + dot(keys, new, TRANSPOSED)

    state = jnp.zeros((key.shape[1], value.shape[1]), jnp.float32)
    jax.lax.fori_loop(0, before.shape[0], step, state)


def _rows(query, key, missing, sums, beta, before, output, kept):
    written = (beta[...][:, None] * wide(missing)).astype(missing.dtype)
    write_rows(query, key, written, sums, before, output, kept)


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
    count, dtype = length // CHUNK, value.dtype
    sums, beta = _by_head(log_decay, beta)
    v = min(BLOCK, width)
    after, of_written = call(
        _return,
        (width // v, heads, batch),
        [
            (all_tokens(length, size, 1, first_part), query),
            (all_tokens(length, size, shared, first_part), key),
            (all_numbers(length, shared), sums),
            (all_numbers(length, shared), beta),
            (all_tokens(length, v, 1, own_part), change),
            (all_pairs(length), scores),
            (all_pairs(length), resolvent),
        ],
        [
            _states(batch, count, heads, size, width, dtype),
            (all_tokens(length, v, 1, own_part), change.shape, dtype),
        ],
        warps=4,
        stages=2,
        interpret=interpret,
    )
    summed = dtype if shared == 1 else jnp.float32
    numbers = number_block(), (batch, heads, length), jnp.float32
    of_query, of_key, of_value, of_decay, of_beta = call(
        _gradients,
        (count, heads, batch),
        [
            (token_block(size), query),
            (token_block(size, shared), key),
            (token_block(width), missing),
            (number_block(shared), sums),
            (number_block(shared), beta),
            (token_block(width), change),
            (token_block(width), of_written),
            (state_block(size, width), before),
            (state_block(size, width), after),
            (pair_block(), scores),
        ],
        [
            (token_block(size), query.shape, query.dtype),
            (token_block(size), query.shape, summed),
            (token_block(width), change.shape, summed),
            numbers,
            numbers,
        ],
        warps=8,
        interpret=interpret,
    )
    of_decay, of_beta = (jnp.swapaxes(x, 1, 2) for x in (of_decay, of_beta))
    return of_query, of_key, of_value, of_decay, of_beta


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
        found = until * dot(keys, kept) + dot(scores[here, :], asked, TRANSPOSED)
        weighed = (strength * found).astype(dtype)
        found -= dot(resolvent[here, :], weighed, TRANSPOSED)
        of_written[here, :] = found.astype(dtype)
        asked = (since * asked.astype(jnp.float32)).astype(dtype)
        erased = (since * strength * found).astype(dtype)
        grown = grown * through + dot(query[here, :], asked, TRANSPOSED)
        return grown - dot(keys, erased, TRANSPOSED)

    grown = jnp.zeros((key.shape[1], change.shape[1]), jnp.float32)
    jax.lax.fori_loop(0, after.shape[0], step, grown)


def _gradients(
    query, key, missing, sums, beta, change, of_written, before, after, scores,
    of_query, of_key, of_value, of_decay, of_beta,
):  # fmt: skip
    """A decay's gradient is the sum over what it fades: pairs across it, the state
    before, which queries and keys ask, and keys for the state after."""
    dtype, strength = change.dtype, beta[...][:, None]
    missed, written = wide(missing), wide(of_written)
    of_beta[...] = (missed * written).sum(axis=1)
    of_value[...] = (strength * written).astype(of_value.dtype)
    erased = (-strength * written).astype(dtype)
    written = (strength * missed).astype(dtype)
    of_queries, fades = of_pairs(change[...], written, wide(scores), sums)
    pairs = dot(key[...], key[...], BY_LAST) * weights(sums, 1)
    of_keys, more = of_pairs(erased, written, pairs, sums, since=1)
    block = min(BLOCK, query.shape[1])

    def part(i, fades):
        at = pl.ds(i * block, block)
        asking, keys, state = query.at[:, at], key.at[:, at], before.at[at, :]
        found, read = of_reading(asking, keys, change[...], of_queries, sums, state)
        of_query[:, at] = found.astype(of_query.dtype)
        whole = dot(of_queries, asking[...], TRANSPOSED)
        found, erases = of_reading(keys, keys, erased, of_keys, sums, state)
        whole += found + dot(of_keys, keys[...], TRANSPOSED)
        found, joins = of_writing(keys, written, sums, state, after.at[at, :])
        of_key[:, at] = (whole + found).astype(of_key.dtype)
        return fades + read + erases + joins

    of_decay[...] = jax.lax.fori_loop(0, query.shape[1] // block, part, fades + more)
