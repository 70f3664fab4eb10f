"""Causal cosine attention as TPU kernels: weights 1 + q̂·k̂, with x̂ = x / (|x| + 1e-6).

One pass over chunks of 128 tokens, forward, and one back. Directions are made in here
and never kept in memory. The constant feature takes no lane: a state is Σ k̂ vᵀ, Σ k̂,
Σ v and the number of its keys.

What cancels is taken around a centre, as in `plain_features.py` and `centred.py`.
Pairs of a chunk weigh |q̂ + k̂|²/2, where both are seen from m, the direction of its
keys, as long as the longest: |r|²/2 + |c|²/2 + r·c with r = q̂ + m and c = k̂ − m, and
the little by which directions are shorter than 1. A state is read around the mean of
its values: numerator and denominator then share their rounding.

All of this is float32. Products with inputs that are bfloat16 lose nothing by taking
the other operand in three bfloat16 parts, at half the cost of float32.

Heads lie in tiles as `lanes.py` says. States of packed heads are one block-diagonal
matrix. Saved for the backward pass are the centred states before chunks.
"""

import math
from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from symjax.attention.kernels import blocks
from symjax.attention.kernels.blocks import (
    ACROSS,
    LANES,
    PLAIN,
    TURNED,
    column,
    in_parts,
    product,
)
from symjax.attention.kernels.lanes import in_lanes, of_heads, own
from symjax.attention.kernels.passes import Chunks, Kernels, Plan
from symjax.attention.kernels.seen import VISIBLE, Seen, seen_in_chunk, where

BLOCK = LANES  # tokens of a chunk
EPSILON = 1e-6  # beside lengths
ROUNDING = float(jnp.finfo(jnp.float32).eps)


class Operands(NamedTuple):
    """Inputs of both kernels, or their blocks. Heads lie side by side in lanes."""

    query: Any  # [B T N·H]
    key: Any  # [B T K·H], K = N / plan.sharing
    value: Any  # [B T K·V]
    flags: Any  # [B 1 T], as `seen.py` describes tokens, or None
    segment: Any  # [B 1 T], or None


class Directions(NamedTuple):
    """x̂ of packed heads, all [c W]."""

    unit: Array
    length: Array  # |x|
    missing: Array  # 1 − |x̂|


class Weights(NamedTuple):
    """What both kernels find first. Lists have an entry a head."""

    query: Directions
    key: Directions
    row: Float[Array, "c P*H"]  # q̂ + m
    column: Float[Array, "c P*H"]  # k̂ − m
    pairs: list[Float[Array, "c c"]]
    past: list[Float[Array, "c 1"]]  # the sum of the weights of what the state holds
    reads: list[Float[Array, "c 1"]]  # 1: the state; 0: the mean of its values alone
    scales: list[Float[Array, "c 1"]]  # 1 / the sum of all weights


def _forward(
    plan: Plan, given: Operands, output, rest, totals, mean, sums, total, first, count
) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _():
        for x in (sums, total, first, count):
            x[...] = jnp.zeros_like(x)

    number = count[:, :1]
    mean[...] = first[...] / jnp.maximum(number, 1)
    totals[...] = jnp.concatenate([total[...], count[...]], axis=0)
    rest[...] = _around(plan, sums[...], total[...], mean[...])
    seen, value = _seen(given), given.value[...]
    found = _weights(plan, given, seen, totals)
    past = product(found.query.unit, rest[...], ACROSS)
    past = where(in_lanes(found.reads, past.shape), past, 0)
    rows = past + in_lanes(found.past, past.shape) * mean[...]
    for head, pairs in enumerate(found.pairs):
        rows += _exact(pairs, own(value, plan.value_size, head), PLAIN)
    rows *= in_lanes(found.scales, rows.shape)
    output[...] = rows.astype(output.dtype)

    keys = where(seen.joins, found.key.unit, 0)
    new = of_heads(plan.sizes, _exact(value, keys, TURNED))
    sums[...] = where(seen.keeps, sums[...], 0) + new
    total[...] = where(seen.keeps, total[...], 0) + _over_time(keys)
    value = where(seen.joins, value.astype(jnp.float32), 0)
    first[...] = where(seen.keeps, first[...], 0) + _over_time(value)
    joined = jnp.ones_like(keys) if seen.visible is None else seen.visible
    joined = jnp.broadcast_to(where(seen.joins, joined, 0), keys.shape)
    count[...] = where(seen.keeps, count[...], 0) + _over_time(joined)


def _backward(
    plan: Plan,
    given: Operands,
    change,
    rest,
    totals,
    mean,
    query_out,
    key_out,
    value_out,
    grown,
    grown_total,
    grown_first,
) -> None:
    """`grown` and so on are gradients of the state after the chunk, then of the one
    before."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        for x in (grown, grown_total, grown_first):
            x[...] = jnp.zeros_like(x)

    seen, value, change = _seen(given), given.value[...], change[...]
    wide_change = change.astype(jnp.float32)
    found = _weights(plan, given, seen, totals)
    query, key = found.query, found.key
    reads = in_lanes(found.reads, query.unit.shape)
    of_past = where(reads, _exact(change, rest[...], PLAIN), 0)
    of_mean = _sums(plan, wide_change * mean[...], plan.value_size)
    read = _sums(plan, query.unit * of_past, plan.head_size)
    near_query, near_key = jnp.zeros_like(query.unit), jnp.zeros_like(key.unit)
    value_change = jnp.zeros(value.shape, jnp.float32)
    by_row, by_key, along = [], [], []
    for head, pairs in enumerate(found.pairs):
        own_change = own(change, plan.value_size, head)
        of_pairs, scale = product(own_change, value, ACROSS), found.scales[head]
        whole = (pairs * of_pairs).sum(axis=1, keepdims=True)
        whole += read[head] + found.past[head] * of_mean[head]
        along.append(scale * whole)
        of_pairs = jnp.where(pairs > 0, scale * (of_pairs - along[head]), 0)
        near_query += product(of_pairs, own(found.column, plan.head_size, head), PLAIN)
        near_key += product(of_pairs, own(found.row, plan.head_size, head), TURNED)
        value_change += _exact(scale * pairs, own_change, TURNED)
        by_row.append(of_pairs.sum(axis=1, keepdims=True))
        by_key.append(column(_over_time(of_pairs)))

    scales = in_lanes(found.scales, query.unit.shape)
    along = in_lanes(along, query.unit.shape)
    of_mean = in_lanes(of_mean, query.unit.shape)
    far = of_past + where(reads, (of_mean - along) * totals[:1], 0)
    by_row, by_key = (in_lanes(x, query.unit.shape) for x in (by_row, by_key))
    near_query += by_row * found.row + scales * far
    near_key += by_key * found.column
    later = product(key.unit, grown[...], ACROSS) + grown_first[...]
    value_change += where(seen.joins, later, 0)
    later = _exact(value, grown[...], PLAIN) + grown_total[...]
    near_key += where(seen.joins, later, 0)
    for out, x in (
        (query_out, _from_unit(plan, query, near_query, by_row)),
        (key_out, _from_unit(plan, key, near_key, by_key)),
        (value_out, value_change),
    ):
        out[...] = x.astype(out.dtype)

    asking = where(reads, query.unit * scales, 0)
    here = of_heads(plan.sizes, _exact(change, asking, TURNED))
    grown[...] = where(seen.keeps, grown[...], 0) + here
    here = -_over_time(asking * along)
    grown_total[...] = where(seen.keeps, grown_total[...], 0) + here
    weight = in_lanes(found.scales, value.shape)
    lifted = jnp.where(in_lanes(found.reads, value.shape) > 0, 1, ROUNDING)
    here = _over_time(where(seen.reaches, wide_change * weight * lifted, 0))
    grown_first[...] = where(seen.keeps, grown_first[...], 0) + here


def _seen(given: Operands) -> Seen:
    return seen_in_chunk(BLOCK, given.flags, given.segment)


def _weights(plan: Plan, given: Operands, seen: Seen, totals: Any) -> Weights:
    query, key = (_directions(plan, x[...]) for x in (given.query, given.key))
    centre = _over_time(key.unit)
    length = _lengths(plan, centre)
    longest = 1 - key.missing.min(axis=0, keepdims=True)
    centre *= longest / jnp.where(length > 0, length, 1)
    row, column = query.unit + centre, key.unit - centre
    half_rows, half_columns = (
        _sums(plan, x * x / 2 + _shortfall(plan, y), plan.head_size)
        for x, y in ((row, query), (column, key))
    )
    number = totals[1:, :1]
    dots = _sums(plan, query.unit * totals[:1], plan.head_size)
    pairs, past, reads, scales = [], [], [], []
    for head, dot in enumerate(dots):
        weights = product(own(row, plan.head_size, head), column, ACROSS)
        weights += half_rows[head] + blocks.row(half_columns[head])
        some = _visible_pairs(given, seen) & (weights > ROUNDING / 2)
        pairs.append(jnp.where(some, weights, 0))
        least = ROUNDING * number
        reach = where(seen.reaches, jnp.ones_like(dot), 0)
        reads.append(jnp.where(number + dot > least, reach, 0))
        past.append(jnp.maximum(number + dot, least) * reach)
        whole = pairs[head].sum(axis=1, keepdims=True) + past[head]
        scales.append(jnp.where(whole > 0, 1 / jnp.where(whole > 0, whole, 1), 0))
    return Weights(query, key, row, column, pairs, past, reads, scales)


def _visible_pairs(given: Operands, seen: Seen) -> Bool[Array, "c c"]:
    if given.flags is None:
        return seen.pairs
    visible = jnp.broadcast_to(given.flags[...] & VISIBLE, seen.pairs.shape)
    return seen.pairs & (visible > 0)


def _directions(plan: Plan, x: Float[Array, "c P*H"]) -> Directions:
    x = x.astype(jnp.float32)
    length = _lengths(plan, x)
    short = 1 / (length + EPSILON)
    return Directions(x * short, length, EPSILON * short)


def _lengths(plan: Plan, x: Float[Array, "r P*H"]) -> Float[Array, "r P*H"]:
    squares = in_lanes(_sums(plan, x * x, plan.head_size), x.shape)
    return jnp.sqrt(squares)


def _shortfall(plan: Plan, x: Directions) -> Float[Array, "c P*H"]:
    """What adds up to (1 − |x̂|²)/2 over the lanes of a head."""
    return x.missing * (1 - x.missing / 2) * (1 / plan.head_size)


def _from_unit(
    plan: Plan, x: Directions, change: Array, weight: Array
) -> Float[Array, "c P*H"]:
    """The gradient of x by that of x̂, in which `weight` x̂ is too much."""
    along = in_lanes(_sums(plan, x.unit * change, plan.head_size), change.shape)
    whole = x.length + EPSILON
    along *= jnp.where(x.length > 0, whole / jnp.where(x.length > 0, x.length, 1), 0)
    return (change - x.unit * (along + weight * x.missing)) / whole


def _around(plan: Plan, sums: Array, total: Array, mean: Array) -> Array:
    """Σ k̂ (v − mean)ᵀ, transposed, 0 where that is below the rounding of the sums."""
    means = of_heads(plan.sizes, column(mean) * total)
    rest = sums - means
    return jnp.where(jnp.abs(rest) <= 8 * ROUNDING * jnp.abs(means), 0, rest)


def _exact(a: Array, b: Array, dimensions: tuple) -> Float[Array, "_ _"]:
    """The product with all bits of both, of which one may be bfloat16."""
    if a.dtype == b.dtype:
        return product(a, b, dimensions)
    if a.dtype == jnp.bfloat16:
        parts = [product(a, x, dimensions) for x in in_parts(b, 3)]
    else:
        parts = [product(x, b, dimensions) for x in in_parts(a, 3)]
    return reduce(jnp.add, parts)


def _over_time(x: Float[Array, "c W"]) -> Float[Array, "1 W"]:
    return x.sum(axis=0, keepdims=True)


def _sums(plan: Plan, x: Array, size: int) -> list[Float[Array, "c 1"]]:
    """Over the lanes of each head."""
    heads = range(plan.packed)
    return [own(x, size, head).sum(axis=1, keepdims=True) for head in heads]


def _specs(plan: Plan, operands: Operands, chunks: Chunks) -> Operands:
    values, keys = plan.widths
    tokens = chunks.by_query(keys), chunks.by_key(keys), chunks.by_key(values)
    return Operands(*tokens, *map(chunks.of_examples, operands[3:]))


def _kept(plan: Plan, operands: Operands) -> list[tuple]:
    """Of the state before a chunk: Σ k̂ vᵀ − Σ k̂ meanᵀ, transposed; Σ k̂ and the number
    of keys; the mean of the values."""
    values, keys = plan.widths
    return [(x, jnp.float32) for x in (plan.widths, (2, keys), (1, values))]


def _scratch(plan: Plan, operands: Operands) -> tuple[list, list]:
    """Σ k̂ vᵀ, transposed, Σ k̂ and Σ v, and forward the number of keys; or gradients."""
    values, keys = plan.widths
    state = [plan.widths, (1, keys), (1, values)]
    return [*state, (1, keys)], state


def _cost(plan: Plan, operands: Operands) -> list[tuple[int, int]]:
    """By the products of a head of a chunk and those of a tile: of two float32
    operands, of one and an input, and of inputs."""
    chunks = math.prod(plan.grid)
    passes = (6, 6, 6) if operands.value.dtype == jnp.float32 else (6, 3, 1)
    costs = []
    for by_head, by_tile in ((1, 1, 0), (1, 1, 0)), ((3, 1, 1), (1, 3, 0)):
        counts = [plan.packed * x + y for x, y in zip(by_head, by_tile, strict=True)]
        products = sum(x * y for x, y in zip(counts, passes, strict=True))
        flops = 2 * chunks * products * BLOCK**2 * max(plan.widths)
        costs.append((flops, chunks * BLOCK * sum(plan.widths)))
    return costs


COSINE = Kernels("cosine", _forward, _backward, _specs, _kept, _scratch, _cost)
