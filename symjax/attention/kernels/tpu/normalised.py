"""Causal Performer and linear attention on TPU kernels.

They serve `performer_causal` with features that are powers of e, and `linear_causal`
with features that are never negative, a few by name.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.feature_maps import RandomFeatures
from symjax.attention.core.operands import Tokens
from symjax.attention.core.visibility import only_seen
from symjax.attention.kernels.operands import Shown, even
from symjax.attention.kernels.tpu.chunks import Plan, backward, described, forward
from symjax.attention.kernels.tpu.features import EMPTY, PERFORMER, Operands
from symjax.attention.kernels.tpu.lanes import apart, summed_apart
from symjax.attention.kernels.tpu.tiles import LANES, LOG2E
from symjax.attention.recurrent.engine import attend_causal
from symjax.attention.recurrent.normalised import Normalised

RANDOM = "favor#", "favor++", "hyperbolic", "positive"
PLAIN = "elu", "relu", "relu2"
MOST_FEATURES = 1024


class FusedFeatures(NamedTuple):
    """The kernels, as a `Kernel` of the engine. `features` by name, or a function."""

    features: Any
    recurrence: Normalised
    chunk_size: int
    block: int = LANES
    interpret: Any = False

    platform = "tpu"

    def serves(self, tokens: Tokens, parameters: RandomFeatures | None) -> bool:
        if parameters is None:
            return self.features in PLAIN
        return self.features in RANDOM and self.count(parameters) <= MOST_FEATURES

    def count(self, random: RandomFeatures) -> int:
        """Hyperbolic features come with both signs."""
        return random.rows.shape[0] * (1 + (self.features == "hyperbolic"))

    def scan(
        self, tokens: Tokens, random: RandomFeatures | None
    ) -> Float[Array, "B T N V"]:
        """Without kernels, for gradients of projections."""
        return attend_causal(
            "",
            self.recurrence,
            *tokens[:3],
            tokens.mask,
            parameters=random,
            chunk_size=self.chunk_size,
            segment_ids=tokens.segment_ids,
        )

    def attend(
        self, tokens: Tokens, parameters: RandomFeatures | None
    ) -> Float[Array, "B T N V"]:
        shown = Shown.of(tokens)
        if parameters is None:
            maps = self.recurrence.features
            query = maps.query(shown.query.astype(jnp.float32), None).amplitude
            key = maps.key(shown.key.astype(jnp.float32), None).amplitude
            if shown.visible is not None:
                (key,) = only_seen(shown.visible, key)
            shown = shown._replace(query=query, key=key)
        output: Array = _attend(self, parameters, *shown)
        return output.astype(tokens.value.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    choice: FusedFeatures,
    random: RandomFeatures | None,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    visible: Bool[Array, "B T"] | None,
    segment: Int[Array, "B T"] | None,
) -> Float[Array, "B T N V"]:
    plan, operands = _operands(choice, random, query, key, value, visible, segment)
    output, *_ = forward(PERFORMER, plan, operands, keep=False)
    return apart(output, plan.heads, value).astype(value.dtype)


def _forward(choice: FusedFeatures, *given: Any) -> tuple[Array, tuple]:
    values = jax.tree.map(lambda x: x.value, given, is_leaf=_is_primal)
    learned = [x.perturbed for x in jax.tree.leaves(given[0], is_leaf=_is_primal)]
    plan, operands = _operands(choice, *values)
    output, *kept = forward(PERFORMER, plan, operands, keep=True)
    saved = values, operands, output, kept, () if any(learned) else None
    return apart(output, plan.heads, values[3]).astype(values[3].dtype), saved


def _is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed")


def _backward(choice: FusedFeatures, saved: tuple, change: Array) -> tuple:
    given, operands, output, kept, learned = saved
    random, query, key, value, visible, segment = given
    plan = Plan.of(query, value, choice.interpret, choice.block)
    wide = plan.by_query(change, plan.value_size)
    found = backward(PERFORMER, plan, operands, [wide, output], kept)
    given = query, key, value
    pairs = zip(found, given, strict=True)
    gradients = [summed_apart(x, plan.heads, like) for x, like in pairs]
    of_random = jax.tree.map(jnp.zeros_like, random)
    if learned is not None:
        mask = None if visible is None else visible[:, None, None]
        again = Tokens(query, key, value, (), mask, segment)
        of_random = jax.vjp(partial(choice.scan, again), random)[1](change)[0]
    return of_random, *gradients, None, None


_attend.defvjp(_forward, _backward, symbolic_zeros=True)


def _operands(
    choice: FusedFeatures,
    random: RandomFeatures | None,
    query: Array,
    key: Array,
    value: Array,
    visible: Array | None,
    segment: Array | None,
) -> tuple[Plan, Operands]:
    plan = Plan.of(query, value, choice.interpret, choice.block)
    rows = offset = norm = None
    if random is not None:
        rows, offset = _projection(choice, plan, random, query.dtype)
        norm = (0.5 * LOG2E * random.scale.astype(jnp.float32)).reshape(1)
    return plan, Operands(
        plan.by_query(query, plan.head_size),
        plan.by_key(key, plan.head_size),
        plan.by_key(value, plan.value_size),
        rows,
        offset,
        norm,
        *described(visible, segment, query, plan.length, plan.block),
    )


def _projection(
    choice: FusedFeatures, plan: Plan, random: RandomFeatures, dtype: Any
) -> tuple[Float[Array, "parts M H"], Float[Array, "1 M"]]:
    """Rows and offsets of packed heads; bfloat16 rows in two parts."""
    rows = random.rows.astype(jnp.float32)
    rows = rows * (LOG2E * jnp.sqrt(random.scale.astype(jnp.float32)))
    if choice.features == "hyperbolic":
        rows = jnp.concatenate([rows, -rows])
    offset = jnp.zeros(rows.shape[0]) if random.offset is None else random.offset
    offset = offset.astype(jnp.float32) * LOG2E
    count, size = rows.shape
    rows = jnp.pad(rows, ((0, even(count) - count), (0, plan.head_size - size)))
    offset = jnp.pad(offset, (0, even(count) - count), constant_values=EMPTY)
    rows = jnp.kron(jnp.eye(plan.packed), rows)
    parts = [rows]
    if dtype == jnp.bfloat16:
        high = jax.lax.reduce_precision(rows, 8, 7)
        parts = [high, rows - high]
    return jnp.stack(parts).astype(dtype), jnp.tile(offset, plan.packed)[None]
