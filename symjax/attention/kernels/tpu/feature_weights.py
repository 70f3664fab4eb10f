"""Features of one chunk in the TPU kernels of the Performer and linear attention.

`exponents` and `weights_of` compute the features of a chunk from its operands, with
`ElementwiseMaps` if they are elementwise. `exact_weights` computes them for one row
that underflows. `features.py` has the kernels, and says how states and exponents are
kept.
"""

from collections.abc import Iterable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from symjax.attention.core.feature_maps import Features
from symjax.attention.kernels.tpu import packed_heads
from symjax.attention.kernels.tpu.chunks import (
    ChunkPlan,
    ChunkVisibility,
    seen_in_chunk,
    where,
)
from symjax.attention.kernels.tpu.tiles import (
    ACROSS,
    LANES,
    product,
)

EMPTY = -1e30  # the running maximum before the first key


class FeatureOperands(NamedTuple):
    """Arrays that both kernels read; in a kernel, the refs of their blocks.

    Heads are joined along lanes. `rows`, `offset` and `norm` are None for elementwise
    features.
    """

    query: Any  # [B T N·H]
    key: Any  # [B T K·H], K = N / plan.sharing
    value: Any  # [B T K·V]
    # Rows of the random projection of the P heads of a tile, times √scale log₂ e:
    # [parts P·M P·H].
    rows: Any
    offset: Any  # added to all exponents, [1 P·M]
    norm: Any  # [1], a factor of |k|²; the product is subtracted from a key's exponents
    flags: Any  # [B 1 T], or None if all tokens are visible and of one segment
    segment: Any  # [B 1 T], or None


class ElementwiseMaps(NamedTuple):
    """Elementwise feature maps of queries and keys, for the heads of a call.

    Attributes:
        features: the maps; None if queries and keys are features already.
        size: the channels of a head without those that pad it.
    """

    features: Features | None
    size: int

    def __call__(
        self, plan: ChunkPlan, query: Float[Array, "c P*H"], key: Float[Array, "c P*H"]
    ) -> list[Float[Array, "c P*H"]]:
        """Return the features of queries and of keys, 0 in channels that pad a head."""
        if self.features is None:
            return [query, key]
        query = self.features.query(query, None).amplitude
        key = self.features.key(key, None).amplitude
        if self.size < plan.head_size:  # then a tile has one head
            channel = jax.lax.broadcasted_iota(jnp.int32, query.shape, 1)
            query, key = (jnp.where(channel < self.size, x, 0) for x in (query, key))
        return [query, key]


class Weights(NamedTuple):
    """Weights of the features of one head in a chunk.

    Those of random features are at most 1.
    """

    row: Float[Array, "c M"]
    key: Float[Array, "c M"]
    fade: Float[Array, "1 M"]  # factor of the state before the chunk, in the rows
    joining: Float[Array, "c M"]  # weights of the keys in the state after the chunk
    after: Float[Array, "1 M"]  # running maximum of the state after the chunk
    left: Float[Array, "1 M"]  # factor of the old state in the new state


def width(plan: ChunkPlan) -> int:
    """Return the number of lanes of a head's values together with its ones."""
    return LANES if plan.packed > 1 else plan.value_size + LANES


def lane_of_ones(plan: ChunkPlan, head: int) -> int:
    """Return a lane of the ones beside the values of a head."""
    if plan.packed == 1:
        return plan.value_size
    return (head + 1) % plan.packed * plan.value_size


def features(plan: ChunkPlan, operands: FeatureOperands) -> int:
    """Return the number of features of a head, in whole tiles."""
    if operands.rows is None:
        return plan.widths[1]
    return operands.rows.shape[1] // plan.packed


def features_of(plan: ChunkPlan, refs: FeatureOperands, head: int) -> slice:
    count = features(plan, refs)
    return slice(head * count, (head + 1) * count)


def dtype_of(operands: FeatureOperands) -> Any:
    """Return the dtype of features in products: float32 if they are elementwise."""
    return jnp.float32 if operands.rows is None else operands.value.dtype


def own_head(plan: ChunkPlan, x: Array, head: int) -> Array:
    """Return packed heads with 0 for all but one of them."""
    return x if plan.packed == 1 else packed_heads.own(x, plan.value_size, head)


def queries_and_keys(refs: FeatureOperands) -> list[Float[Array, "c P*H"]]:
    return [x[...].astype(jnp.float32) for x in (refs.query, refs.key)]


def exponents(
    maps: ElementwiseMaps | None, plan: ChunkPlan, refs: FeatureOperands
) -> list[Float[Array, "c P*M"]]:
    """Return the base-2 exponents of the features of queries and of keys.

    With `maps` return the features themselves. The last axis has the heads of a tile,
    one after the other.
    """
    if maps is not None:
        return maps(plan, *queries_and_keys(refs))
    query, key = (
        added(product(x[...], y, ACROSS) for y in projection(refs)) + refs.offset[...]
        for x in (refs.query, refs.key)
    )
    square = refs.key[...].astype(jnp.float32) ** 2
    norms = [
        own_head(plan, square, head).sum(axis=-1, keepdims=True) * refs.norm[0]
        for head in range(plan.packed)
    ]
    parts = [key[:, features_of(plan, refs, i)] - norm for i, norm in enumerate(norms)]
    return [query, jnp.concatenate(parts, axis=1)]


def exponents_of(
    plan: ChunkPlan,
    refs: FeatureOperands,
    seen: ChunkVisibility,
    both: list[Array],
    head: int,
) -> list[Float[Array, "c M"]]:
    """Return the exponents of one head, with −∞ for hidden keys.

    Elementwise features are returned as they are, with 0 for hidden keys.

    Args:
        both: the result of `exponents`.
    """
    if refs.rows is None:
        query, key = (own_head(plan, x, head) for x in both)
        return [query, where(seen.visible, key, 0)]
    query, key = (x[:, features_of(plan, refs, head)] for x in both)
    return [query, where(seen.visible, key, -jnp.inf)]


def projection(refs: FeatureOperands) -> list[Float[Array, "P*M P*H"]]:
    return [refs.rows[i] for i in range(refs.rows.shape[0])]


def added(parts: Iterable[Array]) -> Array:
    return reduce(jnp.add, parts)


def weights_of(
    refs: FeatureOperands, seen: ChunkVisibility, query: Array, key: Array, old: Array
) -> Weights:
    """Return the weights of a head's features in a chunk.

    Weights of `key` and `fade` are relative to the highest exponent of the chunk and
    the state before it; `joining` and `left` to the running maximum `after` the chunk.
    """
    if refs.rows is None:
        same, joining = jnp.ones_like(old), where(seen.joins, key, 0)
        row = query / row_divisor(query)
        return Weights(row, key, same, joining, old, where(seen.keeps, same, 0))
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


def row_divisor(query: Float[Array, "c M"]) -> Float[Array, "c 1"]:
    """Return the largest elementwise feature of each query, or 1 if all are 0.

    Queries are divided by it, so that products do not overflow. It cancels in the
    division by the denominator.
    """
    largest = query.max(axis=-1, keepdims=True)
    return jnp.where(largest > 0, largest, 1)


def faded(state: Float[Array, "w M"], fade: Float[Array, "1 M"]) -> Array:
    return (state.astype(jnp.float32) * fade).astype(state.dtype)


def exact_weights(
    t, seen: ChunkVisibility, query: Array, key: Array, old: Array
) -> list[Array]:
    """Return the weights of row t, relative to its own highest exponent.

    Returns:
        Weights [c M] for each key and feature of the chunk, and [1 M] for the state.
    """
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
    """Return row t of an array [c n], as [1 n]."""
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(index == t, x, 0).sum(axis=0, keepdims=True)


def for_each_underflow(
    plan: ChunkPlan,
    refs: FeatureOperands,
    underflows: list[Float[Array, "c 1"]],
    recompute: Any,
) -> None:
    """Call recompute(head, seen, query, key, t) for each row t that underflows.

    Rows of elementwise features do not underflow.

    Args:
        underflows: for each head, 1 for rows that underflow and 0 for others.
    """

    if refs.rows is None:
        return

    @pl.when(added(underflows).max() > 0)
    def _():
        seen, both = seen_by(refs), exponents(None, plan, refs)
        for head in range(plan.packed):
            query, key = exponents_of(plan, refs, seen, both, head)
            step = partial(recompute, head, seen, query, key)

            def body(t, _, some=underflows[head], step=step) -> None:
                pl.when(pick(some, t).max() > 0)(lambda: step(t))

            jax.lax.fori_loop(0, plan.block, body, None)


def seen_by(refs: FeatureOperands) -> ChunkVisibility:
    return seen_in_chunk(refs.query.shape[0], refs.flags, refs.segment)


def values_of(plan: ChunkPlan, refs: FeatureOperands, head: int) -> Float[Array, "c w"]:
    """Return the values of a head with ones beside them."""
    return beside(plan, refs.value[...], head, 1)


def beside(plan: ChunkPlan, x: Array, head: int, other: Any) -> Float[Array, "c w"]:
    """Return the values of a head, with `other` in the lanes beside them."""
    if plan.packed > 1:
        own = packed_heads.is_own(x.shape, plan.value_size, head)
        return jnp.where(own, x, jnp.asarray(other, x.dtype))
    tile = jnp.broadcast_to(jnp.asarray(other, x.dtype), (x.shape[0], LANES))
    return jnp.concatenate([x, tile], axis=1)


def joined(plan: ChunkPlan, heads: list[Array], size: int) -> Array:
    """Return one array in which each packed head fills its own lanes."""
    if plan.packed == 1:
        return heads[0][:, :size]
    return added(own_head(plan, x, i) for i, x in enumerate(heads))


def ones_of(plan: ChunkPlan, rows: Any, head: int) -> Float[Array, "c 1"]:
    """Return the sum of the weights of each row of a head."""
    lane = lane_of_ones(plan, head)
    return rows[head, :, lane : lane + 1]
