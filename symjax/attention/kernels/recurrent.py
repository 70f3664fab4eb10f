"""How kernels with decays are called: a pass over chunks of 128 tokens, and one back.

Heads lie in tiles as `lanes.py` says. Query heads that share a key head read its blocks
where they are; only packed ones have a copy each. A recurrence is a `Kernels`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from symjax.attention.kernels import blocks
from symjax.attention.kernels.blocks import LANES

BLOCK = LANES  # tokens of a chunk
LEVELS = BLOCK.bit_length() - 1
ALL = -2  # levels but those of a token with itself and with later ones


class Plan(NamedTuple):
    """The static half of a call."""

    batch: int
    heads: int
    groups: int  # heads that share keys, values and decays
    packed: int  # heads in one tile of lanes
    length: int
    head_size: int
    value_size: int
    interpret: Any
    fades: bool = True

    @property
    def sharing(self) -> int:
        """Query heads that read one head of keys, values and decays in the operands:
        packed ones have their own copy beside each other."""
        return self.groups if self.packed == 1 else 1

    @property
    def levels(self) -> tuple[int, ...]:
        """Of pairs; without decays all that are not of a token with itself are one."""
        return tuple(range(LEVELS)) if self.fades else (ALL,)

    @property
    def key_width(self) -> int:
        return self.packed * self.head_size

    @property
    def value_width(self) -> int:
        return self.packed * self.value_size

    @property
    def sizes(self) -> tuple[int, int]:
        return self.value_size, self.head_size

    @property
    def state(self) -> tuple[int, int]:
        return self.value_width, self.key_width


class Operands(NamedTuple):
    """Inputs of both kernels, or their blocks. Heads lie side by side in lanes."""

    query: Any  # [B T N·H]
    key: Any  # [B T K·H], K = N / plan.sharing
    value: Any  # [B T K·V]
    decay: Any  # logarithms, their bfloat16 parts: [parts B T K·H], or None
    sums: Any  # [2 LEVELS+2 c c] of 0 and 1, and each matrix transposed, or None
    levels: Any  # [2 c c] of rows and keys, and of keys and rows
    beta: Any = None  # of the delta rule, [B N/P P T]


class Kernels(NamedTuple):
    """Two passes over chunks, of this recurrence or of the delta rule. Hashable."""

    name: str
    forward: Callable[..., None]
    backward: Callable[..., None]
    kept: Callable[[Plan, Any], list]  # shapes and dtypes of what a chunk keeps
    products: Callable[[Plan, Operands], tuple[int, int]]  # passes of each


def forward(
    kernels: Kernels, plan: Plan, operands: Operands, keep: bool
) -> list[Array]:
    """The output [B T N·V], and if `keep` what `backward` needs of each chunk."""
    value = operands.value
    specs, rows, kept_specs = operand_specs(kernels, plan, operands, lambda i: i)
    shape = plan.batch, plan.length, plan.heads * plan.value_size
    results = [blocks.result(value, shape, value.dtype)]
    kept = kernels.kept(plan, value.dtype)
    if keep:
        whole = [((*grid(plan), *shape), dtype) for shape, dtype in kept]
        results += [blocks.result(value, *x) for x in whole]
    scratch = [] if keep else [pltpu.VMEM(*x) for x in kept]
    products, _ = kernels.products(plan, operands)
    return pl.pallas_call(
        partial(kernels.forward, plan),
        out_shape=results,
        grid=grid(plan),
        in_specs=[specs],
        out_specs=[rows, *(kept_specs if keep else ())],
        scratch_shapes=[*scratch, pltpu.VMEM(plan.state, jnp.float32)],
        compiler_params=blocks.compiler(2, 1),
        cost_estimate=cost(plan, operands, products, 1, [operands, results]),
        interpret=plan.interpret,
        name=f"{kernels.name}_forward",
    )(operands)


def backward(
    kernels: Kernels, plan: Plan, operands: Operands, change: Array, kept: list[Array]
) -> list[Array]:
    """Gradients of query, key, value, and of log-decay and β where there are any, by
    query head."""
    count = grid(plan)[2]
    specs, rows, kept_specs = operand_specs(
        kernels, plan, operands, lambda i: count - 1 - i
    )
    query, beta = operands.query, operands.beta
    own = jnp.float32 if plan.groups > 1 else query.dtype  # those of groups are summed
    wanted = [(query, query.dtype, specs.query)]
    wanted += [(query, own, specs.query), (change, own, rows)]
    if operands.decay is not None:
        wanted.append((query, jnp.float32, specs.query))
    if beta is not None:
        wanted.append((beta, jnp.float32, specs.beta))
    results = [blocks.result(x, x.shape, dtype) for x, dtype, _ in wanted]
    _, products = kernels.products(plan, operands)
    return pl.pallas_call(
        partial(kernels.backward, plan),
        out_shape=results,
        grid=grid(plan),
        in_specs=[specs, rows, *kept_specs],
        out_specs=[spec for *_, spec in wanted],
        scratch_shapes=[pltpu.VMEM(plan.state, jnp.float32)],
        compiler_params=blocks.compiler(2, 1),
        cost_estimate=cost(plan, operands, products, 2, [operands, kept, results]),
        interpret=plan.interpret,
        name=f"{kernels.name}_backward",
    )(operands, change, *kept)


def grid(plan: Plan) -> tuple[int, int, int]:
    return plan.batch, plan.heads // plan.packed, plan.length // BLOCK


def operand_specs(
    kernels: Kernels, plan: Plan, operands: Operands, turn: Any
) -> tuple[Operands, pl.BlockSpec, list[pl.BlockSpec]]:
    """The blocks of operands, of values of query heads, and of what is kept, for chunk
    `turn(i)` in turn i."""

    def head(n: Any) -> Any:
        return n if plan.sharing == 1 else jax.lax.div(n, jnp.int32(plan.sharing))

    def of_rows(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, BLOCK, width), lambda b, n, i: (b, turn(i), n))

    def of_keys(width: int) -> pl.BlockSpec:
        shape = None, BLOCK, width
        return pl.BlockSpec(shape, lambda b, n, i: (b, turn(i), head(n)))

    def whole(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda b, n, i: (0,) * x.ndim)

    def in_parts(x: Array) -> pl.BlockSpec:
        shape = x.shape[0], None, BLOCK, plan.key_width
        return pl.BlockSpec(shape, lambda b, n, i: (0, b, turn(i), head(n)))

    def by_row(x: Array) -> pl.BlockSpec:
        shape = None, None, plan.packed, BLOCK
        return pl.BlockSpec(shape, lambda b, n, i: (b, n, 0, turn(i)))

    def given(spec: Any, x: Any) -> pl.BlockSpec | None:
        return None if x is None else spec(x)

    specs = Operands(
        of_rows(plan.key_width),
        of_keys(plan.key_width),
        of_keys(plan.value_width),
        given(in_parts, operands.decay),
        given(whole, operands.sums),
        whole(operands.levels),
        given(by_row, operands.beta),
    )

    def of_chunk(shape: tuple) -> pl.BlockSpec:
        zeros = (0,) * len(shape)
        place = (None, None, None, *shape)
        return pl.BlockSpec(place, lambda b, n, i: (b, n, turn(i), *zeros))

    kept = [of_chunk(x) for x, _ in kernels.kept(plan, operands.value.dtype)]
    return specs, of_rows(plan.value_width), kept


def cost(
    plan: Plan, operands: Operands, products: int, sums: int, arrays: list
) -> pl.CostEstimate:
    """Of passes of a chunk's rows over a tile of 128 columns; and how many times the
    sums of log-decays are taken or given back. Shared heads are read again."""
    again = [[operands[1:4]] * (plan.sharing - 1)]
    tokens = plan.batch * (plan.heads // plan.packed) * plan.length
    taken = 0 if operands.decay is None else operands.decay.shape[0] * (LEVELS + 2)
    return pl.CostEstimate(
        flops=2 * tokens * (products + sums * taken) * BLOCK * plan.key_width,
        transcendentals=tokens * plan.key_width * (LEVELS + 2) * plan.fades,
        bytes_accessed=sum(
            x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays + again)
        ),
    )
