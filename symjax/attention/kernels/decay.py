"""Linear attention whose state decays by channel, as TPU kernels.

One pass over chunks of 128 tokens, forward, and one back. The state of a head stays in
VMEM, values × features, so that what fades by channel lies along lanes; the state
before each chunk is saved for the backward pass, in the dtype of the products.

Pairs of a chunk are those of `faded.py`: the later half of each block of 2, 4, … 128
tokens looks at the earlier half, and both fade towards the boundary between them, so
that no factor is above 1 and nothing is divided. The exponents of a level are sums of
log-decays, which is a product with a matrix of 0 and 1; log-decays come in bfloat16
parts, three for float32, which lose nothing, and two where the operands are bfloat16.
Each level is one product of all 128 rows and keys, from which its pairs are taken.

Heads lie in tiles as `lanes.py` says. States of packed heads are one block-diagonal
matrix.
"""

import math
from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from symjax.attention.kernels.blocks import (
    ACROSS,
    LANES,
    PLAIN,
    TURNED,
    in_parts,
    product,
)
from symjax.attention.kernels.lanes import of_heads, own
from symjax.attention.kernels.passes import Chunks, Kernels, Plan

BLOCK = LANES  # tokens of a chunk
LEVELS = BLOCK.bit_length() - 1
DIAGONAL, LATER = -1, LEVELS  # levels of a token with itself, and with later ones
ALL = -2  # levels but these
PARTS = {"bfloat16": 2, "float32": 3}  # of log-decays
SINCE, UNTIL = LEVELS, LEVELS + 1  # sums from the chunk's start, and until its end


class Operands(NamedTuple):
    """Inputs of both kernels, or their blocks. Heads lie side by side in lanes."""

    query: Any  # [B T N·H]
    key: Any  # [B T K·H], K = N / plan.sharing
    value: Any  # [B T K·V]
    decay: Any  # logarithms, their bfloat16 parts: [parts B T K·H], or None
    sums: Any  # [2 LEVELS+2 c c] of 0 and 1, and each matrix transposed, or None
    levels: Any  # [2 c c] of rows and keys, and of keys and rows
    beta: Any = None  # of the delta rule, [B N/P P T]


def constants(fades: bool) -> tuple[Array | None, Array]:
    """`sums` and `levels` of the operands."""
    row, other = np.arange(BLOCK)[:, None], np.arange(BLOCK)
    sums = []
    for level in range(LEVELS):
        same = row >> level == other >> level
        later = (row >> level) % 2 == 1
        sums.append(same & np.where(later, other <= row, other > row))
    sums += [other <= row, other > row]
    levels = np.frexp(row ^ other)[1] - 1  # the highest bit that differs; -1: none
    levels = np.where(other <= row, levels, LATER).astype(np.int32)
    both = np.stack([levels, levels.T])
    sums = np.stack([np.stack(sums), np.stack([x.T for x in sums])])
    return jnp.asarray(sums, jnp.bfloat16) if fades else None, jnp.asarray(both)


def _forward(plan: Plan, given: Operands, output, before, state) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _():
        state[...] = jnp.zeros_like(state)

    before[...] = state[...].astype(before.dtype)
    query, key, value = (x[...] for x in given[:3])
    dtype, wide = value.dtype, jnp.float32
    wide_query, wide_key = query.astype(wide), key.astype(wide)
    heads = range(plan.packed)
    queries = [own(wide_query, plan.head_size, i) for i in heads]
    scores = [_of_level(given, DIAGONAL, x.astype(dtype), key, 0) for x in queries]
    for level in range(LEVELS):
        fading = fade(given, level)
        faded = (wide_key * fading).astype(dtype)
        for i in heads:
            asking = (queries[i] * fading).astype(dtype)
            scores[i] = _of_level(given, level, asking, faded, scores[i])
    since, until = fade(given, SINCE), fade(given, UNTIL)
    rows = product((wide_query * since).astype(dtype), before[...], ACROSS)
    for i in heads:
        own_value = own(value, plan.value_size, i)
        rows += product(scores[i].astype(dtype), own_value, PLAIN)
    output[...] = rows.astype(output.dtype)
    new = product(value, (wide_key * until).astype(dtype), TURNED)
    state[...] = state[...] * through(given, since) + of_heads(plan.sizes, new)


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
    heads = range(plan.packed)
    changes = [own(change, plan.value_size, i) for i in heads]
    pairs = [(product(x, value, ACROSS), product(value, x, ACROSS)) for x in changes]

    def of_pairs(level: int, asking: Array, faded: Array, scores: list) -> tuple:
        """The gradients of these, of the pairs of a level; `scores` gets them."""
        of_query = of_key = jnp.zeros_like(asking)
        for i in heads:
            row, past = (
                own(x, plan.head_size, i).astype(dtype) for x in (asking, faded)
            )
            scores[i] = _of_level(given, level, row, past, scores[i])
            by_row, by_key = (
                jnp.where(pairs_of(given, level, j), x, 0).astype(dtype)
                for j, x in enumerate(pairs[i])
            )
            of_query += product(by_row, past, PLAIN)
            of_key += product(by_key, row, PLAIN)
        return of_query, of_key

    scores: list = [0] * plan.packed
    query_change, key_change = of_pairs(DIAGONAL, wide_query, wide_key, scores)
    decay_change = jnp.zeros_like(query_change)
    for level in range(LEVELS):
        fading = fade(given, level)
        asking, faded = wide_query * fading, wide_key * fading
        of_query, of_key = of_pairs(level, asking, faded, scores)
        query_change += of_query * fading
        key_change += of_key * fading
        decay_change += grown_by(given, level, of_query * asking + of_key * faded)

    since, until = fade(given, SINCE), fade(given, UNTIL)
    left = through(given, since)
    asking, joining = wide_query * since, wide_key * until
    later = grown[...].astype(dtype)
    of_query = product(change, before[...], PLAIN)
    of_key = product(value, later, PLAIN)
    query_change += of_query * since
    key_change += of_key * until
    query_out[...] = query_change.astype(query_out.dtype)
    key_out[...] = key_change.astype(key_out.dtype)
    decay_change += grown_by(given, SINCE, of_query * asking)
    decay_change += grown_by(given, UNTIL, of_key * joining)
    of_state = grown[...] * before[...].astype(wide) * left
    decay_out[...] = decay_change + of_state.sum(axis=0, keepdims=True)
    value_change = product(joining.astype(dtype), later, ACROSS)
    for i in heads:
        value_change += product(scores[i].astype(dtype), changes[i], TURNED)
    value_out[...] = value_change.astype(value_out.dtype)
    here = product(change, asking.astype(dtype), TURNED)
    grown[...] = grown[...] * left + of_heads(plan.sizes, here)


def fade(given: Operands, level: int) -> Float[Array, "c P*H"] | float:
    """exp of the sums of log-decays that a level's matrix takes."""
    if given.decay is None:
        return 1.0
    parts = [given.decay[i] for i in range(given.decay.shape[0])]
    return jnp.exp(_summed(given.sums[0, level], parts))


def grown_by(
    given: Operands, level: int, change: Array
) -> Float[Array, "c P*H"] | float:
    """The gradient of log-decays by that of a level's sums."""
    if given.decay is None:
        return 0.0
    parts = in_parts(change, given.decay.shape[0])
    return _summed(given.sums[1, level], parts)


def _summed(matrix: Array, parts: list[Array]) -> Float[Array, "c P*H"]:
    return reduce(jnp.add, [product(matrix, x, PLAIN) for x in parts])


def pairs_of(given: Operands, level: int, turned: int = 0) -> Bool[Array, "c c"]:
    """The pairs of a level: of rows and keys, or `turned`, of keys and rows."""
    levels = given.levels[turned]
    if level == ALL:
        return (levels != DIAGONAL) & (levels != LATER)
    return levels == level


def _of_level(given: Operands, level: int, query: Array, key: Array, other: Any):
    """The products of the pairs of a level; elsewhere `other`."""
    return jnp.where(pairs_of(given, level), product(query, key, ACROSS), other)


def through(given: Operands, since: Any) -> Any:
    """The decay of all of a chunk."""
    return since if given.decay is None else since[BLOCK - 1 :]


def levels_of(given: Operands) -> tuple[int, ...]:
    """Of pairs; without decays all that are not of a token with itself are one."""
    return (ALL,) if given.decay is None else tuple(range(LEVELS))


def passes(operands: Operands) -> int:
    """Of the MXU for a product of the operands."""
    return 6 if operands.value.dtype == jnp.float32 else 1


def recurrent(
    name: str, forward: Any, backward: Any, kept: Any, products: Any
) -> Kernels:
    """The kernels of a recurrence, by the passes of the MXU that `products` counts: of
    a chunk's rows over a tile of 128 columns, forward and back."""

    def cost(plan: Plan, operands: Operands) -> list[tuple[int, int]]:
        tokens = math.prod(plan.grid) * BLOCK
        width, taken, exponents = plan.widths[1], 0, 0
        if operands.decay is not None:  # sums of log-decays are taken, then given back
            taken = operands.decay.shape[0] * (LEVELS + 2)
            exponents = tokens * width * (LEVELS + 2)
        counts = [x + i * taken for i, x in enumerate(products(plan, operands), 1)]
        return [(2 * tokens * x * BLOCK * width, exponents) for x in counts]

    def states(plan: Plan, operands: Operands) -> list[list]:
        return [[plan.widths]] * 2

    return Kernels(
        name, forward, backward, _specs, kept, states, cost, more=_more, shared=4
    )


def _specs(plan: Plan, operands: Operands, chunks: Chunks) -> Operands:
    values, keys = plan.widths
    decay = beta = None
    if operands.decay is not None:
        shape = operands.decay.shape[0], None, BLOCK, keys
        decay = pl.BlockSpec(
            shape, lambda b, n, i: (0, b, chunks.turn(i), chunks.key_head(n))
        )
    if operands.beta is not None:
        shape = None, None, plan.packed, BLOCK
        beta = pl.BlockSpec(shape, lambda b, n, i: (b, n, 0, chunks.turn(i)))
    tokens = chunks.by_query(keys), chunks.by_key(keys), chunks.by_key(values)
    constant = chunks.whole(operands.sums), chunks.whole(operands.levels)
    return Operands(*tokens, decay, *constant, beta)


def _more(operands: Operands, specs: Operands) -> list[tuple]:
    """Log-decays, by query head, and β."""
    decay, beta = operands.decay, operands.beta
    found = [] if decay is None else [(operands.query, specs.query)]
    return found if beta is None else [*found, (beta, specs.beta)]


def _kept(plan: Plan, operands: Operands) -> list[tuple]:
    """The state before a chunk."""
    return [(plan.widths, operands.value.dtype)]


def _products(plan: Plan, operands: Operands) -> tuple[int, int]:
    forward, backward = LEVELS + 2, 3 * LEVELS + 6
    each = passes(operands)
    return each * (plan.packed * forward + 2), each * (plan.packed * backward + 4)


DECAY = recurrent("decay", _forward, _backward, _kept, _products)
