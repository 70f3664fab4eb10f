"""Linear attention whose state decays, as TPU kernels.

One pass over chunks of 128 tokens, forward, and one back. The state of a head stays in
VMEM, values × features, so that what fades by channel lies along lanes; the state
before each chunk is saved for the backward pass, in the dtype of the products. How
pairs and states fade is in `fading.py`.

What does not wait for each other stands side by side, all levels of one product before
the next: the compiler moves no product far, and so keeps the MXU busy. With a decay a
channel a chunk of a head of 128 then takes 1,549 bundles of v5e forward instead of
2,393, and 2,999 backward instead of 4,557.

Heads lie in tiles as `lanes.py` says. States of packed heads are one block-diagonal
matrix.
"""

import math
from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from symjax.attention.kernels.tpu.chunks import Chunks, Kernels, Plan
from symjax.attention.kernels.tpu.decays import (
    BLOCK,
    DIAGONAL,
    LEVELS,
    SINCE,
    UNTIL,
    Fading,
    exponents,
    fading_of,
    pairs_of,
)
from symjax.attention.kernels.tpu.lanes import of_heads, own
from symjax.attention.kernels.tpu.tiles import (
    ACROSS,
    PLAIN,
    TURNED,
    mxu_passes,
    product,
)


class Operands(NamedTuple):
    """Inputs of both kernels, or their blocks. Heads lie side by side in lanes."""

    query: Any  # [B T N·H]
    key: Any  # [B T K·H], K = N / plan.sharing
    value: Any  # [B T K·V]
    by_channel: Any  # log-decays, their bfloat16 parts: [parts B T K·H], or None
    by_head: Any  # log-decays [B N/P P T], or None
    sums: Any  # of `fading.constants`
    levels: Any
    beta: Any = None  # of the delta rule, [B N/P P T]

    def chunk(self, i: int):
        """One chunk of blocks that hold several."""
        here = pl.ds(i * BLOCK, BLOCK)
        query, key, value = (x.at[here] for x in self[:3])
        of_tokens = "by_channel", "by_head", "beta"
        there = [x for x in of_tokens if getattr(self, x) is not None]
        return self._replace(
            query=query,
            key=key,
            value=value,
            **{x: getattr(self, x).at[:, here] for x in there},
        )


def _forward(plan: Plan, given: Operands, output, before, state) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _():
        state[...] = jnp.zeros_like(state)

    before[...] = state[...].astype(before.dtype)
    query, key, value = (x[...] for x in given[:3])
    dtype, wide = value.dtype, jnp.float32
    wide_query, wide_key = query.astype(wide), key.astype(wide)
    heads, fading = range(plan.packed), fading_of(plan, given)
    scores = scores_of(plan, given, fading, wide_query, wide_key)
    rows = product((wide_query * fading.since).astype(dtype), before[...], ACROSS)
    for i in heads:
        own_value = own(value, plan.value_size, i)
        rows += product(scores[i].astype(dtype), own_value, PLAIN)
    output[...] = rows.astype(output.dtype)
    new = product(value, (wide_key * fading.until).astype(dtype), TURNED)
    state[...] = state[...] * fading.through + of_heads(plan.sizes, new)


def _backward(
    plan: Plan,
    given: Operands,
    change,
    before,
    query_out,
    key_out,
    value_out,
    decay_out,
    grown,
) -> None:
    """`grown` is the gradient of the state after the chunk, then of the one before."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        grown[...] = jnp.zeros_like(grown)

    query, key, value, change = (x[...] for x in (*given[:3], change))
    dtype, wide = value.dtype, jnp.float32
    change = change.astype(dtype)
    wide_query, wide_key = query.astype(wide), key.astype(wide)
    fading = fading_of(plan, given)
    scores = scores_of(plan, given, fading, wide_query, wide_key)
    (query_change,), key_change, decay_change = through_pairs(
        plan, given, fading, [wide_query], wide_key, [change], value, [scores]
    )
    asking, joining = wide_query * fading.since, wide_key * fading.until
    later = grown[...].astype(dtype)
    of_query = product(change, before[...], PLAIN)
    of_key = product(value, later, PLAIN)
    query_change += of_query * fading.since
    key_change += of_key * fading.until
    query_out[...] = query_change.astype(query_out.dtype)
    key_out[...] = key_change.astype(key_out.dtype)
    decay_change += fading.grown(SINCE, of_query * asking)
    decay_change += fading.grown(UNTIL, of_key * joining)
    of_state = grown[...] * before[...].astype(wide) * fading.through
    of_state = of_state.sum(axis=0, keepdims=True)
    decay_out[...] = decay_change + fading.grown_by_state(of_state)
    value_change = product(joining.astype(dtype), later, ACROSS)
    for i, x in enumerate(scores):
        own_change = own(change, plan.value_size, i)
        value_change += product(x.astype(dtype), own_change, TURNED)
    value_out[...] = value_change.astype(value_out.dtype)
    here = product(change, asking.astype(dtype), TURNED)
    grown[...] = grown[...] * fading.through + of_heads(plan.sizes, here)


def scores_of(
    plan: Plan,
    given: Operands,
    fading: Fading,
    asking: Float[Array, "c P*H"],
    key: Float[Array, "c P*H"],
    with_own: bool = True,
) -> list[Float[Array, "c c"]]:
    """x_t·k_s of each head with s ≤ t, or of earlier keys alone, faded."""
    dtype, found = given.value.dtype, []
    faded = [(key * factor).astype(dtype) for factor in fading.factors]
    for i in range(plan.packed):
        mine = own(asking, plan.head_size, i)
        scores = jnp.zeros((BLOCK, BLOCK), jnp.float32)
        if with_own:
            whole = product(mine.astype(dtype), key.astype(dtype), ACROSS)
            scores = jnp.where(pairs_of(given.levels, DIAGONAL), whole, scores)
        rows = [(mine * factor).astype(dtype) for factor in fading.factors]
        by_level = [product(x, y, ACROSS) for x, y in zip(rows, faded, strict=True)]
        for level, x in zip(fading.levels, by_level, strict=True):
            scores = jnp.where(pairs_of(given.levels, level), x, scores)
        found.append(scores * fading.weights[i])
    return found


def through_pairs(
    plan: Plan,
    given: Operands,
    fading: Fading,
    askers: list[Float[Array, "c P*H"]],
    key: Float[Array, "c P*H"],
    rows: list[Float[Array, "c P*V"]],
    written: Float[Array, "c P*V"],
    scores: list[list[Float[Array, "c c"]]],
) -> tuple[list[Array], Array, Any]:
    """Gradients of what asks, of keys and of log-decays, through the pairs of a chunk.

    Args:
        askers: queries; what else asks does not see its own key.
        rows: the gradients of the rows that each asker reads.
        written: at the keys.
        scores: of each asker, by head.
    """
    dtype, heads = written.dtype, range(plan.packed)
    gradients = []  # of each head's pairs, [t s] and [s t], by asker
    grown = []  # by the exponents of each head's pairs
    for i in heads:
        mine = [own(x, plan.value_size, i) for x in rows]
        by_row = [product(x, written, ACROSS) for x in mine]
        both = zip(by_row, scores, strict=True)
        grown.append(reduce(jnp.add, [x * y[i] for x, y in both]))
        here, turned = fading.weights[i], fading.turned_weights[i]
        gradients.append(
            [
                (x * here, product(written, y, ACROSS) * turned)
                for x, y in zip(by_row, mine, strict=True)
            ]
        )

    def of_level(level: int, asking: list[Array], faded: Array) -> tuple[list, Array]:
        of_faded = jnp.zeros_like(faded)
        of_asking = [of_faded] * len(asking)
        for i in heads:
            past = own(faded, plan.head_size, i).astype(dtype)
            for j, x in enumerate(asking):
                row = own(x, plan.head_size, i).astype(dtype)
                by_row, by_key = (
                    jnp.where(pairs_of(given.levels, level, turned), y, 0).astype(dtype)
                    for turned, y in enumerate(gradients[i][j])
                )
                of_asking[j] += product(by_row, past, PLAIN)
                of_faded += product(by_key, row, PLAIN)
        return of_asking, of_faded

    (first,), key_change = of_level(DIAGONAL, askers[:1], key)
    changes = [first, *[jnp.zeros_like(first)] * (len(askers) - 1)]
    asked = [([x * factor for x in askers], key * factor) for factor in fading.factors]
    found = [of_level(x, *y) for x, y in zip(fading.levels, asked, strict=True)]
    decay_change = fading.grown_by_pairs(grown)
    for i, (of_asking, of_faded) in enumerate(found):
        asking, faded = asked[i]
        of_sums = of_faded * faded
        for j, x in enumerate(of_asking):
            changes[j] += x * fading.factors[i]
            of_sums += x * asking[j]
        key_change += of_faded * fading.factors[i]
        decay_change += fading.grown(fading.levels[i], of_sums)
    return changes, key_change, decay_change


def levels_of(operands: Operands) -> int:
    """How many levels of pairs there are, beside those of a token with itself."""
    return 1 if operands.by_channel is None else LEVELS


def recurrent(
    name: str, forward: Any, backward: Any, kept: Any, products: Any, together: int = 1
) -> Kernels:
    """The kernels of a recurrence, by the passes of the MXU that `products` counts: of
    a chunk's rows over a tile of 128 columns, forward and back."""

    def cost(plan: Plan, operands: Operands) -> list[tuple[int, int]]:
        tokens = math.prod(plan.grid) * plan.block
        counts = zip(products(plan, operands), exponents(plan, operands), strict=True)
        return [
            (2 * tokens * (x + sums) * BLOCK * plan.widths[1], tokens * exponentials)
            for x, (sums, exponentials) in counts
        ]

    def states(plan: Plan, operands: Operands) -> list[list]:
        return [[plan.widths]] * 2

    return Kernels(
        name,
        forward,
        backward,
        _specs,
        kept,
        states,
        cost,
        more=_more,
        shared=4,
        together=together,
    )


def _specs(plan: Plan, operands: Operands, chunks: Chunks) -> Operands:
    values, keys = plan.widths
    by_channel = None
    if operands.by_channel is not None:
        shape = operands.by_channel.shape[0], None, plan.block, keys
        by_channel = pl.BlockSpec(
            shape, lambda b, n, i: (0, b, chunks.turn(i), chunks.key_head(n))
        )
    return Operands(
        chunks.by_query(keys),
        chunks.by_key(keys),
        chunks.by_key(values),
        by_channel,
        chunks.of_tiles(operands.by_head),
        chunks.whole(operands.sums),
        chunks.whole(operands.levels),
        chunks.of_tiles(operands.beta),
    )


def _more(operands: Operands, specs: Operands) -> list[tuple]:
    """Log-decays, those of channels by query head, and β."""
    found = []
    if operands.by_channel is not None:
        found.append((operands.query, specs.query))
    of_heads = (operands.by_head, specs.by_head), (operands.beta, specs.beta)
    return found + [(x, spec) for x, spec in of_heads if x is not None]


def _kept(plan: Plan, operands: Operands) -> list[tuple]:
    """The state before a chunk."""
    return [(plan.widths, operands.value.dtype)]


def _products(plan: Plan, operands: Operands) -> tuple[int, int]:
    levels, each = levels_of(operands), mxu_passes(operands.value.dtype)
    forward, backward = levels + 2, 3 * levels + 6
    return each * (plan.packed * forward + 2), each * (plan.packed * backward + 4)


DECAY = recurrent("decay", _forward, _backward, _kept, _products)
