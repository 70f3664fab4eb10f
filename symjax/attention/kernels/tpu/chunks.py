"""Template of the recurrent TPU kernels: one pass over chunks forward, one backward.

The grid has one program for each example, tile of heads and chunk. Chunks run in turn,
with the state in VMEM: from the first chunk in the forward kernel, from the last one in
the backward kernel. The forward kernel can save the state before each chunk, which the
backward kernel reads.

Heads are in tiles of 128 lanes. Query heads that share a key head read the same blocks
of keys and values. If several heads are packed into one tile (`packed_heads.py`), each
query head needs a copy of its keys and values.

The kernels of features (`features.py`) read an integer of flags and a segment number
for each token; `seen_in_chunk` computes the visible pairs of a chunk from both. The
kernels with decays (`gated.py`, `delta.py`) read neither: the first token of a segment
has a log-decay that forgets the state.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.sequence import id_changes
from symjax.attention.kernels.operands import result, round_up
from symjax.attention.kernels.tpu import tiles
from symjax.attention.kernels.tpu.packed_heads import heads_in_a_tile, pack_heads
from symjax.attention.kernels.tpu.tiles import LANES, column


class ChunkPlan(NamedTuple):
    """Sizes of a call, known when the kernel is compiled."""

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
        """Return the plan for query [B T N H] and value [B T K V].

        Args:
            together: as in `Kernels`.
        """
        (batch, length, heads, size), value_size = query.shape, value.shape[3]
        packed = heads_in_a_tile(heads, size, value_size)
        sizes = size, value_size
        if packed == 1:
            sizes = round_up(size), round_up(value_size)
        groups, length = heads // value.shape[2], round_up(length, block * together)
        return cls(batch, heads, groups, packed, length, *sizes, interpret, block)

    @property
    def sharing(self) -> int:
        """Number of query heads that read one head of keys and values in the operands.

        It is 1 for packed heads, which have a copy each.
        """
        return self.groups if self.packed == 1 else 1

    @property
    def sizes(self) -> tuple[int, int]:
        return self.value_size, self.head_size

    @property
    def widths(self) -> tuple[int, int]:
        """Lanes of a tile of values and of a tile of keys."""
        return self.packed * self.value_size, self.packed * self.head_size

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.batch, self.heads // self.packed, self.length // self.block

    def by_query(self, x: Array, size: int) -> Float[Array, "B length N*size"]:
        """Return queries [B T N h] in the layout of operands."""
        return pack_heads(x, self.heads, self.length, size)

    def by_key(self, x: Array, size: int) -> Float[Array, "B length K*size"]:
        """Return keys or values [B T K h] in the layout of operands."""
        return pack_heads(x, self.heads // self.sharing, self.length, size)


class Chunks(NamedTuple):
    """Blocks of the arrays of a call. Iteration i works on chunk `chunk_at(i)`."""

    plan: ChunkPlan
    chunk_at: Callable

    def by_query(self, width: int) -> pl.BlockSpec:
        """Return the blocks of an array [B T N·size]; `width` is that of a tile."""
        shape = None, self.plan.block, width
        return pl.BlockSpec(shape, lambda b, n, i: (b, self.chunk_at(i), n))

    def by_key(self, width: int) -> pl.BlockSpec:
        """Return the blocks of an array [B T K·size]."""
        shape = None, self.plan.block, width
        return pl.BlockSpec(
            shape, lambda b, n, i: (b, self.chunk_at(i), self.key_head(n))
        )

    def key_head(self, n: Any) -> Any:
        sharing = self.plan.sharing
        return n if sharing == 1 else jax.lax.div(n, jnp.int32(sharing))

    def of_examples(self, x: Array | None) -> pl.BlockSpec | None:
        """Return the blocks of an array [B 1 T]."""
        shape = None, 1, self.plan.block
        place = pl.BlockSpec(shape, lambda b, n, i: (b, 0, self.chunk_at(i)))
        return None if x is None else place

    def of_tiles(self, x: Array | None) -> pl.BlockSpec | None:
        """Return the blocks of an array [B N/P P T]: a number per token and head."""
        shape = None, None, self.plan.packed, self.plan.block
        place = pl.BlockSpec(shape, lambda b, n, i: (b, n, 0, self.chunk_at(i)))
        return None if x is None else place

    def whole(self, x: Array | None) -> pl.BlockSpec | None:
        return None if x is None else pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)

    def of_kept(self, shape: tuple[int, ...]) -> pl.BlockSpec:
        """Return the blocks of residuals [B tiles chunks *shape]."""
        zeros, block = (0,) * len(shape), (None, None, None, *shape)
        return pl.BlockSpec(block, lambda b, n, i: (b, n, self.chunk_at(i), *zeros))


class Kernels(NamedTuple):
    """The two kernels of a mechanism, and what a call of them needs. Hashable."""

    name: str
    forward: Callable[..., None]  # plan, operands, output, kept, scratch
    backward: Callable[..., None]  # plan, operands, changes, kept, gradients, scratch
    specs: Callable[[ChunkPlan, Any, Chunks], Any]  # the blocks of operands
    kept: Callable[[ChunkPlan, Any], list]  # shapes and dtypes of a chunk's residuals
    scratch: Callable[[ChunkPlan, Any], Sequence]  # float32 shapes, for each kernel
    cost: Callable[[ChunkPlan, Any], Sequence]  # FLOPs, exponentials, for each kernel
    dtype: Callable[[Any], Any] = lambda operands: operands.value.dtype  # of the output
    # For each further gradient (float32): an array of its shape, and its blocks.
    more: Callable[[Any, Any], list] = lambda operands, specs: []
    shared: int = 3  # operands[1:shared] have one entry per key head
    # Chunks per iteration of the forward kernel. Above 1 the blocks that it saves have
    # one more axis.
    together: int = 1
    # Whether policies of `jax.checkpoint` may save the residuals. If not, the backward
    # pass under `jax.checkpoint` runs the forward kernel again.
    saved: bool = True
    reads_output: bool = False  # whether the backward kernel reads the output


def forward(
    kernels: Kernels, plan: ChunkPlan, operands: Any, keep: bool
) -> list[Array]:
    """Return the output [B T N·V], and with `keep` the residuals of each chunk."""
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
    kernels: Kernels,
    plan: ChunkPlan,
    operands: Any,
    changes: list[Array],
    kept: list[Array],
) -> list[Array]:
    """Return the gradients of query, key and value for each query head, and the further
    gradients of `Kernels.more`.

    If query heads share a key head, the gradients of key and value are float32, since
    they will be summed.

    Args:
        changes: the gradient of the output; and the output, if the kernel reads it.
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
    plan: ChunkPlan,
    arrays: list[Any],
    in_specs: list[Any],
    results: list[tuple],
    scratch: list[tuple],
) -> list[Array]:
    operands = arrays[0]
    shapes = [result(operands.value, *x) for *x, _ in results]
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
        compiler_params=tiles.compiler(2, 1),
        cost_estimate=tiles.estimate(flops, transcendentals, [arrays, shapes, again]),
        interpret=plan.interpret,
        name=f"{kernels.name}_{('forward', 'backward')[back]}",
    )(*arrays)


# Bits of a token's flags; `ChunkVisibility` says what they mean.
VISIBLE, SEES, REACHES, JOINS, KEEPS = 1, 2, 4, 8, 16


class ChunkVisibility(NamedTuple):
    """Visibility in a chunk. Columns [c 1] are 0 and 1, or None if all are 1."""

    pairs: Bool[Array, "c c"]  # whether a row may see a key, if no key is hidden
    visible: Any = None  # whether the key of the token is visible
    sees: Any = None  # whether the row sees a key
    segment: Any = None  # number of the token's segment; None for one segment
    reaches: Any = None  # whether the row sees the state before the chunk
    joins: Any = None  # whether the key belongs to the state after the chunk
    keeps: Any = None  # [1 1]: whether the old state is part of the new state


def flags_and_segments(
    visible: Bool[Array, "B T"] | None,
    segment: Int[Array, "B T"] | None,
    query: Float[Array, "B T N H"],
    length: int,
    block: int,
) -> tuple[Int[Array, "B 1 length"] | None, Int[Array, "B 1 length"] | None]:
    """Return the flags and segments of tokens, padded to `length` with hidden tokens.

    Flags are None if no token is hidden and there is one segment. Segments are None if
    there is one segment.
    """
    missing = length - query.shape[1]
    if not missing and visible is None and segment is None:
        return None, None
    visible = jnp.ones(query.shape[:2], bool) if visible is None else visible
    visible = jnp.pad(visible, ((0, 0), (0, missing)))
    if segment is None:
        return _flags(visible, None, block)[:, None], None
    segment = jnp.pad(segment, ((0, 0), (0, missing)), mode="edge")
    return _flags(visible, segment, block)[:, None], segment[:, None]


def _flags(
    visible: Bool[Array, "B T"], segment: Int[Array, "B T"] | None, block: int
) -> Int[Array, "B T"]:
    seen = jnp.cumsum(visible, axis=1)
    if segment is None:
        return visible * VISIBLE + (seen > 0) * SEES
    # At the first token of a segment: the number of visible keys before it.
    before = jnp.where(id_changes(segment), seen - visible, 0)
    sees = seen > jax.lax.cummax(before, axis=1)
    chunks = segment.reshape(segment.shape[0], -1, block)
    last = chunks[..., -1:]
    first = jnp.concatenate([chunks[:, :1, :1], last[:, :-1]], axis=1)
    of_state = REACHES * (chunks == first) + JOINS * (chunks == last)
    of_state += KEEPS * (first == last)
    flags = visible * VISIBLE + sees * SEES
    return flags + of_state.reshape(flags.shape)


def seen_in_chunk(size: int, flags: Any, segment: Any) -> ChunkVisibility:
    """Return the visible pairs of a chunk, from its flags and segments [1 size]."""
    row, key = (jax.lax.broadcasted_iota(jnp.int32, (size, size), x) for x in (0, 1))
    if flags is None:
        return ChunkVisibility(key <= row)
    flags = flags[...]
    in_column = column(flags)

    def bit(kind: int, flags=in_column) -> Array:
        return jnp.where((flags & kind) > 0, 1.0, 0.0)

    if segment is None:
        return ChunkVisibility(key <= row, bit(VISIBLE), bit(SEES))
    segment = segment[...]
    number = column(segment)
    same = number == jnp.broadcast_to(segment, (size, size))
    columns = bit(VISIBLE), bit(SEES), number, bit(REACHES), bit(JOINS)
    return ChunkVisibility((key <= row) & same, *columns, bit(KEEPS, flags[:, :1]))


def where(keep: Any, x: Array, other: Any) -> Float[Array, "..."]:
    """Return x where `keep`, a row or a column of 0 and 1, is 1; elsewhere `other`."""
    if keep is None:
        return x
    return jnp.where(jnp.broadcast_to(keep, x.shape) > 0, x, other)
