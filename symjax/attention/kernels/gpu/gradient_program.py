"""One program of the backward pass of differential attention on Hopper GPUs.

A program computes the gradients of `BLOCK` keys of one value head. It goes over the
queries that see them, `STEP` at a time, with scores transposed (keys are rows). A visit
is one such step of one of the query heads that share the value head. A program has
three warpgroups: two compute `KEYS` keys each, and one loads.

- Registers hold the sums of the gradients of keys (both maps) and of values in float32.
- Shared memory holds the keys and values of the block, `SLOTS` steps of queries, of dO
  and of numbers for each query, and dS of both maps (`Scratch`).
- Global memory collects the gradients of queries in float32. Each computing warpgroup
  adds those of one map, one visit later. The order of programs is not fixed, so results
  of two runs differ by rounding.

Three rules keep a thread within its registers:

- Weights are bfloat16 between products.
- There are waits for barriers between products. ptxas does not move products over them.
- The index of the warpgroup is read at each use. Otherwise the addresses of all
  operands would be kept in registers.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as gpu
from jaxtyping import Array

from symjax.attention.kernels.gpu.hopper import (
    IN_TWO,
    LOADERS,
    WORKERS,
    head_rows,
    index_along,
)

KEYS = 64  # keys of a warpgroup
BLOCK = 2 * KEYS  # keys of a program
STEP = 64  # queries of a step
SLOTS = 2  # steps in shared memory at a time
SCORES = KEYS, STEP
# Rows of `numbers`, each with one number per query. NORMALISER (log₂ Σ exp) and DELTA
# (D) have one row for each map; LESS is −λ; LAST and FIRST are the last and the first
# key that a query sees.
NORMALISER, DELTA, LESS, LAST, FIRST = 0, 2, 4, 5, 6
BY_QUERY = gpu.Layout.WGMMA.reduce(0)


def _steps_of(first: Any, lengths: tuple[int, int], causal: bool) -> tuple[Any, Any]:
    """Return the first step whose queries see keys of the block from `first` on, and
    the first step from which on all queries see the whole block."""
    length, keys = lengths
    steps = pl.cdiv(length, STEP)
    clear = jnp.where(first + BLOCK <= keys, 0, steps)
    if not causal:
        return 0, clear
    first -= keys - length
    start = jnp.minimum(lax.div(jnp.maximum(first, 0), STEP), steps)
    whole = lax.div(jnp.maximum(first + BLOCK - 1, 0) + STEP - 1, STEP)
    return start, jnp.clip(jnp.maximum(clear, whole), start, steps)


def _start_product(left: Any, right: Any, then: Any) -> Any:
    """Start left @ right and return `then(read)`, where `read` waits for the product.

    Code in `then` before it calls `read` runs while tensor cores multiply.
    """

    def compute(accumulator):
        gpu.wgmma(accumulator, left, right)
        return then(partial(gpu.wgmma_accumulator_load, accumulator))

    return pl.run_scoped(compute, gpu.ACC((left.shape[0], right.shape[1])))


class GradientArrays(NamedTuple):
    """Arrays in global memory that a program reads or writes."""

    query: Any
    key: Any
    value: Any
    numbers: Any  # [B N numbers T], as `_query_numbers` returns them
    output_gradient: Any
    limits: Any  # [B 4 blocks], as `blocks_of_keys` returns them, or None
    query_gradient: Any  # sums in float32
    key_gradient: Any
    value_gradient: Any


class Scratch(NamedTuple):
    """Shared memory of a program, and its barriers.

    jax orders the arrays by their names, so another name could change the layout.
    """

    keys: Any  # [2 BLOCK H] of both maps
    values: Any  # [BLOCK V]
    queries: Any  # [SLOTS 2 STEP H] of both maps
    changes: Any  # [SLOTS STEP V], dO
    along: Any  # [SLOTS numbers STEP]
    kept: Any  # dS of two steps and both maps; shares memory with queries' gradients
    held: Any  # keys and values of the block have arrived
    first: Any  # queries of the first map and numbers of a slot have arrived
    second: Any  # queries of the second map have arrived
    third: Any  # dO has arrived
    used: Any  # both warpgroups have used a slot
    written: Any  # both warpgroups have written dS


class GradientProgram:
    """One program: its block of keys, its memory, and what its warpgroups do."""

    def __init__(
        self, *arrays: Any, lengths, sizes, group, scale, causal, **scratch: Any
    ):
        self.arrays, self.memory = GradientArrays(*arrays), Scratch(**scratch)
        self.sizes, self.group, self.scale = sizes, group, scale
        places = (lax.axis_index(x) for x in ("batch", "head", "block"))
        self.example, self.head, block = places
        steps, self.at = pl.cdiv(lengths[0], STEP), block * BLOCK
        limits = self.arrays.limits
        self.hides = causal or lengths[1] % BLOCK or limits is not None
        if limits is None:
            self.start, self.clear = _steps_of(self.at, lengths, causal)
        else:
            ends = (limits[self.example, i, block] for i in range(4))
            self.start, self.clear, self.until, steps = ends
        self.steps = steps - self.start
        self.visits = group * self.steps

    def place(self, visit: Any) -> tuple[Any, Any]:
        """Return the query head and the step of a visit.

        All steps of one query head come before those of the next.
        """
        if self.group == 1:
            return self.head, self.start + visit
        step = lax.rem(visit, self.steps)
        head = self.head * self.group + lax.div(visit, self.steps)
        return head, self.start + step

    def load(self) -> None:
        """Copy keys and values, then queries, numbers and dO, step by step."""
        query, key, value, numbers, output_gradient = self.arrays[:5]
        size, width = self.sizes
        to, example = self.memory, self.example
        gpu.set_max_registers(LOADERS, action="decrease")
        rows = pl.ds(self.at, BLOCK)
        for i in range(2):
            source = head_rows(key, example, rows, 2 * self.head + i, size)
            gpu.copy_gmem_to_smem(source, to.keys.at[i], to.held)
        source = head_rows(value, example, rows, self.head, width)
        gpu.copy_gmem_to_smem(source, to.values, to.held)

        @pl.loop(0, self.visits + SLOTS)
        def _(visit):
            slot = lax.rem(visit, SLOTS)
            pl.when(visit >= SLOTS)(lambda: gpu.barrier_wait(to.used.at[slot]))

            @pl.when(visit < self.visits)
            def _():
                head, step = self.place(visit)
                rows = pl.ds(step * STEP, STEP)
                one, two = (
                    head_rows(query, example, rows, 2 * head + i, size) for i in (0, 1)
                )
                row = head_rows(output_gradient, example, rows, head, width)
                for source, held, barrier in (
                    (one, to.queries.at[slot, 0], to.first),
                    (numbers.at[example, head, :, rows], to.along.at[slot], to.first),
                    (two, to.queries.at[slot, 1], to.second),
                    (row, to.changes.at[slot], to.third),
                ):
                    gpu.copy_gmem_to_smem(source, held, barrier.at[slot])

    def compute(self) -> None:
        """Compute and write the gradients of a warpgroup's keys and values."""
        memory, (tall, wide) = self.memory, (gpu.ACC((KEYS, x)) for x in self.sizes)
        gpu.set_max_registers(WORKERS, action="increase")
        gpu.barrier_wait(memory.held)
        gpu.barrier_arrive(memory.written)
        sums = pl.run_scoped(self.accumulate, wide, tall, tall)
        own_keys = _own_keys()
        last = self.start_query_gradients(self.visits - 1, lambda read: read(wait_n=0))
        # As in `step`: wait until all threads have read dS.
        gpu.wait_smem_to_gmem(0, wait_read_only=True)
        pl.when(self.visits > 0)(lambda: self.add_to_queries(self.visits - 1, last))
        gpu.barrier_arrive(memory.written)
        gpu.barrier_wait(memory.written)  # no warpgroup reads keys and values any more
        self.write(sums, own_keys)

    def write(self, sums: list, own_keys: Any) -> None:
        """Copy the sums to the gradients of values and of the keys of both maps."""
        (*_, key_gradient, value_gradient), (size, width) = self.arrays, self.sizes
        keys, values = self.memory[:2]
        values[own_keys] = sums[0].astype(values.dtype)
        for i in range(2):
            keys[i, own_keys] = (sums[1 + i] * self.scale).astype(values.dtype)
        gpu.commit_smem()
        rows = pl.ds(self.at + _warpgroup() * KEYS, KEYS)
        to = head_rows(value_gradient, self.example, rows, self.head, width)
        gpu.copy_smem_to_gmem(values.at[own_keys], to)
        for i in range(2):
            to = head_rows(key_gradient, self.example, rows, 2 * self.head + i, size)
            gpu.copy_smem_to_gmem(keys.at[i, own_keys], to)
        gpu.wait_smem_to_gmem(0)

    def accumulate(self, to_values: Any, *to_keys: Any) -> list:
        """Return dV and dK of both maps, summed over all visits."""
        step = partial(self.step, to_values, to_keys)
        lax.fori_loop(0, self.visits, step, self.first_scores(0))
        return [sums[...] for sums in (to_values, *to_keys)]

    def first_scores(self, visit: Any) -> Array:
        """Return the scores of a visit and the first map."""
        slot, memory = lax.rem(visit, SLOTS), self.memory
        left = memory.keys.at[0, _own_keys()]
        pl.when(visit < self.visits)(lambda: gpu.barrier_wait(memory.first.at[slot]))
        right = memory.queries.at[slot, 0].T
        return _start_product(left, right, lambda read: read(wait_n=0))

    def step(self, to_values: Any, to_keys: tuple, visit: Any, scores: Array) -> Array:
        """Add one visit to the sums.

        Each product starts before other work, so that it runs at the same time.
        Functions are nested in the order in which products are read: scores of the
        second map, gradients of the queries of the visit before, dP.

        Args:
            scores: of the first map.

        Returns:
            The scores of the first map in the next visit.
        """
        slot, memory, own_keys = lax.rem(visit, SLOTS), self.memory, _own_keys()
        weigh = partial(self.weigh, visit)
        differ = partial(self.differ, to_keys, visit, own_keys)
        changes = memory.changes.at[slot]

        def with_scores(read_second):
            one = weigh(0, scores)

            def with_queries(read_earlier):
                less = weigh(1, read_second(wait_n=1))
                gpu.barrier_wait(memory.third.at[slot])
                gpu.wgmma(to_values, one + less, changes)
                earlier = read_earlier(wait_n=1)
                # No copy is in flight here. This waits until all threads of the
                # warpgroup have read dS, whose memory the sums take.
                gpu.wait_smem_to_gmem(0, wait_read_only=True)
                pl.when(visit > 0)(lambda: self.add_to_queries(visit - 1, earlier))

                def with_pairs(read_pairs):
                    pairs = read_pairs(wait_n=0)
                    differ(0, one, pairs)
                    gpu.wgmma_wait(1)
                    differ(1, less, pairs)

                _start_product(memory.values.at[own_keys], changes.T, with_pairs)

            self.start_query_gradients(visit - 1, with_queries)

        gpu.barrier_wait(memory.second.at[slot])
        queries = memory.queries.at[slot, 1].T
        _start_product(memory.keys.at[1, own_keys], queries, with_scores)
        gpu.wait_smem_to_gmem(0, wait_read_only=True)
        gpu.commit_smem()
        gpu.barrier_arrive(memory.written)
        following = self.first_scores(visit + 1)
        gpu.wgmma_wait(0)
        gpu.barrier_arrive(memory.used.at[slot])
        return following

    def row(self, visit: Any, index: int) -> Array:
        """Return one of the `numbers` of the visit's queries, for all keys."""
        numbers = self.memory.along.at[lax.rem(visit, SLOTS), index]
        numbers = gpu.load(numbers, layout=BY_QUERY)  # pyright: ignore
        return lax.broadcast_in_dim(numbers, SCORES, [1])

    def weigh(self, visit: Any, i: int, scores: Array) -> Array:
        """Return P of the first map (i = 0) or −λ P of the second."""
        limits = self.arrays.limits

        def hide(scores):
            key = index_along(SCORES, 0) + self.at + _warpgroup() * KEYS
            key = key.astype(jnp.float32)
            visible = key <= self.row(visit, LAST)
            if limits is not None:
                visible &= key >= self.row(visit, FIRST)
            return jnp.where(visible, scores, -jnp.inf)

        if self.hides:
            step = self.place(visit)[1]
            masked = step < self.clear
            if limits is not None:
                masked |= step >= self.until
            scores = lax.cond(masked, hide, lambda x: x, scores)
        base = self.scale * IN_TWO
        weights = jnp.exp2(scores * base - self.row(visit, NORMALISER + i))
        weights = weights * self.row(visit, LESS) if i else weights
        return lax.optimization_barrier(weights.astype(self.memory.values.dtype))

    def differ(
        self,
        to_keys: tuple,
        visit: Any,
        own_keys: Any,
        i: int,
        weights: Any,
        pairs: Any,
    ) -> None:
        """Write dS of a map to shared memory, and add dSᵀ Q to the keys' gradient.

        Args:
            weights: what `weigh` returned.
            pairs: dP.
        """
        by_scores, _ = self.memory.kept
        change = weights * (pairs - self.row(visit, DELTA + i)).astype(weights.dtype)
        change = lax.optimization_barrier(change)
        by_scores[lax.rem(visit, 2), i, own_keys] = change
        queries = self.memory.queries.at[lax.rem(visit, SLOTS), i]
        gpu.wgmma(to_keys[i], change, queries)

    def start_query_gradients(self, visit: Any, then: Any) -> Any:
        """Start the product dS K of a visit, for the map of this warpgroup."""
        gpu.barrier_wait(self.memory.written)
        by_scores, _ = self.memory.kept
        left = by_scores.at[lax.rem(visit + 2, 2), _warpgroup()].T
        return _start_product(left, self.memory.keys.at[_warpgroup()], then)

    def add_to_queries(self, visit: Any, change: Array) -> None:
        """Add dS K of a visit, for the map of this warpgroup, in global memory."""
        (head, step), map_ = self.place(visit), _warpgroup()
        _, sums = self.memory.kept
        to = sums.at[lax.rem(visit, 2), map_]
        to[...] = change
        gpu.commit_smem()
        rows, total = pl.ds(step * STEP, STEP), self.arrays.query_gradient
        here = head_rows(total, self.example, rows, 2 * head + map_, self.sizes[0])
        gpu.copy_smem_to_gmem(to, here, reduction_op="add")


def run_program(*arrays: Any, **options: Any) -> None:
    """Run one program: warpgroup 2 loads, the others compute."""
    program = GradientProgram(*arrays, **options)
    pl.when(_warpgroup() == 2)(program.load)
    pl.when(_warpgroup() < 2)(program.compute)


def _warpgroup() -> Any:
    return lax.axis_index("warpgroup")


def _own_keys() -> Any:
    """Return the slice of this warpgroup's keys in the block."""
    return pl.ds(_warpgroup() * KEYS, KEYS)
