"""The delta rule, with a decay for each head or each channel, on NVIDIA GPUs.

Let P be the products of a chunk's keys with earlier keys of the chunk, times the decay
between the two tokens. Let S be the state before the chunk, and X = v − k S, where k is
multiplied by the decay from the start of the chunk. The error w_t of token t is its
value minus what its key reads from the state before the token. The token writes
u_t = β_t w_t:

    w + P β w = X,   so that   w = X − R β X   with the resolvent   R = P (I + β P)⁻¹

The resolvent of a block of 2, 4 … 64 tokens is computed from those of its halves: with
R the resolvents of the halves and C the pairs of P between the halves, it is
R + (I − R β) C (I − β R). If keys are nearly equal, R β X cancels most of X. So these
products keep 16 bits (`_precise_dot`).

Forward has three kernels:

- `_resolve`: a program computes the resolvent of one chunk of one key head;
- `_pass_forward`: a program holds all rows and `COLUMNS` columns of a key head's state
  in registers, visits the chunks in order, and writes the state before each chunk and
  the errors of its tokens;
- `_forward_chunk`: a program computes the output of one chunk of one query head, as in
  gated linear attention with the values u.

Backward starts with the pass in reverse time, `_pass_backward`. With d the gradient of
u through the outputs of the chunk and the state after the chunk, the gradient of u is
r = d − Rᵀ β d.
Then all chunks run in parallel (`delta_gradients`). The backward pass reads states,
errors, scores and resolvents as the forward pass stored them. It recomputes the decays
and the products of keys.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from symjax.attention.core.bfloat16_parts import in_parts
from symjax.attention.kernels.gpu import gated, gated_channels
from symjax.attention.kernels.gpu.chunks import (
    CHUNK,
    TRANSPOSED,
    all_pairs,
    all_scalars,
    all_states,
    all_tokens,
    call_kernel,
    decay_sums,
    dot,
    first_block,
    iota,
    pair_block,
    same_block,
    scalar_block,
    state_block,
    token_block,
)
from symjax.attention.kernels.gpu.delta_gradients import gradients
from symjax.attention.kernels.gpu.gated_channels import LEVELS

# Columns of the state in a program of a state pass: few, so that there are enough
# programs.
COLUMNS = 32


def forward(
    interpret: Any,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    log_decay: Float[Array, "B T K *H"],
    beta: Float[Array, "B T K"],
) -> tuple[Array, ...]:
    """Return the output and the residuals.

    Returns:
        output: [B T N V].
        before: [B K chunks H V], the state before each chunk.
        errors: [B T K V], the error of each token.
        scores: [B N T CHUNK], of the pairs of a chunk.
        resolvent: [B K T CHUNK].
    """
    batch, length, heads, size = query.shape
    key_heads, width = value.shape[2:]
    count, dtype, group = length // CHUNK, value.dtype, heads // key_heads
    sums, (sums_block, all_sums) = _sums(log_decay), _sums_blocks(log_decay, 1)
    beta = jnp.swapaxes(beta, 1, 2)
    (resolvent,) = call_kernel(
        _resolve,
        (count, key_heads, batch),
        [(token_block(size), key), (sums_block, sums), (scalar_block(), beta)],
        [(pair_block(), (batch, key_heads, length, CHUNK), jnp.float32)],
        warps=4,
        interpret=interpret,
    )
    v = min(COLUMNS, width)
    before, errors = call_kernel(
        _pass_forward,
        (width // v, key_heads, batch),
        [
            (all_tokens(length, size, 1, first_block), key),
            (all_tokens(length, v, 1, same_block), value),
            (all_sums, sums),
            (all_scalars(length, 1), beta),
            (all_pairs(length, 1), resolvent),
        ],
        [
            _state_columns(batch, count, key_heads, size, width, v, dtype),
            (all_tokens(length, v, 1, same_block), value.shape, dtype),
        ],
        warps=4,
        stages=_stages(log_decay),
        interpret=interpret,
    )
    output, scores = call_kernel(
        _forward_chunk,
        (count, heads, batch),
        [
            (token_block(size), query),
            (token_block(size, group), key),
            (token_block(width, group), errors),
            (_sums_blocks(log_decay, group)[0], sums),
            (scalar_block(group), beta),
            (state_block(size, width, group), before),
        ],
        [
            (token_block(width), (batch, length, heads, width), dtype),
            (pair_block(), (batch, heads, length, CHUNK), dtype),
        ],
        warps=4,
        interpret=interpret,
    )
    return output, before, errors, scores, resolvent


def _sums(
    log_decay: Float[Array, "B T K *H"],
) -> Float[Array, "B T K H"] | Float[Array, "B K T"]:
    sums = decay_sums(log_decay)
    return jnp.swapaxes(sums, 1, 2) if sums.ndim == 3 else sums


def _sums_blocks(log_decay: Float[Array, "B T K *H"], group: int) -> tuple[Any, Any]:
    """Return the blocks of `_sums` of one chunk and of all time."""
    length = log_decay.shape[1]
    if log_decay.ndim == 3:
        return scalar_block(group), all_scalars(length, group)
    size = log_decay.shape[3]
    return token_block(size, group), all_tokens(length, size, group, first_block)


def _stages(log_decay: Float[Array, "B T K *H"]) -> int:
    """Return the number of chunks in shared memory at once.

    Two chunks with decays per channel would not fit the 99 KiB of smaller GPUs.
    """
    return 2 if log_decay.ndim == 3 else 1


def _state_columns(
    batch: int, count: int, heads: int, size: int, width: int, v: int, dtype: Any
) -> tuple:
    """Return the entry for states in the `results` of `call_kernel`.

    A program writes all rows and v columns of a state.
    """
    block = all_states(count, size, v, first_block, same_block)
    return block, (batch, heads, count, size, width), dtype


def _resolve(key, sums, beta, resolvent):
    """Write the resolvent of a chunk, from blocks of 2 tokens to all 64."""
    pairs = _gated(sums).pair_scores(key, key, sums)
    differing, strength = iota(0) ^ iota(1), beta[...][None, :]
    found = jnp.where(differing == 1, pairs, 0.0)

    def double(level, found):
        corner = jnp.where(differing >> level == 1, pairs, 0.0)
        corner -= _precise_dot(corner * strength, found)
        return found + corner - _precise_dot(found * strength, corner)

    found = jax.lax.fori_loop(1, LEVELS, double, found)
    resolvent[...] = found


def _gated(sums: Any) -> Any:
    """Return the module for these decays, per head or per channel."""
    return gated_channels if _by_channel(sums) else gated


def _by_channel(sums: Any) -> bool:
    return len(sums.shape) == 2


def _precise_dot(
    left: Float[Array, "CHUNK CHUNK"],
    right: Float[Array, "CHUNK _"],
    contract: tuple = ((1,), (0,)),
) -> Float[Array, "CHUNK _"]:
    """Multiply float32 arrays with 16 of their 24 bits: three products of bfloat16."""
    (left_high, left_low), (right_high, right_low) = (
        in_parts(x, 2) for x in (left, right)
    )
    found = dot(left_high, right_low, contract) + dot(left_low, right_high, contract)
    return found + dot(left_high, right_high, contract)


def _pass_forward(key, value, sums, beta, resolvent, before, errors):
    """Write the state before each chunk and the errors of its tokens."""
    dtype = value.dtype

    def add_chunk(i, state):
        here, since, until, through, strength = _load_chunk(i, sums, beta)
        keys, rounded = key[here, :], state.astype(dtype)
        before[i] = rounded
        found = value[here, :].astype(jnp.float32) - dot(_times(keys, since), rounded)
        found -= _precise_dot(resolvent[here, :], strength * found)
        errors[here, :] = found.astype(dtype)
        written = (strength * found).astype(dtype)
        return state * through + dot(_times(keys, until), written, TRANSPOSED)

    state = jnp.zeros((key.shape[1], value.shape[1]), jnp.float32)
    jax.lax.fori_loop(0, before.shape[0], add_chunk, state)


def _load_chunk(i: Any, sums: Any, beta: Any) -> tuple[Any, Array, Array, Array, Array]:
    """Return the slice of time of chunk i, its three decays, and β [CHUNK 1].

    The decays are from the start of the chunk through each token, from each token to
    the end of the chunk, and from the start to the end.
    """
    here, end = pl.ds(i * CHUNK, CHUNK), i * CHUNK + CHUNK - 1
    if _by_channel(sums):
        since, last = sums[here, :], sums[end, :]
        until, through = last[None, :] - since, last[:, None]
    else:
        since, last = sums[here][:, None], sums[end]
        until, through = last - since, last
    since, until, through = map(jnp.exp2, (since, until, through))
    return here, since, until, through, beta[here][:, None]


def _times(x: Array, factor: Array) -> Array:
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def _forward_chunk(query, key, errors, sums, beta, before, output, stored_scores):
    written = _times(errors[...], beta[...][:, None])
    write = _gated(sums).write_output
    write(query, key, written, sums, before, output, stored_scores)


def backward(
    interpret: Any,
    operands: Sequence[Array],
    residuals: Sequence[Array],
    output_gradient: Float[Array, "B T N V"],
) -> tuple[Array, ...]:
    """Return the gradients of the operands of `forward`, one for each query head.

    Args:
        residuals: the other results of `forward`.
    """
    query, key, value, log_decay, beta = operands
    before, errors, scores, resolvent = residuals
    batch, length, heads, size = query.shape
    width, group = value.shape[3], heads // key.shape[2]
    dtype = value.dtype
    sums, (_, all_sums) = _sums(log_decay), _sums_blocks(log_decay, group)
    beta = jnp.swapaxes(beta, 1, 2)
    v = min(COLUMNS, width)
    after, written_gradient = call_kernel(
        _pass_backward,
        (width // v, heads, batch),
        [
            (all_tokens(length, size, 1, first_block), query),
            (all_tokens(length, size, group, first_block), key),
            (all_sums, sums),
            (all_scalars(length, group), beta),
            (all_tokens(length, v, 1, same_block), output_gradient),
            (all_pairs(length, 1), scores),
            (all_pairs(length, group), resolvent),
        ],
        [
            _state_columns(batch, length // CHUNK, heads, size, width, v, dtype),
            (all_tokens(length, v, 1, same_block), output_gradient.shape, dtype),
        ],
        warps=4,
        stages=_stages(log_decay),
        interpret=interpret,
    )
    return gradients(
        interpret,
        *(query, key, errors, sums, beta, output_gradient, written_gradient),
        *(before, after, scores),
    )


def _pass_backward(
    query, key, sums, beta, output_gradient, scores, resolvent, after, written_gradient
):  # fmt: skip
    """Write the gradients of the state after each chunk and of what tokens write."""
    dtype = output_gradient.dtype

    def add_chunk(i, state):
        i = after.shape[0] - 1 - i
        here, since, until, through, strength = _load_chunk(i, sums, beta)
        keys, rows = key[here, :], output_gradient[here, :]
        rounded = state.astype(dtype)
        after[i] = rounded
        found = dot(_times(keys, until), rounded)
        found += dot(scores[here, :], rows, TRANSPOSED)
        found -= _precise_dot(resolvent[here, :], strength * found, TRANSPOSED)
        written_gradient[here, :] = found.astype(dtype)
        erased = (strength * found).astype(dtype)
        state *= through
        state += dot(_times(query[here, :], since), rows, TRANSPOSED)
        return state - dot(_times(keys, since), erased, TRANSPOSED)

    state = jnp.zeros((key.shape[1], output_gradient.shape[1]), jnp.float32)
    jax.lax.fori_loop(0, after.shape[0], add_chunk, state)
