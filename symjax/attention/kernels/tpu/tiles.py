"""Tiles, products and column vectors that the TPU kernels share."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Shaped

from symjax.attention.core.bfloat16_parts import in_parts

LANES = 128
MOST_RESIDENT = 2**24  # most bytes of a block in VMEM, which holds two such buffers
LOG2E = 1.4426950408889634
PLAIN = (((1,), (0,)), ((), ()))  # a b
ACROSS = (((1,), (1,)), ((), ()))  # a bᵀ
TURNED = (((0,), (0,)), ((), ()))  # aᵀ b


def equal_block(length: int, limit: int, unit: int = LANES) -> int:
    """Return the size of equal blocks: a multiple of `unit`, at most about `limit`."""
    return -(-length // (-(-length // limit) * unit)) * unit


def head_blocks(width: int, size: int, index: Callable) -> pl.BlockSpec:
    """Return the blocks of an array [B T heads·width]."""

    def place(*at):
        example, head, block = index(*at)
        return example, block, head

    return pl.BlockSpec((None, size, width), place)


def estimate(flops: int, transcendentals: int, arrays: list[Any]) -> pl.CostEstimate:
    """Return the cost of a kernel that reads or writes every byte of `arrays` once."""
    return pl.CostEstimate(
        flops=flops,
        transcendentals=transcendentals,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays)),
    )


def compiler(parallel: int, sequential: int = 0) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=("parallel",) * parallel + ("arbitrary",) * sequential,
        vmem_limit_bytes=100 * 2**20,
    )


def product(a: Array, b: Array, dimensions: tuple) -> Float[Array, "_ _"]:
    """Return a product in float32; float32 arrays keep all their bits."""
    exact = jnp.float32 in (a.dtype, b.dtype)
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def product_in_parts(a: Array, b: Array, dimensions: tuple) -> Float[Array, "_ _"]:
    """Return a product in float32 that keeps 16 of the 24 bits of float32 arrays.

    A float32 array is split into two bfloat16 parts. The product takes three MXU passes
    if both arrays are float32, two if one of them is, and one if none is.
    """
    parts = [in_parts(x, 2) if x.dtype == jnp.float32 else [x] for x in (a, b)]
    terms = [
        product(x, y, dimensions)
        for i, x in enumerate(parts[0])
        for j, y in enumerate(parts[1])
        if i + j < 2  # the product of both small parts is below the rounding error
    ]
    return reduce(jnp.add, reversed(terms))


def product_for(dtype: Any) -> Callable[..., Array]:
    """Return the product for float32 arrays that are made of operands of a dtype."""
    return product if dtype == jnp.float32 else product_in_parts


def mxu_passes(dtype: Any) -> int:
    """Return how many bfloat16 products on the MXU one product of a dtype takes."""
    return 6 if dtype == jnp.float32 else 1


def _diagonal() -> Bool[Array, "128 128"]:
    rows, columns = (
        jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), x) for x in (0, 1)
    )
    return rows == columns


def column(row: Shaped[Array, "1 r"]) -> Shaped[Array, "r 1"]:
    """Return a row as a column. Summing diagonals costs a tenth of a reshape."""
    pieces = [
        jnp.where(_diagonal(), row[:, x : x + LANES], 0).sum(axis=1, keepdims=True)
        for x in range(0, row.shape[1], LANES)
    ]
    return jnp.concatenate(pieces, axis=0)


def row(column: Float[Array, "r _"]) -> Float[Array, "1 r"]:
    """Return a column as a row. The column may be 128 equal columns."""
    equal = jnp.broadcast_to(column, (column.shape[0], LANES))
    pieces = [
        jnp.where(_diagonal(), equal[x : x + LANES], 0).sum(axis=0, keepdims=True)
        for x in range(0, column.shape[0], LANES)
    ]
    return jnp.concatenate(pieces, axis=1)


def write_row(rows, i: int, column: Float[Array, "r _"]) -> None:
    """Write a column, or the first of 128 equal columns, to row i of a block."""
    rows[i : i + 1, :] = row(column)
