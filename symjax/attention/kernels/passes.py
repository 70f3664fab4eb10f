"""Two kernels that pass over chunks of time, forward and back, with a state in VMEM.

Heads lie in tiles as `lanes.py` says. Query heads that share a key head read its blocks
where they are; only packed ones have a copy each.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from symjax.attention.kernels import blocks
from symjax.attention.kernels.blocks import LANES
from symjax.attention.kernels.lanes import even, heads_in_a_tile, side_by_side


class Plan(NamedTuple):
    """The static half of a call."""

    batch: int
    heads: int
    groups: int  # heads that share keys and values
    packed: int  # heads in one tile of lanes
    length: int
    head_size: int
    value_size: int
    interpret: Any
    block: int  # tokens of a chunk

    @classmethod
    def of(
        cls,
        query: Array,
        value: Array,
        interpret: Any,
        block: int = LANES,
        together: int = 1,
    ):
        """For query [B T N H] and value [B T K V], and `Kernels.together`."""
        (batch, length, heads, size), value_size = query.shape, value.shape[3]
        packed = heads_in_a_tile(heads, size, value_size)
        sizes = size, value_size
        if packed == 1:
            sizes = even(size), even(value_size)
        groups, length = heads // value.shape[2], even(length, block * together)
        return cls(batch, heads, groups, packed, length, *sizes, interpret, block)

    @property
    def sharing(self) -> int:
        """Query heads that read one head of keys and values in the operands: packed
        ones have their own copy beside each other."""
        return self.groups if self.packed == 1 else 1

    @property
    def sizes(self) -> tuple[int, int]:
        return self.value_size, self.head_size

    @property
    def widths(self) -> tuple[int, int]:
        """Lanes of the values and of the keys of packed heads."""
        return self.packed * self.value_size, self.packed * self.head_size

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.batch, self.heads // self.packed, self.length // self.block

    def by_query(self, x: Array, size: int) -> Float[Array, "B length N*size"]:
        """[B T N h] as operands have it."""
        return side_by_side(x, self.heads, self.length, size)

    def by_key(self, x: Array, size: int) -> Float[Array, "B length K*size"]:
        """[B T K h] as operands have it."""
        return side_by_side(x, self.heads // self.sharing, self.length, size)


class Chunks(NamedTuple):
    """Blocks of arrays: those of chunk `turn(i)` in turn i."""

    plan: Plan
    turn: Callable

    def by_query(self, width: int) -> pl.BlockSpec:
        """Of [B T N·size], where packed heads have this width."""
        shape = None, self.plan.block, width
        return pl.BlockSpec(shape, lambda b, n, i: (b, self.turn(i), n))

    def by_key(self, width: int) -> pl.BlockSpec:
        """Of [B T K·size]."""
        shape = None, self.plan.block, width
        return pl.BlockSpec(shape, lambda b, n, i: (b, self.turn(i), self.key_head(n)))

    def key_head(self, n: Any) -> Any:
        sharing = self.plan.sharing
        return n if sharing == 1 else jax.lax.div(n, jnp.int32(sharing))

    def of_examples(self, x: Array | None) -> pl.BlockSpec | None:
        """Of [B 1 T]."""
        shape = None, 1, self.plan.block
        place = pl.BlockSpec(shape, lambda b, n, i: (b, 0, self.turn(i)))
        return None if x is None else place

    def of_tiles(self, x: Array | None) -> pl.BlockSpec | None:
        """Of [B N/P P T], a number of each token and head."""
        shape = None, None, self.plan.packed, self.plan.block
        place = pl.BlockSpec(shape, lambda b, n, i: (b, n, 0, self.turn(i)))
        return None if x is None else place

    def whole(self, x: Array | None) -> pl.BlockSpec | None:
        return None if x is None else pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)

    def of_kept(self, shape: tuple[int, ...]) -> pl.BlockSpec:
        """Of [B tiles chunks *shape]."""
        zeros, block = (0,) * len(shape), (None, None, None, *shape)
        return pl.BlockSpec(block, lambda b, n, i: (b, n, self.turn(i), *zeros))


class Kernels(NamedTuple):
    """The two kernels of a mechanism, and what a call of them needs. Hashable."""

    name: str
    forward: Callable[..., None]  # plan, operands, output, kept, scratch
    backward: Callable[..., None]  # plan, operands, changes, kept, gradients, scratch
    specs: Callable[[Plan, Any, Chunks], Any]  # the blocks of operands
    kept: Callable[[Plan, Any], list]  # shapes and dtypes of what a chunk keeps
    scratch: Callable[[Plan, Any], Sequence]  # shapes in VMEM of each, float32
    cost: Callable[[Plan, Any], Sequence]  # FLOPs and transcendentals of each
    dtype: Callable[[Any], Any] = lambda operands: operands.value.dtype  # of the output
    more: Callable[[Any, Any], list] = lambda operands, specs: []  # float32 gradients,
    #   beside those of queries, keys and values: arrays of their shapes, and blocks
    shared: int = 3  # operands from the first to this one are of key heads
    together: int = 1  # chunks of a turn forward; what several keep has an axis


def forward(kernels: Kernels, plan: Plan, operands: Any, keep: bool) -> list[Array]:
    """The output [B T N·V], and if `keep` what `backward` needs of each chunk."""
    kept, grid = kernels.kept(plan, operands), plan.grid
    if kernels.together > 1:
        plan = plan._replace(block=plan.block * kernels.together)
        kept = [((kernels.together, *x), y) for x, y in kept]
    chunks = Chunks(plan, lambda i: i)
    specs = kernels.specs(plan, operands, chunks)
    shape = plan.batch, plan.length, plan.heads * plan.value_size
    rows = chunks.by_query(plan.widths[0])
    results, scratch = [(shape, kernels.dtype(operands), rows)], kept
    if keep:
        results += [((*plan.grid, *x), y, chunks.of_kept(x)) for x, y in kept]
        scratch = []
    output, *found = _call(kernels, 0, plan, [operands], [specs], results, scratch)
    if kernels.together > 1:
        found = [x.reshape(*grid, *x.shape[len(grid) + 1 :]) for x in found]
    return [output, *found]


def backward(
    kernels: Kernels, plan: Plan, operands: Any, changes: list[Array], kept: list[Array]
) -> list[Array]:
    """Gradients of query, key and value by query head, float32 ones where those of
    several heads will be summed; and of more, if the kernels say so.

    Args:
        changes: the gradient of the output, and what else has its shape.
    """
    chunks = Chunks(plan, lambda i: plan.grid[2] - 1 - i)
    specs = kernels.specs(plan, operands, chunks)
    rows, query = chunks.by_query(plan.widths[0]), operands.query
    dtypes = [x.dtype for x in operands[1:3]]
    if plan.groups > 1:
        dtypes = [jnp.float32] * 2
    results = [
        (query.shape, query.dtype, specs.query),
        (query.shape, dtypes[0], specs.query),
        (changes[0].shape, dtypes[1], rows),
    ]
    more = kernels.more(operands, specs)
    results += [(x.shape, jnp.float32, spec) for x, spec in more]
    kept_specs = [chunks.of_kept(x) for x, _ in kernels.kept(plan, operands)]
    in_specs = [specs, *[rows] * len(changes), *kept_specs]
    return _call(kernels, 1, plan, [operands, *changes, *kept], in_specs, results, [])


def _call(
    kernels: Kernels,
    back: int,
    plan: Plan,
    given: list[Any],
    in_specs: list[Any],
    results: list[tuple],
    scratch: list[tuple],
) -> list[Array]:
    operands = given[0]
    shapes = [blocks.result(operands.value, *x) for *x, _ in results]
    again = [operands[1 : kernels.shared]] * (plan.sharing - 1)
    flops, transcendentals = kernels.cost(plan, operands)[back]
    sums = [(x, jnp.float32) for x in kernels.scratch(plan, operands)[back]]
    return pl.pallas_call(
        partial((kernels.forward, kernels.backward)[back], plan),
        out_shape=shapes,
        grid=plan.grid,
        in_specs=in_specs,
        out_specs=[spec for *_, spec in results],
        scratch_shapes=[pltpu.VMEM(*x) for x in (*scratch, *sums)],
        compiler_params=blocks.compiler(2, 1),
        cost_estimate=blocks.estimate(flops, transcendentals, [given, shapes, again]),
        interpret=plan.interpret,
        name=f"{kernels.name}_{('forward', 'backward')[back]}",
    )(*given)
