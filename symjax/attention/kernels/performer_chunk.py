"""What both kernels of the Performer need of a chunk: the weights of its features, its
values with ones beside them, and the rows that have lost their keys."""

from collections.abc import Iterable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from symjax.attention.kernels import lanes
from symjax.attention.kernels.blocks import ACROSS, LANES, product
from symjax.attention.kernels.passes import Plan
from symjax.attention.kernels.seen import Seen, seen_in_chunk, where

EMPTY = -1e30  # the running maximum before the first key


class Operands(NamedTuple):
    """Inputs of both kernels, or their blocks. Heads lie side by side in lanes."""

    query: Any  # [B T N·H], or features that are given, in float32
    key: Any  # [B T K·H], K = N / plan.sharing
    value: Any  # [B T K·V]
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


def width(plan: Plan) -> int:
    """Lanes of a head's values and the ones beside them."""
    return LANES if plan.packed > 1 else plan.value_size + LANES


def lane_of_ones(plan: Plan, head: int) -> int:
    if plan.packed == 1:
        return plan.value_size
    return (head + 1) % plan.packed * plan.value_size


def features(plan: Plan, given: Operands) -> int:
    """Of a head, in whole tiles."""
    if given.rows is None:
        return plan.widths[1]
    return given.rows.shape[1] // plan.packed


def features_of(plan: Plan, given: Operands, head: int) -> slice:
    count = features(plan, given)
    return slice(head * count, (head + 1) * count)


def dtype_of(given: Operands) -> Any:
    """That of operands of products: features that are given stay exact."""
    return jnp.float32 if given.rows is None else given.value.dtype


def own_head(plan: Plan, x: Array, head: int) -> Array:
    """Packed heads with 0 for all but one."""
    return x if plan.packed == 1 else lanes.own(x, plan.value_size, head)


def exponents(plan: Plan, given: Operands) -> list[Float[Array, "c P*M"]]:
    """Of the features of queries and of keys, to base 2, packed heads side by side; or
    the features that are given."""
    if given.rows is None:
        return [given.query[...], given.key[...]]
    query, key = (
        added(product(x[...], y, ACROSS) for y in projection(given)) + given.offset[...]
        for x in (given.query, given.key)
    )
    square = given.key[...].astype(jnp.float32) ** 2
    norms = [
        own_head(plan, square, head).sum(axis=-1, keepdims=True) * given.norm[0]
        for head in range(plan.packed)
    ]
    parts = [key[:, features_of(plan, given, i)] - norm for i, norm in enumerate(norms)]
    return [query, jnp.concatenate(parts, axis=1)]


def exponents_of(
    plan: Plan, given: Operands, seen: Seen, both: list[Array], head: int
) -> list[Float[Array, "c M"]]:
    """Its exponents, those of hidden keys −∞."""
    if given.rows is None:
        return [own_head(plan, x, head) for x in both]
    query, key = (x[:, features_of(plan, given, head)] for x in both)
    return [query, where(seen.visible, key, -jnp.inf)]


def projection(given: Operands) -> list[Float[Array, "P*M P*H"]]:
    return [given.rows[i] for i in range(given.rows.shape[0])]


def added(parts: Iterable[Array]) -> Array:
    return reduce(jnp.add, parts)


def weights_of(
    given: Operands, seen: Seen, query: Array, key: Array, old: Array
) -> Weights:
    """All but those of `joining` refer to the highest exponent in the chunk."""
    if given.rows is None:
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


def faded(state: Float[Array, "w M"], fade: Float[Array, "1 M"]) -> Array:
    return (state.astype(jnp.float32) * fade).astype(state.dtype)


def exactly(t, seen: Seen, query: Array, key: Array, old: Array) -> list[Array]:
    """Weights of row t with each key and feature, [c M], and of the state's features,
    [1 M]: all relative to the row's highest exponent."""
    own = pick(query, t)
    index = jax.lax.broadcasted_iota(jnp.int32, (key.shape[0], 1), 0)
    near = jnp.where(index <= t, 1.0, 0.0)
    past = own + old
    if seen.segment is not None:
        near *= jnp.where(seen.segment == pick(seen.segment, t), 1.0, 0.0)
        past = where(pick(seen.reaches, t), past, -jnp.inf)
    pairs = where(near, key + own, -jnp.inf)
    shift = jnp.maximum(pairs.max(keepdims=True), past.max(keepdims=True))
    return [jnp.exp2(x - shift) for x in (pairs, past)]


def pick(x: Array, t) -> Array:
    """Row t of an array [c n], as [1 n]."""
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(index == t, x, 0).sum(axis=0, keepdims=True)


def each_lost(
    plan: Plan, given: Operands, lost: list[Float[Array, "c 1"]], rescue: Any
) -> None:
    """rescue(head, seen, query, key, t) for each lost row t of each head."""

    if given.rows is None:
        return

    @pl.when(added(lost).max() > 0)
    def _():
        seen, both = seen_by(given), exponents(plan, given)
        for head in range(plan.packed):
            query, key = exponents_of(plan, given, seen, both, head)
            step = partial(rescue, head, seen, query, key)

            def body(t, _, some=lost[head], step=step) -> None:
                pl.when(pick(some, t).max() > 0)(lambda: step(t))

            jax.lax.fori_loop(0, plan.block, body, None)


def seen_by(given: Operands) -> Seen:
    return seen_in_chunk(given.query.shape[0], given.flags, given.segment)


def values_of(plan: Plan, given: Operands, head: int) -> Float[Array, "c w"]:
    """With ones beside them, in the dtype of the operands of products."""
    value = given.value[...]
    return beside(plan, value.astype(dtype_of(given)), head, 1)


def beside(plan: Plan, x: Array, head: int, other: Any) -> Float[Array, "c w"]:
    """The values of a head, and `other` in the lanes beside them."""
    if plan.packed > 1:
        return jnp.where(
            lanes.is_own(x.shape, plan.value_size, head), x, jnp.asarray(other, x.dtype)
        )
    tile = jnp.broadcast_to(jnp.asarray(other, x.dtype), (x.shape[0], LANES))
    return jnp.concatenate([x, tile], axis=1)


def joined(plan: Plan, heads: list[Array], size: int) -> Array:
    """The values of packed heads, each from its own lanes."""
    if plan.packed == 1:
        return heads[0][:, :size]
    return added(own_head(plan, x, i) for i, x in enumerate(heads))


def ones_of(plan: Plan, rows: Any, head: int) -> Float[Array, "c 1"]:
    """What a head's weights add up to."""
    lane = lane_of_ones(plan, head)
    return rows[head, :, lane : lane + 1]
