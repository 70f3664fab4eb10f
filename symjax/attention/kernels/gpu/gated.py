"""Gated linear attention with a decay for each head, on NVIDIA GPUs.

    S_t = exp(g_t) S_{t−1} + k_t v_tᵀ,   out_t = q_t S_t

`decaying_states` gives the state before each chunk, and in the backward pass the
gradient of the state after each chunk. The two kernels here run all chunks in parallel.
A program computes one chunk of one query head:

- forward (`_forward_chunk`): its rows of the output, from the state before the chunk
  and from the scores of its pairs. The scores are stored for the backward pass;
- backward (`_backward_chunk`): the gradients of its queries, keys, values and decays.

The backward pass recomputes the decays. It reads the states and the scores that the
forward pass stored, in the dtype of values.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.kernels.gpu.chunks import (
    BY_LAST,
    CHUNK,
    TRANSPOSED,
    call_kernel,
    decay_sums,
    decaying_states,
    dot,
    forward_by,
    gradient_dtype,
    iota,
    load_float32,
    pair_block,
    scalar_block,
    state_block,
    token_block,
)


def forward(
    interpret: Any,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    log_decay: Float[Array, "B T K"],
) -> tuple[Array, Array, Array]:
    """Return the output, the state before each chunk, and the scores of its pairs."""
    sums = jnp.swapaxes(decay_sums(log_decay), 1, 2)
    block = scalar_block(query.shape[2] // key.shape[2])
    return forward_by(_forward_chunk, interpret, query, key, value, sums, block)


def _forward_chunk(query, key, value, sums, before, output, stored_scores):
    write_output(query, key, value[...], sums, before, output, stored_scores)


def write_output(
    query, key, written: Array, sums, before, output, stored_scores
) -> None:
    """Write the output and the scores of a chunk.

    Args:
        written: [CHUNK V], what each token adds to the state at its key.
        before: the state before the chunk.
    """
    scores = pair_scores(query, key, sums)
    stored_scores[...] = scores.astype(written.dtype)
    from_state = dot(query[...], before[...]) * jnp.exp2(sums[...])[:, None]
    from_pairs = dot(scores.astype(written.dtype), written)
    output[...] = (from_state + from_pairs).astype(written.dtype)


def pair_scores(query: Any, key: Any, sums: Any) -> Float[Array, "CHUNK CHUNK"]:
    """Return q_t·k_s times the decay from s to t, and 0 where s is after t."""
    return dot(query[...], key[...], BY_LAST) * pair_decays(sums)


def pair_decays(sums: Any, distance: int = 0) -> Float[Array, "CHUNK CHUNK"]:
    """Return the decay from each earlier token [column] to each token [row].

    Pairs less than `distance` tokens apart are 0.
    """
    between = jnp.exp2(sums[...][:, None] - sums[...][None, :])
    return jnp.where(iota(0) - iota(1) >= distance, between, 0.0)


def decay_to_end(sums: Any) -> Float[Array, "CHUNK 1"]:
    """Return the decay from each token to the end of the chunk.

    Kernels recompute this decay at each use, which saves registers.
    """
    return jnp.exp2(sums[CHUNK - 1] - sums[...])[:, None]


def backward(
    interpret: Any,
    operands: Sequence[Array],
    residuals: Sequence[Array],
    output_gradient: Float[Array, "B T N V"],
) -> tuple[Array, Array, Array, Array]:
    """Return the gradients of the operands of `forward`, one for each query head.

    Args:
        residuals: the states and the scores that `forward` returned.
    """
    query, key, value, log_decay = operands
    before, scores = residuals
    batch, length, heads, size = query.shape
    width, group = value.shape[3], heads // key.shape[2]
    sums = jnp.swapaxes(decay_sums(log_decay), 1, 2)
    after = decaying_states(query, output_gradient, sums, True, interpret)
    dtype = gradient_dtype(value, group)
    query_gradient, key_gradient, value_gradient, decay_gradient = call_kernel(
        _backward_chunk,
        (length // CHUNK, heads, batch),
        [
            (token_block(size), query),
            (token_block(size, group), key),
            (token_block(width, group), value),
            (scalar_block(group), sums),
            (token_block(width), output_gradient),
            (state_block(size, width, group), before),
            (state_block(size, width), after),
            (pair_block(), scores),
        ],
        [
            (token_block(size), query.shape, query.dtype),
            (token_block(size), query.shape, dtype),
            (token_block(width), output_gradient.shape, dtype),
            (scalar_block(), (batch, heads, length), jnp.float32),
        ],
        warps=8,
        interpret=interpret,
    )
    decay_gradient = jnp.swapaxes(decay_gradient, 1, 2)
    return query_gradient, key_gradient, value_gradient, decay_gradient


def _backward_chunk(
    query, key, value, sums, output_gradient, before, after, scores,
    query_gradient, key_gradient, value_gradient, decay_gradient,
):  # fmt: skip
    """Write the gradients of a chunk.

    The gradient of a decay has a term for everything that the decay multiplies:

    - pairs of an earlier and a later token;
    - the state before the chunk, as queries read it, and as it remains after the chunk;
    - what keys add to the state after the chunk.

    Args:
        before, after: the state before the chunk; the gradient of the state after it.
    """
    found = dot(key[...], after[...]) * decay_to_end(sums)
    found += dot(scores[...], output_gradient[...], TRANSPOSED)
    value_gradient[...] = found.astype(value_gradient.dtype)
    rows, written = output_gradient[...], value[...]
    products, by_pairs = pair_gradients(rows, written, load_float32(scores), sums)
    found, by_reading = reading_gradients(query, key, rows, products, sums, before)
    query_gradient[...] = found.astype(query_gradient.dtype)
    found, by_writing = writing_gradients(key, written, sums, before, after)
    found += dot(products, query[...], TRANSPOSED)
    key_gradient[...] = found.astype(key_gradient.dtype)
    decay_gradient[...] = by_pairs + by_reading + by_writing


def pair_gradients(
    output_gradient: Float[Array, "CHUNK V"],
    written: Float[Array, "CHUNK V"],
    scores: Float[Array, "CHUNK CHUNK"],
    sums: Any,
    distance: int = 0,
) -> tuple[Float[Array, "CHUNK CHUNK"], Float[Array, " CHUNK"]]:
    """Return the gradients of products q_t·k_s, and those of decays by pairs of tokens.

    Args:
        distance: the least distance of a pair in tokens, as in `pair_decays`.
    """
    row, column = iota(0), iota(1)
    by_scores = dot(output_gradient, written, BY_LAST)
    by_fading = (by_scores * scores).astype(written.dtype)
    later = jnp.where(row <= column, 1.0, 0.0).astype(written.dtype)
    by_decays = jnp.where(column < row, dot(later, by_fading), 0.0).sum(axis=1)
    by_products = (by_scores * pair_decays(sums, distance)).astype(written.dtype)
    return by_products, by_decays


def reading_gradients(
    query: Any,
    key: Any,
    output_gradient: Float[Array, "CHUNK V"],
    products_gradient: Float[Array, "CHUNK CHUNK"],
    sums: Any,
    before: Any,
) -> tuple[Float[Array, "CHUNK H"], Float[Array, " CHUNK"]]:
    """Return the gradients of queries, and of decays by reading `before`."""
    found = dot(output_gradient, before[...], BY_LAST) * jnp.exp2(sums[...])[:, None]
    read = (found * load_float32(query)).sum(axis=1)
    by_decays = jnp.where(iota(0) <= iota(1), read[None, :], 0.0).sum(axis=1)
    return found + dot(products_gradient, key[...]), by_decays


def writing_gradients(
    key: Any,
    written: Float[Array, "CHUNK V"],
    sums: Any,
    before: Any,
    after: Any,
) -> tuple[Float[Array, "CHUNK H"], Float[Array, " CHUNK"]]:
    """Return the gradients of keys and decays by the state after the chunk.

    Args:
        before, after: the state before the chunk; the gradient of the state after it.
    """
    found = dot(written, after[...], BY_LAST) * decay_to_end(sums)
    joined = (found * load_float32(key)).sum(axis=1)
    by_decays = jnp.where(iota(0) > iota(1), joined[None, :], 0.0).sum(axis=1)
    through = (load_float32(before) * load_float32(after)).sum(axis=1).sum(axis=0)
    return found, by_decays + through * jnp.exp2(sums[CHUNK - 1])
