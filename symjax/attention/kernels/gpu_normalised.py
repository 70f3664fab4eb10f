"""What kernels of linear attention with a denominator share on NVIDIA GPUs: numbers of
TF32, tokens in whole chunks and which see each other, and blocks of states.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from symjax.attention.chunks import Tokens
from symjax.attention.kernels.gpu_chunks import BLOCK, CHUNK, SIZES, filled, iota
from symjax.attention.kernels.seen import Shown
from symjax.attention.meshes import vary_alike
from symjax.attention.segments import starts


def rounded(x: Array) -> Array:
    """To the nearest number of TF32: tensor cores may cut off the bits that they do not
    take, and what is cut off alike of all that a sum adds up stays in it."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    found = jax.lax.bitcast_convert_type((bits + 0x1000) & -0x2000, jnp.float32)
    return jnp.where(x == x, found, x)  # the bits of a NaN may all be 1


def whole_blocks(size: int) -> int:
    """So many features at least that blocks divide them."""
    block = min(BLOCK, max(SIZES[0], 1 << (size - 1).bit_length()))
    return -(-size // block) * block


def in_blocks(x: Float[Array, "B T N M"], nothing: float) -> Array:
    missing = [(0, 0)] * 3 + [(0, whole_blocks(x.shape[3]) - x.shape[3])]
    return jnp.pad(x, missing, constant_values=nothing)


class Ids(NamedTuple):
    """Numbers of segments, those of hidden keys −1."""

    query: Int[Array, "B T"]
    key: Int[Array, "B T"]

    @classmethod
    def of(cls, tokens: Tokens) -> tuple[Array, Array, Array, "Ids"]:
        """Query, key and value, 0 where hidden, and their numbers, in whole chunks."""
        query, key, value, visible, segment = Shown.of(tokens)
        if visible is None:
            visible = jnp.ones(query.shape[:2], bool)
        if segment is None:
            segment = jnp.zeros(query.shape[:2], jnp.int32)
        query, key, value, visible = map(filled, (query, key, value, visible))
        # In the last segment: no other one continues behind the rows.
        missing = [(0, 0), (0, visible.shape[1] - segment.shape[1])]
        segment = jnp.pad(segment, missing, mode="edge")
        ids = cls(segment, jnp.where(visible, segment, -1))
        return vary_alike((query, key, value, ids))

    def operands(self) -> list[tuple[Any, Array]]:
        spec = pl.BlockSpec((None, self.key.shape[1]), lambda i, n, b: (b, 0))
        return [(spec, x) for x in self]


def mean_weights(query: Float[Array, "B T N M"], ids: Ids) -> Float[Array, "B T N M"]:
    """Divide the features of each query by the number of keys that it sees.

    The divisor cancels in the output. It makes the denominator of a row its mean weight
    instead of a sum, which can be compared with the rounding error of one weight.
    """
    visible = ids.key >= 0
    count = jnp.cumsum(visible, axis=1)
    before = jnp.where(starts(ids.query), count - visible, 0)
    count -= jax.lax.cummax(before, axis=1)
    return query / jnp.maximum(count, 1).astype(query.dtype)[..., None, None]


def all_sums(count: int, size: int, shared: int, row: Any, column: Any) -> Any:
    """[chunks M] of [B heads blocks chunks M]."""
    return pl.BlockSpec(
        (None, None, None, count, size),
        lambda i, n, b: (b, n // shared, column(i), 0, row(i)),
    )


def of_chunk(size: int, shared: int = 1, later: int = 0) -> Any:
    """[M] of [B heads blocks chunks M], of the chunk so many `later`."""
    return pl.BlockSpec(
        (None, None, None, None, size),
        lambda i, n, b: (b, n // shared, 0, i + later, 0),
    )


def seen_in_chunk(segment: Any, shown: Any) -> tuple[Array, Array, Array, Array]:
    """Of a chunk: the pairs that see each other [CHUNK CHUNK], the rows that the state
    before reaches and the tokens that join the one after [CHUNK 1], and whether any row
    is reached. What is not may be NaN, and is not even multiplied by 0."""
    first = pl.program_id(0) * CHUNK
    here = pl.ds(first, CHUNK)
    row, column = segment[here], shown[here]
    pairs = (iota(0) >= iota(1)) & (row[:, None] == column[None, :])
    before, last = segment[jnp.maximum(first - 1, 0)], segment[first + CHUNK - 1]
    continues = segment[first] == before
    return pairs, (row == before)[:, None], (column == last)[:, None], continues
