"""Causal Performer and linear attention as TPU kernels.

Features of the Performer are made in here and never kept in memory; others are given.

One pass over chunks of time, forward, and one back. The state, features × values of a
head, stays in VMEM, transposed: what fades by feature then lies along lanes. Exponents
are to base 2 and refer to a running maximum that is rounded up to an integer, so that a
state fades by powers of 2, exactly. Kept for the way back are the state before each
chunk, in the dtype of the operands, and the denominator of each row.

A value is read with ones beside it: numerator and denominator are lanes of one product.
Heads of 64 lie two by two in a tile of 128 lanes, as projections leave them, and are
not taken apart: their projection is block-diagonal, and the ones of one head stand
where the values of the other are.

Products are of the operands as they are (float32 ones with all their bits), sums are
float32, and the projection counts by two bfloat16 parts where operands are bfloat16: an
error of an exponent is a factor of a feature. A row whose keys a later key of its chunk
pushed out of float32 is computed once more by itself, with its own highest exponent.
"""

from collections.abc import Iterable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from symjax.attention.kernels import blocks, lanes
from symjax.attention.kernels.blocks import (
    ACROSS,
    LANES,
    LOG2E,
    PLAIN,
    TURNED,
    column,
    product,
)
from symjax.attention.kernels.seen import Seen, seen_in_chunk, where

EMPTY = -1e30  # the running maximum before the first key
LOST = 1e-20  # a denominator below this has lost its keys


class Plan(NamedTuple):
    """The static half of a call."""

    batch: int
    heads: int
    groups: int  # heads that share keys and values
    packed: int  # heads in one tile of lanes
    length: int
    head_size: int
    value_size: int
    features: int
    given: bool  # the features themselves, not what they are made of
    block: int
    interpret: Any

    @property
    def width(self) -> int:
        """Lanes of a head's values and the ones beside them."""
        return LANES if self.packed > 1 else self.value_size + LANES

    def lane_of_ones(self, head: int) -> int:
        if self.packed == 1:
            return self.value_size
        return (head + 1) % self.packed * self.value_size

    def dtype(self, value: Any) -> Any:
        """That of operands of products: features that are given stay exact."""
        return jnp.float32 if self.given else value.dtype

    def of_head(self, head: int) -> slice:
        return slice(head * self.features, (head + 1) * self.features)


class Operands(NamedTuple):
    """Inputs of both kernels, or their blocks. Heads lie side by side in lanes."""

    query: Any  # [B T N·H], or features that are given, in float32
    key: Any
    value: Any  # [B T N·V]
    rows: Any  # of the projection, times √scale log₂ e: [parts M H] of packed heads; or
    #   None where features are given, none negative, those of hidden keys 0
    offset: Any  # of all exponents, [1 M] of packed heads
    norm: Any  # [1]: what |k|² takes from a key's exponents
    flags: Any  # [B 1 T], or None where all tokens are visible and of one segment
    segment: Any  # [B 1 T], or None


class Weights(NamedTuple):
    """Of the features of a head in a chunk, at most 1."""

    row: Float[Array, "c M"]
    key: Float[Array, "c M"]
    fade: Float[Array, "1 M"]  # of the state before, for the rows
    joining: Float[Array, "c M"]  # of the keys, for the state after
    after: Float[Array, "1 M"]  # the running maximum of that state
    left: Float[Array, "1 M"]  # what it has of the state before


def forward(plan: Plan, operands: Operands, keep: bool) -> list:
    """The output [B T N·V], and if `keep` what `backward` needs: 1/denominator of each
    row, negative where it was lost; the states before chunks; their running maxima."""
    value, count = operands.value, plan.length // plan.block
    groups = plan.heads // plan.packed
    specs, kept = _specs(plan, operands, lambda i: i)
    whole = (
        (plan.batch, groups, plan.packed, plan.length),
        (plan.batch, groups, count, plan.packed, plan.width, plan.features),
        (plan.batch, groups, count, plan.packed, plan.features),
    )
    dtypes = jnp.float32, plan.dtype(value), jnp.float32
    results = [blocks.result(value, value.shape, plan.dtype(value))]
    scratch = [
        pltpu.VMEM((plan.packed, plan.width, plan.features), jnp.float32),
        pltpu.VMEM((plan.packed, plan.features), jnp.float32),
        pltpu.VMEM((plan.packed, plan.block, plan.width), jnp.float32),
    ]
    for x, spec, dtype in zip(whole, kept, dtypes, strict=True):
        if keep:
            results.append(blocks.result(value, x, dtype))
        else:
            block = [y for y in spec.block_shape if y is not None]
            scratch.insert(len(scratch) - 3, pltpu.VMEM(block, dtype))
    products = _products(plan, operands, exponents=2, square=2, state=2)
    return pl.pallas_call(
        partial(_forward, plan),
        out_shape=results,
        grid=(plan.batch, groups, count),
        in_specs=[specs],
        out_specs=[specs.value, *(kept if keep else ())],
        scratch_shapes=scratch,
        compiler_params=blocks.compiler(2, 1),
        cost_estimate=_cost(plan, products, [operands, results]),
        interpret=plan.interpret,
        name="performer_forward",
    )(operands)


def backward(
    plan: Plan, operands: Operands, change: Array, output: Array, kept: list
) -> list[Array]:
    """Gradients of query, key and value, as they are in `operands`: float32 ones where
    those of several heads will be summed."""
    groups, count = plan.heads // plan.packed, plan.length // plan.block
    specs, kept_specs = _specs(plan, operands, lambda i: count - 1 - i)
    results = [
        blocks.result(x, x.shape, jnp.float32 if i and plan.groups > 1 else x.dtype)
        for i, x in enumerate(operands[:3])
    ]
    of_features = plan.packed, plan.block, plan.features
    products = _products(plan, operands, exponents=4, square=5, state=4)
    return pl.pallas_call(
        partial(_backward, plan),
        out_shape=results,
        grid=(plan.batch, groups, count),
        in_specs=[specs, specs.value, specs.value, *kept_specs],
        out_specs=list(specs[:3]),
        scratch_shapes=[
            pltpu.VMEM(shape, jnp.float32)
            for shape in (
                (plan.packed, plan.width, plan.features),
                of_features,
                of_features,
                (plan.packed, plan.block, plan.width),
            )
        ],
        compiler_params=blocks.compiler(2, 1),
        cost_estimate=_cost(plan, products, [operands, change, output, kept, results]),
        interpret=plan.interpret,
        name="performer_backward",
    )(operands, change, output, *kept)


def _specs(plan: Plan, operands: Operands, turn: Any) -> tuple[Operands, list]:
    """The blocks of operands, and of what is kept, for chunk `turn(i)` in turn i."""

    def of_tokens(width: int) -> pl.BlockSpec:
        shape = None, plan.block, plan.packed * width
        return pl.BlockSpec(shape, lambda b, n, i: (b, turn(i), n))

    def whole(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda b, n, i: (0,) * x.ndim)

    def by_row(x: Any) -> pl.BlockSpec | None:
        shape = None, 1, plan.block
        return (
            None if x is None else pl.BlockSpec(shape, lambda b, n, i: (b, 0, turn(i)))
        )

    rows = None, None, plan.packed, plan.block
    states = None, None, None, plan.packed, plan.width, plan.features
    peaks = *states[:4], plan.features
    kept = [
        pl.BlockSpec(rows, lambda b, n, i: (b, n, 0, turn(i))),
        pl.BlockSpec(states, lambda b, n, i: (b, n, turn(i), 0, 0, 0)),
        pl.BlockSpec(peaks, lambda b, n, i: (b, n, turn(i), 0, 0)),
    ]
    specs = Operands(
        of_tokens(plan.head_size),
        of_tokens(plan.head_size),
        of_tokens(plan.value_size),
        None if operands.rows is None else whole(operands.rows),
        None if operands.offset is None else whole(operands.offset),
        None if operands.norm is None else pl.BlockSpec(memory_space=pltpu.SMEM),
        by_row(operands.flags),
        by_row(operands.segment),
    )
    return specs, kept


def _forward(
    plan: Plan, given: Operands, output, inverse, before, highest, sums, peak, rows
) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _():
        sums[...] = jnp.zeros_like(sums)
        peak[...] = jnp.full_like(peak, EMPTY)

    before[...] = sums[...].astype(before.dtype)
    highest[...] = peak[...]
    seen, exponents = _seen(given), _exponents(plan, given)
    lost = []
    for head in range(plan.packed):
        query, key = _of_head(plan, seen, exponents, head)
        weights = _weights(plan, seen, query, key, highest[head : head + 1, :])
        values = _values(plan, given, head)
        dtype = values.dtype
        row, past = weights.row.astype(dtype), _faded(before[head], weights.fade)
        scores = product(row, weights.key.astype(dtype), ACROSS)
        scores = jnp.where(seen.pairs, scores, 0).astype(dtype)
        earlier = where(seen.reaches, product(row, past, ACROSS), 0)
        rows[head] = product(scores, values, PLAIN) + earlier
        least = 0.0 if plan.given else LOST
        lost.append(jnp.where(_ones(plan, rows, head) < least, 1.0, 0.0))
        if seen.sees is not None:
            lost[head] *= seen.sees
        new = product(values, weights.joining.astype(dtype), TURNED)
        sums[head] = sums[head] * weights.left + new
        peak[head : head + 1, :] = weights.after

    def rescue(head: int, seen: Seen, query: Array, key: Array, t) -> None:
        own, past = _exactly(t, seen, query, key, highest[head : head + 1, :])
        values = _values(plan, given, head).astype(jnp.float32)
        near = (own.sum(axis=-1, keepdims=True) * values).sum(axis=0, keepdims=True)
        past = jnp.broadcast_to(past, (8, plan.features))
        earlier = product(past, before[head].astype(jnp.float32), ACROSS)
        rows[head, pl.ds(t, 1), :] = near + earlier[:1]

    _each_lost(plan, given, lost, rescue)
    results = []
    for head in range(plan.packed):
        total = _ones(plan, rows, head)
        scale = jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0)
        results.append(rows[head] * scale)
        blocks.write_row(inverse, head, jnp.where(lost[head] > 0, -scale, scale))
    output[...] = _joined(plan, results, plan.value_size).astype(output.dtype)


def _ones(plan: Plan, rows: Any, head: int) -> Float[Array, "c 1"]:
    """What a head's weights add up to."""
    lane = plan.lane_of_ones(head)
    return rows[head, :, lane : lane + 1]


def _backward(
    plan: Plan,
    given: Operands,
    change,
    output,
    inverse,
    before,
    highest,
    query_out,
    key_out,
    value_out,
    grown,
    query_change,
    key_change,
    value_change,
) -> None:
    """`grown` is the gradient of the state after the chunk, then of the one before."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        grown[...] = jnp.zeros_like(grown)

    seen, exponents = _seen(given), _exponents(plan, given)
    turned = change[...].astype(jnp.float32) * output[...].astype(jnp.float32)
    scales, changes = [], []
    for head in range(plan.packed):
        query, key = _of_head(plan, seen, exponents, head)
        weights = _weights(plan, seen, query, key, highest[head : head + 1, :])
        values = _values(plan, given, head)
        dtype, past = values.dtype, _faded(before[head], weights.fade)
        along = _own(plan, turned, head).sum(axis=-1, keepdims=True)
        own = _beside(plan, change[...].astype(jnp.float32), head, 0)
        lane = jax.lax.broadcasted_iota(jnp.int32, own.shape, 1)
        changes.append(jnp.where(lane == plan.lane_of_ones(head), -along, own))
        read = where(seen.reaches, changes[head], 0).astype(dtype)
        grow = changes[head].astype(dtype)
        scales.append(column(inverse[head : head + 1, :]))
        weighed = weights.row * jnp.maximum(scales[head], 0)
        row, keys = weighed.astype(dtype), weights.key.astype(dtype)
        scores = jnp.where(seen.pairs, product(row, keys, ACROSS), 0).astype(dtype)
        pairs = product(grow, values, ACROSS)
        pairs = jnp.where(seen.pairs, pairs, 0).astype(dtype)
        later = grown[head].astype(dtype)
        both = product(pairs, keys, PLAIN) + product(read, past, PLAIN)
        near, far = product(pairs, row, TURNED), product(values, later, PLAIN)
        if plan.given:
            query_change[head] = both * scales[head]
            key_change[head] = near + where(seen.joins, far, 0)
        else:
            query_change[head] = both * weighed
            key_change[head] = near * weights.key + far * weights.joining
        value_change[head] = product(scores, grow, TURNED) + product(
            weights.joining.astype(dtype), later, ACROSS
        )
        here = product(read, row, TURNED) * weights.fade
        grown[head] = grown[head] * weights.left + here

    def rescue(head: int, seen: Seen, query: Array, key: Array, t) -> None:
        state = before[head].astype(jnp.float32)
        own, past = _exactly(t, seen, query, key, highest[head : head + 1, :])
        values = _values(plan, given, head).astype(jnp.float32)
        grow = _pick(changes[head], t) * -_pick(scales[head], t)
        pairs = own * (values * grow).sum(axis=-1, keepdims=True)
        first = jax.lax.broadcasted_iota(jnp.int32, (8, plan.width), 0) == 0
        first = jnp.where(first, grow, 0.0)
        of_past = past * product(first, state, PLAIN)[:1]
        query_change[head, pl.ds(t, 1), :] = pairs.sum(axis=0, keepdims=True) + of_past
        key_change[head] += pairs
        value_change[head] += own.sum(axis=-1, keepdims=True) * grow
        past = jnp.broadcast_to(past, (8, plan.features))
        grown[head] += product(first, past, TURNED)

    _each_lost(plan, given, [jnp.where(x < 0, 1.0, 0.0) for x in scales], rescue)
    values = [value_change[head] for head in range(plan.packed)]
    value_out[...] = _joined(plan, values, plan.value_size).astype(value_out.dtype)
    if plan.given:
        for out, found in ((query_out, query_change), (key_out, key_change)):
            parts = [found[head] for head in range(plan.packed)]
            out[...] = _joined(plan, parts, plan.features).astype(out.dtype)
        return
    query_out[...] = _from_exponents(plan, given, query_change).astype(query_out.dtype)
    key_grown = _from_exponents(plan, given, key_change)
    for head in range(plan.packed):
        total = key_change[head].sum(axis=-1, keepdims=True)
        own = _own(plan, given.key[...].astype(jnp.float32), head)
        key_grown -= own * (total * (2 / LOG2E * given.norm[0]))
    key_out[...] = key_grown.astype(key_out.dtype)


def _exponents(plan: Plan, given: Operands) -> list[Float[Array, "c P*M"]]:
    """Of the features of queries and of keys, to base 2, packed heads side by side; or
    the features that are given."""
    if given.rows is None:
        return [given.query[...], given.key[...]]
    query, key = (
        _sum(product(x[...], y, ACROSS) for y in _parts(given)) + given.offset[...]
        for x in (given.query, given.key)
    )
    square = given.key[...].astype(jnp.float32) ** 2
    norms = [
        _own(plan, square, head).sum(axis=-1, keepdims=True) * given.norm[0]
        for head in range(plan.packed)
    ]
    parts = [key[:, plan.of_head(i)] - norm for i, norm in enumerate(norms)]
    return [query, jnp.concatenate(parts, axis=1)]


def _of_head(
    plan: Plan, seen: Seen, exponents: list[Array], head: int
) -> list[Float[Array, "c M"]]:
    """Its exponents, those of hidden keys −∞."""
    if plan.given:
        return [_own(plan, x, head) for x in exponents]
    query, key = (x[:, plan.of_head(head)] for x in exponents)
    return [query, where(seen.visible, key, -jnp.inf)]


def _from_exponents(plan: Plan, given: Operands, change: Any) -> Float[Array, "c P*H"]:
    """The gradient of what exponents are made of, by w·x alone."""
    return _sum(
        product(change[head].astype(given.key.dtype), y[plan.of_head(head)], PLAIN)
        for head in range(plan.packed)
        for y in _parts(given)
    ) * (1 / LOG2E)


def _parts(given: Operands) -> list[Float[Array, "P*M P*H"]]:
    return [given.rows[i] for i in range(given.rows.shape[0])]


def _sum(parts: Iterable[Array]) -> Array:
    return reduce(jnp.add, parts)


def _weights(plan: Plan, seen: Seen, query: Array, key: Array, old: Array) -> Weights:
    """All but those of `joining` refer to the highest exponent in the chunk."""
    if plan.given:
        same, joining = jnp.ones_like(old), where(seen.joins, key, 0)
        return Weights(query, key, same, joining, old, where(seen.keeps, same, 0))
    highest = jnp.maximum(old, jnp.ceil(key.max(axis=0, keepdims=True)))
    raised = query + highest
    row = jnp.exp2(raised - raised.max(axis=-1, keepdims=True))
    weights, fade = jnp.exp2(key - highest), jnp.exp2(old - highest)
    if seen.joins is None:
        return Weights(row, weights, fade, weights, highest, fade)
    joining = where(seen.joins, key, -jnp.inf)
    old = where(seen.keeps, old, EMPTY)
    after = jnp.maximum(old, jnp.ceil(joining.max(axis=0, keepdims=True)))
    left = where(seen.keeps, jnp.exp2(old - after), 0)
    return Weights(row, weights, fade, jnp.exp2(joining - after), after, left)


def _faded(state: Float[Array, "w M"], fade: Float[Array, "1 M"]) -> Array:
    return (state.astype(jnp.float32) * fade).astype(state.dtype)


def _exactly(t, seen: Seen, query: Array, key: Array, old: Array) -> list[Array]:
    """Weights of row t with each key and feature, [c M], and of the state's features,
    [1 M]: all relative to the row's highest exponent."""
    own = _pick(query, t)
    index = jax.lax.broadcasted_iota(jnp.int32, (key.shape[0], 1), 0)
    near = jnp.where(index <= t, 1.0, 0.0)
    past = own + old
    if seen.segment is not None:
        near *= jnp.where(seen.segment == _pick(seen.segment, t), 1.0, 0.0)
        past = where(_pick(seen.reaches, t), past, -jnp.inf)
    pairs = where(near, key + own, -jnp.inf)
    shift = jnp.maximum(pairs.max(keepdims=True), past.max(keepdims=True))
    return [jnp.exp2(x - shift) for x in (pairs, past)]


def _pick(x: Array, t) -> Array:
    """Row t of an array [c n], as [1 n]."""
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(index == t, x, 0).sum(axis=0, keepdims=True)


def _each_lost(
    plan: Plan, given: Operands, lost: list[Float[Array, "c 1"]], rescue: Any
) -> None:
    """rescue(head, seen, query, key, t) for each lost row t of each head."""

    if plan.given:
        return

    @pl.when(_sum(lost).max() > 0)
    def _():
        seen, exponents = _seen(given), _exponents(plan, given)
        for head in range(plan.packed):
            query, key = _of_head(plan, seen, exponents, head)

            step = partial(rescue, head, seen, query, key)

            def body(t, _, some=lost[head], step=step) -> None:
                pl.when(_pick(some, t).max() > 0)(lambda: step(t))

            jax.lax.fori_loop(0, plan.block, body, None)


def _seen(given: Operands) -> Seen:
    return seen_in_chunk(given.query.shape[0], given.flags, given.segment)


def _own(plan: Plan, x: Array, head: int) -> Array:
    """Packed heads with 0 for all but one."""
    return x if plan.packed == 1 else lanes.own(x, plan.value_size, head)


def _values(plan: Plan, given: Operands, head: int) -> Float[Array, "c w"]:
    """With ones beside them, in the dtype of the operands of products."""
    value = given.value[...]
    return _beside(plan, value.astype(plan.dtype(value)), head, 1)


def _beside(plan: Plan, x: Array, head: int, other: Any) -> Float[Array, "c w"]:
    """The values of a head, and `other` in the lanes beside them."""
    if plan.packed > 1:
        return jnp.where(
            lanes.is_own(x.shape, plan.value_size, head), x, jnp.asarray(other, x.dtype)
        )
    tile = jnp.broadcast_to(jnp.asarray(other, x.dtype), (x.shape[0], LANES))
    return jnp.concatenate([x, tile], axis=1)


def _joined(plan: Plan, heads: list[Array], size: int) -> Array:
    """The values of packed heads, each from its own lanes."""
    if plan.packed == 1:
        return heads[0][:, :size]
    return _sum(_own(plan, x, i) for i, x in enumerate(heads))


def _products(
    plan: Plan, operands: Operands, *, exponents: int, square: int, state: int
) -> int:
    """Multiply-adds of a token and head, in whole tiles; float32 ones count as six."""
    lanes = LANES if plan.packed > 1 else plan.head_size
    parts = 0 if operands.rows is None else operands.rows.shape[0]
    features = exponents * parts * lanes + square * plan.block
    passes = 6 if plan.dtype(operands.value) == jnp.float32 else 1
    return passes * plan.features * (features + state * plan.width)


def _cost(plan: Plan, products: int, arrays: list) -> pl.CostEstimate:
    tokens = plan.batch * plan.heads * plan.length
    return pl.CostEstimate(
        flops=2 * tokens * products,
        transcendentals=2 * tokens * plan.features,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays)),
    )
