"""What kernels of decaying states share on NVIDIA GPUs, in Pallas' Triton backend.

A program has one chunk of time, `CHUNK` tokens, of one head. Decays come as sums in
log₂ of each chunk, from its first token through each token. Each decay counts as
2^LOWEST at least, which is 0 in float32: no sum is so large that a difference of two
loses digits that bfloat16 has, and −∞ forgets all.

jax 0.11 calls this backend deprecated: Mosaic GPU is to take its place. It compiles on
all versions that this project allows, and needs no layout of registers by hand.
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

CHUNK = 64
LOWEST = -150.0
SIZES = 16, 32, 64, 128  # of heads and values
BLOCK = 64  # channels, and numbers of a value, of a state that a program holds
TRANSPOSED = (0,), (0,)  # what is contracted, for `dot`
BY_LAST = (1,), (1,)


def dot(one: Array, two: Array, contract: tuple = ((1,), (0,))) -> Array:
    """A product of tensor cores, of bfloat16 or TF32, added up in float32, whatever
    `jax.default_matmul_precision` says."""
    return jax.lax.dot_general(
        one,
        two,
        (contract, ((), ())),
        precision=jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def unsupported_values(tokens: Tokens, keys: bool = False) -> str | None:
    """Return why no kernel here supports these arrays; None if one may.

    Args:
        keys: whether heads of keys have to be of one of `SIZES` too.
    """
    dtypes = {x.dtype.name for x in tokens[:3]}
    if dtypes != {"bfloat16"}:
        return f"it takes bfloat16, got {', '.join(sorted(dtypes))}"
    for name in ("key", "value")[not keys :]:
        if (size := getattr(tokens, name).shape[3]) not in SIZES:
            return f"it takes a {name} of {SIZES} numbers, got {size}"
    return None


def filled(x: Array) -> Array:
    """With zeros for tokens up to a multiple of `CHUNK`."""
    missing = -x.shape[1] % CHUNK
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))


def iota(axis: int) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis)


def wide(ref: Any) -> Array:
    return ref[...].astype(jnp.float32)


def call(
    kernel: Callable,
    grid: tuple,
    operands: list[tuple[Any, Array]],
    results: list[tuple[Any, tuple, Any]],
    *,
    warps: int,
    stages: int = 1,
    interpret: Any,
) -> list[Array]:
    """What the kernel writes: `results` are its blocks, shapes and dtypes, `operands`
    the blocks that it reads, and arrays."""
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


def summed(like: Array, shared: int) -> Any:
    """The dtype of gradients that are added up over so many query heads."""
    return like.dtype if shared == 1 else jnp.float32


def of_key_heads(x: Float[Array, "B T N *H"], like: Float[Array, "B T K *H"]) -> Array:
    """A gradient of each query head, added up as that of what they share."""
    apart = x.reshape(*like.shape[:3], -1, *like.shape[3:])
    return apart.sum(axis=3).astype(like.dtype)


# Blocks of a grid of (parts · chunks, query heads, examples).


def token_block(size: int, shared: int = 1, parts: int = 1, split: bool = False) -> Any:
    """[CHUNK size] of [B T heads …], heads that `shared` query heads have in common.

    split: `size` is one of the parts of a head.
    """
    return pl.BlockSpec(
        (None, CHUNK, None, size),
        lambda i, n, b: (b, i // parts, n // shared, i % parts if split else 0),
    )


def number_block(shared: int = 1) -> Any:
    """[CHUNK] of [B heads T]."""
    return pl.BlockSpec((None, None, CHUNK), lambda i, n, b: (b, n // shared, i))


def state_block(size: int, width: int, shared: int = 1, parts: int = 1) -> Any:
    """[size width] of [B heads chunks H V], one of the parts of H."""
    return pl.BlockSpec(
        (None, None, None, size, width),
        lambda i, n, b: (b, n // shared, i // parts, i % parts, 0),
    )


def pair_block(shared: int = 1, parts: int = 1) -> Any:
    """[CHUNK CHUNK] of [B heads T CHUNK]."""
    return pl.BlockSpec(
        (None, None, CHUNK, CHUNK), lambda i, n, b: (b, n // shared, i // parts, 0)
    )


# Blocks of all of time, for programs that go from chunk to chunk.

Part = Callable[[Any], Any]  # of a head, by the first index of the grid


def first_part(i: Any) -> int:
    return 0


def own_part(i: Any) -> Any:
    return i


def all_tokens(length: int, size: int, shared: int, part: Part) -> Any:
    """[T size] of [B T heads …]."""
    return pl.BlockSpec(
        (None, length, None, size), lambda i, n, b: (b, 0, n // shared, part(i))
    )


def all_numbers(length: int, shared: int) -> Any:
    """[T] of [B heads T]."""
    return pl.BlockSpec((None, None, length), lambda i, n, b: (b, n // shared, 0))


def all_pairs(length: int, shared: int) -> Any:
    """[T CHUNK] of [B heads T CHUNK]."""
    return pl.BlockSpec(
        (None, None, length, CHUNK), lambda i, n, b: (b, n // shared, 0, 0)
    )


def all_states(count: int, size: int, width: int, part: Part, column: Part) -> Any:
    """[chunks size width] of [B N chunks H V]."""
    return pl.BlockSpec(
        (None, None, count, size, width), lambda i, n, b: (b, n, 0, part(i), column(i))
    )


def sums_of(log_decay: Float[Array, "B T K *H"]) -> Float[Array, "B T K *H"]:
    # The compiler would add up a decay that all tokens share itself, for a minute.
    decay = jax.lax.optimization_barrier(log_decay)
    decay = jnp.maximum(decay / math.log(2), LOWEST)
    chunks = decay.reshape(decay.shape[0], -1, CHUNK, *decay.shape[2:])
    return jax.lax.cumsum(chunks, axis=2).reshape(decay.shape)


def parts(x: Array, y: Array) -> tuple[int, int, Any, Any]:
    """Blocks of features and of values, and which of them a program has."""
    m, v = min(BLOCK, x.shape[3]), min(BLOCK, y.shape[3])
    columns = y.shape[3] // v
    return m, v, lambda i: i // columns, lambda i: i % columns


def decaying_states(
    x: Float[Array, "B T N H"],
    y: Float[Array, "B T N V"],
    sums: Float[Array, "B T K H"] | Float[Array, "B K T"],
    reverse: bool,
    interpret: Any,
) -> Float[Array, "B N chunks H V"]:
    """The state before each chunk, of keys x and values y; reverse: the gradient of the
    state after it, of queries x and the output's gradient y.

    Chunk after chunk, by programs for blocks of H and V.
    """
    batch, length, heads, head_size = x.shape
    by_head, width = sums.ndim == 3, y.shape[3]
    shared = heads // sums.shape[1 if by_head else 2]
    h, v, row, column = parts(x, y)
    count = length // CHUNK

    def kernel(x_ref, y_ref, sums_ref, out_ref):
        def step(i, state):
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

        jax.lax.fori_loop(0, count, step, jnp.zeros((h, v), jnp.float32))

    kernel.__name__ = "decaying_states_back" if reverse else "decaying_states"
    of_sums = all_tokens(length, h, shared, row)
    if by_head:
        of_sums = all_numbers(length, shared)
    shape = batch, heads, count, head_size, width
    (found,) = call(
        kernel,
        ((head_size // h) * (width // v), heads, batch),
        [
            (all_tokens(length, h, 1, row), x),
            (all_tokens(length, v, 1, column), y),
            (of_sums, sums),
        ],
        [(all_states(count, h, v, row, column), shape, y.dtype)],
        warps=4,
        stages=3,
        interpret=interpret,
    )
    return found


def rows_of(
    kernel: Callable,
    interpret: Any,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    sums: Float[Array, "B T K H"] | Float[Array, "B K T"],
    block: Any,
) -> tuple[Array, Array, Array]:
    """The output, the state before each chunk, and the scores of its pairs, by a kernel
    (query, key, value, sums, state, output, scores); block: of the sums."""
    batch, length, heads, size = query.shape
    width, shared = value.shape[3], heads // key.shape[2]
    before = decaying_states(key, value, sums, False, interpret)
    output, scores = call(
        kernel,
        (length // CHUNK, heads, batch),
        [
            (token_block(size), query),
            (token_block(size, shared), key),
            (token_block(width, shared), value),
            (block, sums),
            (state_block(size, width, shared), before),
        ],
        [
            (token_block(width), (batch, length, heads, width), value.dtype),
            (pair_block(), (batch, heads, length, CHUNK), value.dtype),
        ],
        warps=4,
        interpret=interpret,
    )
    return output, before, scores
