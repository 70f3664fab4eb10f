"""What the kernels share: a call's sizes, how arrays are cut, products and masks."""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

LANES = 128
LOG2E = 1.4426950408889634
PLAIN = (((1,), (0,)), ((), ()))  # a b
ACROSS = (((1,), (1,)), ((), ()))  # a bᵀ
TURNED = (((0,), (0,)), ((), ()))  # aᵀ b


class Sizes(NamedTuple):
    """Rows and keys at most of a block, forward and backward, and kept in VMEM.

    Forward blocks of 1024 rows × 512 keys keep the MXU of a v5e busy for 87 % of a
    step, 512 × 512 for 81 %; with two maps 512 × 512 has 85 %, backward 93–95 %.
    """

    rows: int = 1024
    keys: int = 512
    resident_keys: int = 8192
    backward_rows: int = 512
    backward_keys: int = 512
    resident_rows: int = 8192
    gradient_bytes: int = 2**25  # of queries, that the backward pass keeps in float32


class Plan(NamedTuple):
    """The static half of a call."""

    batch: int
    kv_heads: int
    groups: int  # heads that share keys and values
    maps: int  # 2 with λ
    key_maps: int  # keys a head: 2 for differential V1
    length: int
    keys: int
    head_size: int
    value_size: int
    scale: float
    left: int | None  # keys before its own position that a row may see; None: all
    right: int | None
    by_row: bool  # rows have intervals of their own
    sizes: Sizes
    interpret: Any

    @property
    def heads(self) -> int:
        return self.kv_heads * self.groups

    @property
    def query_width(self) -> int:
        return self.maps * self.head_size

    @property
    def key_width(self) -> int:
        return self.key_maps * self.head_size


class Operands(NamedTuple):
    """Inputs of a kernel, or their blocks.

    Heads lie side by side in lanes, or before time where they are no whole tiles.
    What differs by row is a column in the forward kernel and a row in the backward.
    """

    query: Any  # [B T N·maps·H]
    key: Any  # [B S K·key_maps·H]
    value: Any  # [B S K·V]
    lam: Any  # [B T N] or [B N 1 T]
    factor: Any  # of a row's scores, [b T 1] or [b 1 T]
    rows: Any  # first key, the one after the last, hidden own key: [b T 3] or [b 3 T]
    positions: Any  # of keys, −1 where hidden: [b 1 S] or [b S 1]


class Visits(NamedTuple):
    """Which blocks each block of rows (or of keys) visits, as scalars in SMEM.

    A block may have several parts, which visit edges one by one.
    """

    parts: int
    count: int  # of all parts
    by_example: bool

    def scalars(self, bounds: Int[Array, "b 4 count"], first: Array) -> Array:
        return jnp.append(bounds.reshape(-1), first)

    def first(self, scalars) -> Array:
        """The position of row 0."""
        return scalars[scalars.shape[0] - 1]

    def bounds(self, scalars, example, part) -> list:
        """First block, first and last of those that need no mask, last block."""
        start = example * self.by_example * 4 * self.count + part
        return [scalars[start + i * self.count] for i in range(4)]

    def union(self, scalars, example, block) -> list:
        """The blocks that some part visits, and those that need no mask in any."""
        parts = [
            self.bounds(scalars, example, block * self.parts + i)
            for i in range(self.parts)
        ]
        first, start, stop, last = zip(*parts, strict=True)
        start = reduce(jnp.maximum, start)
        stop = jnp.maximum(start, reduce(jnp.minimum, stop))
        return [reduce(jnp.minimum, first), start, stop, reduce(jnp.maximum, last)]

    def edges(self, scalars, example, block, i: int) -> list:
        """The bounds of part i, around the blocks that need no mask in any part."""
        first, _, _, last = self.bounds(scalars, example, block * self.parts + i)
        _, start, stop, _ = self.union(scalars, example, block)
        return [first, *(jnp.clip(x, first, last) for x in (start, stop)), last]


def nearest(bounds: list, index, group: int):
    """`index` of a group of blocks, or the nearest group that is visited."""
    first, _, _, last = bounds
    return jnp.clip(index, first // group, jnp.maximum(last - 1, first) // group)


def even(length: int, limit: int, unit: int = LANES) -> int:
    """Blocks of equal size, a multiple of `unit`, that is not above `limit`."""
    count = -(-length // limit)
    return -(-length // (count * unit)) * unit


def product(a: Array, b: Array, dimensions: tuple) -> Float[Array, "_ _"]:
    """In float32, of float32 arrays with all their bits."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def repeat(x: Float[Array, "r 128"], width: int) -> Float[Array, "r width"]:
    """Equal columns, more or fewer of them."""
    if width % LANES == 0:
        return jnp.tile(x, (1, width // LANES))
    return jnp.broadcast_to(x[:, :1], (x.shape[0], width))


def branch(plan: Plan, x: Array, i: int, maps: int) -> Array:
    """The i-th of the heads that lie side by side."""
    return x[:, i * plan.head_size : (i + 1) * plan.head_size] if maps == 2 else x


def within(x: Array, start, length: int) -> Array:
    """A block that begins at `start`, with 0 after the end of the array."""
    index = start + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(index < length, x, 0)


def visible(
    plan: Plan,
    shape: tuple[int, int],
    axis: int,
    row,
    key,
    intervals: list | None,
    positions: Int[Array, "_ _"] | None,
) -> Bool[Array, "_ _"]:
    """Which pairs of a block see each other; rows run along `axis`.

    Args:
        row, key: the positions where the block begins.
    """
    index = [jax.lax.broadcasted_iota(jnp.int32, shape, i) for i in (axis, 1 - axis)]
    if intervals is not None:
        begin, end, own = intervals
        at = key + index[1] if positions is None else positions
        return (at >= begin) & (at < end) & (at != own)
    tests, distance = [], index[1] - index[0]
    if plan.left is not None:
        tests.append(distance >= row - key - plan.left)
    if plan.right is not None:
        tests.append(distance <= row - key + plan.right)
    if positions is not None:
        tests.append(jnp.broadcast_to(positions, shape) >= 0)
    elif plan.keys % shape[1 - axis] or not tests:
        tests.append(index[1] < plan.keys - key)
    return reduce(jnp.logical_and, tests)


def visit(bounds: list, low, high, step: Callable) -> None:
    """step(block) of the blocks in [low, high) that need no mask."""
    _, start, stop, _ = (jnp.clip(x, low, high) for x in bounds)
    jax.lax.fori_loop(start, stop, lambda j, _: step(j), None)


def visit_edges(bounds: list, low, high, step: Callable) -> None:
    """step(block) of the blocks in [low, high) that need a mask."""
    first, start, stop, last = (jnp.clip(x, low, high) for x in bounds)
    before = start - first

    def edge(j, _):
        step(jnp.where(j < before, first + j, stop + j - before))

    jax.lax.fori_loop(0, before + last - stop, edge, None)


def in_lanes(heads: int, width: int) -> bool:
    """Heads are whole tiles: the array needs no transpose."""
    return heads == 1 or width % LANES == 0


def arranged(x: Float[Array, "B T _ _"], heads: int) -> Array:
    """[B T N·width], as projections give it, or [B N T width]."""
    flat = x.reshape(*x.shape[:2], heads, -1)
    if in_lanes(heads, flat.shape[-1]):
        return x.reshape(*x.shape[:2], -1)
    return jnp.swapaxes(flat, 1, 2)


def restored(x: Array, shape: tuple[int, ...]) -> Float[Array, "B T _ _"]:
    """The inverse of `arranged`."""
    return (jnp.swapaxes(x, 1, 2) if x.ndim == 4 else x).reshape(shape)


def arranged_shape(plan: Plan, heads: int, width: int, length: int) -> tuple[int, ...]:
    if in_lanes(heads, width):
        return plan.batch, length, heads * width
    return plan.batch, heads, length, width


def by_heads(heads: int, width: int, size: int, index: Callable) -> pl.BlockSpec:
    """Blocks of an arranged array; `index` gives example, head and block."""
    if in_lanes(heads, width):

        def lanes(*at):
            example, head, block = index(*at)
            return example, block, head

        return pl.BlockSpec((None, size, width), lanes)
    return pl.BlockSpec((None, None, size, width), lambda *at: (*index(*at), 0))


def for_all_heads(
    x: Array | None, axis: int, size: int, index: Callable
) -> pl.BlockSpec | None:
    """Blocks of an array without heads, along `axis`; one example may serve all."""
    if x is None:
        return None
    each = int(x.shape[0] > 1)
    shape = [None, *x.shape[1:]]
    shape[axis] = size

    def place(*at):
        example, _, block = index(*at)
        return (example * each, *(block if i == axis else 0 for i in (1, 2)))

    return pl.BlockSpec(tuple(shape), place)


def head_rows(count: int, size: int, index: Callable) -> pl.BlockSpec:
    """Blocks of [B N count T]."""

    def place(*at):
        example, head, block = index(*at)
        return example, head, 0, block

    return pl.BlockSpec((None, None, count, size), place)


def compiler(parallel: int, arbitrary: int) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=("parallel",) * parallel + ("arbitrary",) * arbitrary,
        vmem_limit_bytes=100 * 2**20,
    )
