"""States of gated linear attention on NVIDIA GPUs, with decays per head or per channel.

`decaying_states` is the sequential part: the state before each chunk, and in reverse
time the gradient of the state after each chunk. A program holds one block of a head's
state in registers, `BLOCK` rows and columns at most, and visits the chunks in order. It
writes the state that it finds before it adds a chunk.

`forward_by` computes the output: states first, then all chunks in parallel.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from symjax.attention.kernels.gpu.chunks import (
    CHUNK,
    TRANSPOSED,
    all_scalars,
    all_states,
    all_tokens,
    blocks_of_state,
    call_kernel,
    dot,
    pair_block,
    state_block,
    token_block,
)


def decaying_states(
    x: Float[Array, "B T N H"],
    y: Float[Array, "B T N V"],
    sums: Float[Array, "B T K H"] | Float[Array, "B K T"],
    reverse: bool,
    interpret: Any,
) -> Float[Array, "B N chunks H V"]:
    """Return the state before each chunk, of keys x and values y.

    Args:
        sums: of the decays in each chunk, by `chunks.decay_sums`.
        reverse: return the gradient of the state after each chunk instead, of queries x
            and the output's gradient y.
    """
    batch, length, heads, head_size = x.shape
    by_head, width = sums.ndim == 3, y.shape[3]
    group = heads // sums.shape[1 if by_head else 2]
    h, v, row, column = blocks_of_state(x, y)
    count = length // CHUNK

    def kernel(x_ref, y_ref, sums_ref, out_ref):
        def add_chunk(i, state):
            i = count - 1 - i if reverse else i
            out_ref[i] = state.astype(out_ref.dtype)
            here, end = pl.ds(i * CHUNK, CHUNK), i * CHUNK + CHUNK - 1
            if by_head:
                since, last = sums_ref[here], sums_ref[end]
                fade = jnp.exp2(since if reverse else last - since)[:, None]
                through = jnp.exp2(last)
            else:
                since, last = sums_ref[here, :], sums_ref[end, :]
                fade = jnp.exp2(since if reverse else last[None, :] - since)
                through = jnp.exp2(last)[:, None]
            faded = (x_ref[here, :].astype(jnp.float32) * fade).astype(y_ref.dtype)
            return state * through + dot(faded, y_ref[here, :], TRANSPOSED)

        jax.lax.fori_loop(0, count, add_chunk, jnp.zeros((h, v), jnp.float32))

    kernel.__name__ = "decaying_states_back" if reverse else "decaying_states"
    sums_block = all_tokens(length, h, group, row)
    if by_head:
        sums_block = all_scalars(length, group)
    shape = batch, heads, count, head_size, width
    (states,) = call_kernel(
        kernel,
        ((head_size // h) * (width // v), heads, batch),
        [
            (all_tokens(length, h, 1, row), x),
            (all_tokens(length, v, 1, column), y),
            (sums_block, sums),
        ],
        [(all_states(count, h, v, row, column), shape, y.dtype)],
        warps=4,
        stages=3,
        interpret=interpret,
    )
    return states


def forward_by(
    kernel: Callable,
    interpret: Any,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    sums: Float[Array, "B T K H"] | Float[Array, "B K T"],
    sums_block: Any,
) -> tuple[Array, Array, Array]:
    """Return the output, the state before each chunk, and the scores of its pairs.

    Args:
        kernel: (query, key, value, sums, state, output, scores) → None, which writes
            the output and the scores of one chunk.
        sums_block: the block of the decays' sums that the kernel reads.
    """
    batch, length, heads, size = query.shape
    width, group = value.shape[3], heads // key.shape[2]
    before = decaying_states(key, value, sums, False, interpret)
    output, scores = call_kernel(
        kernel,
        (length // CHUNK, heads, batch),
        [
            (token_block(size), query),
            (token_block(size, group), key),
            (token_block(width, group), value),
            (sums_block, sums),
            (state_block(size, width, group), before),
        ],
        [
            (token_block(width), (batch, length, heads, width), value.dtype),
            (pair_block(), (batch, heads, length, CHUNK), value.dtype),
        ],
        warps=4,
        interpret=interpret,
    )
    return output, before, scores
