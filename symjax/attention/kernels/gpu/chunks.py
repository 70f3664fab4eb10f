"""Parts that the recurrent kernels for NVIDIA GPUs share, in Pallas' Triton backend.

Time is cut into chunks of `CHUNK` tokens. There are two kinds of kernels:

- state passes (`decaying_states`, `states`, `delta`): a program holds one block of a
  head's state in registers and visits the chunks one after the other;
- chunk kernels (`gated`, `gated_channels`, `delta`, `delta_gradients`, `features`): a
  program computes one chunk of one head, so all chunks run in parallel. Most read the
  state before the chunk and, for gradients, the gradient of the state after the chunk.

This file has the products and casts inside kernels, the call of a kernel, and the
`BlockSpec`s of the blocks that one program reads or writes. `group` is the number of
query heads that share a key head.

jax 0.11 deprecates the Triton backend in favour of Mosaic GPU. Triton compiles on all
versions of jax that this project allows, and it assigns registers by itself.
docs/performance/gpu.md says what replaces each kernel.

`decaying_states` is the state pass of gated linear attention, with decays per head or
per channel. It computes the state before each chunk, and in reverse time the gradient
of the state after each chunk. Its blocks have `BLOCK` rows and columns at most.
`forward_by` computes the output: states first, then all chunks in parallel.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from symjax.attention.core.meshes import vary_alike
from symjax.attention.core.operands import Tokens
from symjax.attention.kernels.operands import result

CHUNK = 64  # tokens
# The least log₂ of a token's decay: 2^−150 is 0 in float32. With a lower limit the sums
# could grow so large that the rounding error of their differences exceeds that of
# bfloat16. With −∞ the differences would be NaN.
LOWEST = -150.0
SIZES = 16, 32, 64, 128  # head sizes of keys and values
BLOCK = 64  # rows and columns of a state that a program holds, at most
TRANSPOSED = (0,), (0,)  # contracted axes of leftᵀ @ right, for `dot`
BY_LAST = (1,), (1,)  # contracted axes of left @ rightᵀ


def dot(left: Array, right: Array, contract: tuple = ((1,), (0,))) -> Array:
    """Multiply on tensor cores, in bfloat16 or TF32, and add up in float32.

    `jax.default_matmul_precision` has no influence.
    """
    return jax.lax.dot_general(
        left,
        right,
        (contract, ((), ())),
        precision=jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def unsupported_values(tokens: Tokens, keys: bool = False) -> str | None:
    """Return why no kernel of this kind supports these arrays; None if one may.

    Args:
        keys: whether the head size of keys has to be in `SIZES`, too.
    """
    dtypes = {x.dtype.name for x in tokens[:3]}
    if dtypes != {"bfloat16"}:
        return f"it takes bfloat16, got {', '.join(sorted(dtypes))}"
    for name in ("key", "value")[not keys :]:
        if (size := getattr(tokens, name).shape[3]) not in SIZES:
            return f"it takes a {name} of {SIZES} dimensions, got {size}"
    return None


def pad_to_chunks(x: Array) -> Array:
    """Pad the time axis (1) with zeros to a multiple of `CHUNK`."""
    missing = -x.shape[1] % CHUNK
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))


def iota(axis: int) -> Array:
    """Return [CHUNK CHUNK], the index of each pair of a chunk along an axis."""
    return jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis)


def load_float32(ref: Any) -> Array:
    return ref[...].astype(jnp.float32)


def call_kernel(
    kernel: Callable,
    grid: tuple,
    operands: list[tuple[Any, Array]],
    results: list[tuple[Any, tuple, Any]],
    *,
    warps: int,
    stages: int = 1,
    interpret: Any,
) -> list[Array]:
    """Run the kernel on each cell of the grid and return the arrays that it writes.

    Args:
        operands: the block that a program reads of each array, and the array.
        results: the block that a program writes, the shape and the dtype of each array.
        stages: number of iterations of a loop whose operands are in shared memory at
            the same time.
    """
    arrays = vary_alike([x for _, x in operands])
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[spec for spec, _ in operands],
        out_specs=[spec for spec, *_ in results],
        out_shape=[result(arrays[0], *shape) for _, *shape in results],
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
    )(*arrays)


def gradient_dtype(like: Array, group: int) -> Any:
    """Return the dtype of `like`, or float32 if query heads are added up later."""
    return like.dtype if group == 1 else jnp.float32


def sum_query_heads(
    x: Float[Array, "B T N *H"], like: Float[Array, "B T K *H"]
) -> Array:
    """Add up the gradients of the query heads that share a key head."""
    by_group = x.reshape(*like.shape[:3], -1, *like.shape[3:])
    return by_group.sum(axis=3).astype(like.dtype)


# Blocks of chunk kernels: the grid is (blocks · chunks, query heads, examples), with
# `blocks` blocks of a head's channels for each chunk.


def token_block(size: int, group: int = 1, blocks: int = 1, split: bool = False) -> Any:
    """Return the block [CHUNK size] of an array [B T heads …].

    Args:
        split: whether `size` is one of the blocks of a head, not the whole head.
    """
    return pl.BlockSpec(
        (None, CHUNK, None, size),
        lambda i, n, b: (b, i // blocks, n // group, i % blocks if split else 0),
    )


def scalar_block(group: int = 1) -> Any:
    """Return the block [CHUNK] of an array [B heads T]."""
    return pl.BlockSpec((None, None, CHUNK), lambda i, n, b: (b, n // group, i))


def state_block(size: int, width: int, group: int = 1, blocks: int = 1) -> Any:
    """Return the block [size width] of [B heads chunks H V], one of the blocks of H."""
    return pl.BlockSpec(
        (None, None, None, size, width),
        lambda i, n, b: (b, n // group, i // blocks, i % blocks, 0),
    )


def pair_block(group: int = 1, blocks: int = 1) -> Any:
    """Return the block [CHUNK CHUNK] of an array [B heads T CHUNK]."""
    return pl.BlockSpec(
        (None, None, CHUNK, CHUNK), lambda i, n, b: (b, n // group, i // blocks, 0)
    )


# Blocks of state passes: a program reads all of time. The grid is (blocks of a state,
# heads, examples). `row` and `column` map its first index to a block of H and of V.


def first_block(i: Any) -> int:
    return 0


def same_block(i: Any) -> Any:
    return i


def all_tokens(length: int, size: int, group: int, block: Callable) -> Any:
    """Return the block [T size] of an array [B T heads …]."""
    return pl.BlockSpec(
        (None, length, None, size), lambda i, n, b: (b, 0, n // group, block(i))
    )


def all_scalars(length: int, group: int) -> Any:
    """Return the block [T] of an array [B heads T]."""
    return pl.BlockSpec((None, None, length), lambda i, n, b: (b, n // group, 0))


def all_pairs(length: int, group: int) -> Any:
    """Return the block [T CHUNK] of an array [B heads T CHUNK]."""
    return pl.BlockSpec(
        (None, None, length, CHUNK), lambda i, n, b: (b, n // group, 0, 0)
    )


def all_states(
    count: int, size: int, width: int, row: Callable, column: Callable
) -> Any:
    """Return the block [chunks size width] of an array [B N chunks H V]."""
    return pl.BlockSpec(
        (None, None, count, size, width), lambda i, n, b: (b, n, 0, row(i), column(i))
    )


def blocks_of_state(x: Array, y: Array) -> tuple[int, int, Callable, Callable]:
    """Return (rows, columns, row, column) of the blocks of a state.

    The state is that of keys x and values y. `row` and `column` map a program's first
    index to the numbers of its block.
    """
    m, v = min(BLOCK, x.shape[3]), min(BLOCK, y.shape[3])
    columns = y.shape[3] // v
    return m, v, lambda i: i // columns, lambda i: i % columns


def decay_sums(log_decay: Float[Array, "B T K *H"]) -> Float[Array, "B T K *H"]:
    """Add up the log₂ of decays in each chunk, from its first token through each token.

    exp2 of the difference of two tokens' sums is the decay from one to the other.
    """
    # If all tokens share a constant decay, XLA would compute these sums while it
    # compiles, which takes a minute. The barrier prevents that.
    decay = jax.lax.optimization_barrier(log_decay)
    decay = jnp.maximum(decay / math.log(2), LOWEST)
    chunks = decay.reshape(decay.shape[0], -1, CHUNK, *decay.shape[2:])
    return jax.lax.cumsum(chunks, axis=2).reshape(decay.shape)


def decaying_states(
    x: Float[Array, "B T N H"],
    y: Float[Array, "B T N V"],
    sums: Float[Array, "B T K H"] | Float[Array, "B K T"],
    reverse: bool,
    interpret: Any,
) -> Float[Array, "B N chunks H V"]:
    """Return the state before each chunk, for keys x and values y.

    Args:
        sums: what `decay_sums` returns; with a decay per head, transposed.
        reverse: whether to return the gradient of the state after each chunk instead,
            for queries x and the output's gradient y.
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
