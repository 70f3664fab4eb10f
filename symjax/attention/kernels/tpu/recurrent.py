"""Adapters of the recurrent kernels for TPUs, and the derivative that they share.

An adapter converts the arrays of a call to those of kernels: heads are joined in tiles
of lanes, and hidden keys and values are 0.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.feature_maps import FeatureParameters
from symjax.attention.core.operands import Tokens
from symjax.attention.kernels.operands import (
    MOST_FEATURES,
    RESIDUAL,
    VisibleTokens,
    log_decay_of,
    round_up,
    unsupported,
    visible_arrays,
)
from symjax.attention.kernels.tpu.chunks import (
    ChunkPlan,
    Kernels,
    backward,
    flags_and_segments,
    forward,
)
from symjax.attention.kernels.tpu.decays import PARTS, constants
from symjax.attention.kernels.tpu.delta import DELTA
from symjax.attention.kernels.tpu.feature_weights import (
    EMPTY,
    ElementwiseMaps,
    FeatureOperands,
)
from symjax.attention.kernels.tpu.features import feature_kernels
from symjax.attention.kernels.tpu.gated import DECAY, GatedOperands
from symjax.attention.kernels.tpu.packed_heads import unpack_gradient, unpack_heads
from symjax.attention.kernels.tpu.tiles import LANES, LOG2E

Fallback = Callable[[Tokens, Any], Array]


class Inputs(NamedTuple):
    """Differentiable arrays of a call, its visible tokens and its segments."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B T K H"]
    value: Float[Array, "B T K V"]
    log_decay: Float[Array, "B T K *H"] | None = None
    beta: Float[Array, "B T K"] | None = None
    random: FeatureParameters | None = None
    visible: Bool[Array, "B T"] | None = None
    segment: Int[Array, "B T"] | None = None


class RecurrentForm(NamedTuple):
    """Static settings of a call.

    Attributes:
        operands: (plan, inputs) → the operands of the kernels.
        block: tokens of a chunk.
        fallback: the same call in XLA, for the gradient of a random projection.
    """

    kernels: Kernels
    operands: Callable[[ChunkPlan, Inputs], Any]
    interpret: Any
    block: int = LANES
    fallback: Fallback | None = None

    def plan(self, inputs: Inputs) -> ChunkPlan:
        sizes = inputs.query, inputs.value
        return ChunkPlan.of(*sizes, self.interpret, self.block, self.kernels.together)

    def start(self, inputs: Inputs) -> tuple[ChunkPlan, Any]:
        plan = self.plan(inputs)
        return plan, self.operands(plan, inputs)


class TpuFeatures(NamedTuple):
    """Performer and linear attention.

    The kernels compute exponentials of random projections, and elementwise features
    that have `Features.in_kernels`. XLA computes other elementwise features in float32.
    """

    recurrence: Any
    interpret: Any = False
    block: int = LANES

    def refusal(self, tokens: Tokens, random: FeatureParameters | None) -> str | None:
        """Return why the kernels do not support a call; None if they do."""
        if reason := unsupported(tokens):
            return reason
        maps = self.recurrence.features
        if random is None:
            return None if maps.elementwise else "it takes elementwise features"
        if not maps.exponential:
            return "it takes random features that are exponentials"
        count = random.rows.shape[0] * len(maps.exponential)
        if count > MOST_FEATURES:
            return f"it takes at most {MOST_FEATURES} features, got {count}"
        return None

    def attend(
        self, tokens: Tokens, random: FeatureParameters | None, fallback: Fallback
    ) -> Float[Array, "B T N V"]:
        query, key, value, visible, segment = VisibleTokens.of(tokens)
        features = self.recurrence.features
        maps = None
        if random is None and features.in_kernels:
            maps = ElementwiseMaps(features, query.shape[3])
        elif random is None:
            query = features.query(query.astype(jnp.float32), None).amplitude
            key = features.key(key.astype(jnp.float32), None).amplitude
            maps = ElementwiseMaps(None, query.shape[3])
        inputs = Inputs(
            query, key, value, random=random, visible=visible, segment=segment
        )
        kernels = feature_kernels(maps)
        operands = partial(_feature_operands, features.exponential)
        form = RecurrentForm(kernels, operands, self.interpret, self.block, fallback)
        output: Array = _attend(form, inputs)
        return output.astype(tokens.value.dtype)


class TpuDecay(NamedTuple):
    """Linear attention with a decay per head or per channel."""

    recurrence: Any
    interpret: Any = False

    def refusal(self, tokens: Tokens, parameters: Array | None) -> str | None:
        return unsupported(tokens)

    def attend(
        self, tokens: Tokens, parameters: Array | None, fallback: Fallback
    ) -> Float[Array, "B T N V"]:
        inputs = visible_arrays(tokens, log_decay_of(tokens.operands, parameters), None)
        form = RecurrentForm(DECAY, _gated_operands, self.interpret)
        output: Array = _attend(form, Inputs(*inputs))
        return output.astype(tokens.value.dtype)


class TpuDelta(NamedTuple):
    """The delta rule, with or without a decay."""

    recurrence: Any
    interpret: Any = False

    def refusal(self, tokens: Tokens, parameters: Array | None) -> str | None:
        return unsupported(tokens)

    def attend(
        self, tokens: Tokens, parameters: Array | None, fallback: Fallback
    ) -> Float[Array, "B T N V"]:
        beta, *own = tokens.operands
        log_decay = None
        if self.recurrence.fades or tokens.segment_ids is not None:
            log_decay = log_decay_of(own, parameters)
        inputs = visible_arrays(tokens, log_decay, beta.astype(jnp.float32))
        form = RecurrentForm(DELTA, _gated_operands, self.interpret)
        output: Array = _attend(form, Inputs(*inputs))
        return output.astype(tokens.value.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(form: RecurrentForm, inputs: Inputs) -> Float[Array, "B T N V"]:
    plan, operands = form.start(inputs)
    output, *_ = forward(form.kernels, plan, operands, keep=False)
    return _rows(plan, output, inputs)


def _forward(form: RecurrentForm, inputs: Inputs) -> tuple[Array, tuple]:
    leaves = jax.tree.leaves(inputs.random, is_leaf=_is_primal)
    learned = any(x.perturbed for x in leaves)
    inputs = jax.tree.map(lambda x: x.value, inputs, is_leaf=_is_primal)
    plan, operands = form.start(inputs)
    found = forward(form.kernels, plan, operands, keep=True)
    if form.kernels.saved:
        found = checkpoint_name(found, RESIDUAL)
    output, *kept = found
    rows = output if form.kernels.reads_output else None
    residuals = inputs, operands, kept, rows, () if learned else None
    return _rows(plan, output, inputs), residuals


def _is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed")


def _backward(form: RecurrentForm, residuals: tuple, change: Array) -> tuple[Inputs]:
    inputs, operands, kept, output, learned = residuals
    plan = form.plan(inputs)
    changes = [plan.by_query(change, plan.value_size)]
    if output is not None:
        changes.append(output)
    found = iter(backward(form.kernels, plan, operands, changes, kept))
    gradients: dict[str, Any] = {}
    for name in ("query", "key", "value", "log_decay", "beta"):
        like = getattr(inputs, name)
        if like is not None:
            gradients[name] = _gradient(plan, next(found), like)
    random = jax.tree.map(jnp.zeros_like, inputs.random)
    if learned is not None:
        random = _of_projection(form, inputs, change)
    return (inputs._replace(**gradients, random=random, visible=None, segment=None),)


_attend.defvjp(_forward, _backward, symbolic_zeros=True)


def _rows(plan: ChunkPlan, output: Array, inputs: Inputs) -> Float[Array, "B T N V"]:
    rows = unpack_heads(output, plan.heads, inputs.value)
    return rows.astype(inputs.value.dtype)


def _gradient(plan: ChunkPlan, x: Array, like: Array) -> Array:
    """Return the gradient of `like` from the gradient x of the operand made of it."""
    if like.ndim == 4:
        return unpack_gradient(x, plan.heads, like)
    return _summed_from_tiles(plan, x, like)


def _of_projection(
    form: RecurrentForm, inputs: Inputs, change: Array
) -> FeatureParameters:
    """Return the gradient of random features, by the same call in XLA."""
    mask = None if inputs.visible is None else inputs.visible[:, None, None]
    tokens = Tokens(*inputs[:3], (), mask, inputs.segment)
    attend = partial(form.fallback, tokens)  # type: ignore[arg-type]
    return jax.vjp(attend, inputs.random)[1](change)[0]


def _feature_operands(
    signs: tuple[int, ...], plan: ChunkPlan, inputs: Inputs
) -> FeatureOperands:
    rows = offset = norm = None
    if inputs.random is not None:
        rows, offset = _projection(signs, plan, inputs.random, inputs.query.dtype)
        norm = (0.5 * LOG2E * inputs.random.scale.astype(jnp.float32)).reshape(1)
    seen = inputs.visible, inputs.segment, inputs.query
    return FeatureOperands(
        plan.by_query(inputs.query, plan.head_size),
        plan.by_key(inputs.key, plan.head_size),
        plan.by_key(inputs.value, plan.value_size),
        rows,
        offset,
        norm,
        *flags_and_segments(*seen, plan.length, plan.block),
    )


def _projection(
    signs: tuple[int, ...], plan: ChunkPlan, random: FeatureParameters, dtype: Any
) -> tuple[Float[Array, "parts M H"], Float[Array, "1 M"]]:
    """Return rows and offsets for the heads of a tile. Rows in bfloat16 have two parts.

    The offset of a row that pads M is `EMPTY`, so its feature is 0.
    """
    rows = random.rows.astype(jnp.float32)
    rows = rows * (LOG2E * jnp.sqrt(random.scale.astype(jnp.float32)))
    if len(signs) > 1:
        rows = jnp.concatenate([sign * rows for sign in signs])
    offset = jnp.zeros(rows.shape[0]) if random.offset is None else random.offset
    offset = offset.astype(jnp.float32) * LOG2E
    count, size = rows.shape
    rows = jnp.pad(rows, ((0, round_up(count) - count), (0, plan.head_size - size)))
    offset = jnp.pad(offset, (0, round_up(count) - count), constant_values=EMPTY)
    rows = jnp.kron(jnp.eye(plan.packed), rows)
    parts = [rows]
    if dtype == jnp.bfloat16:
        high = jax.lax.reduce_precision(rows, 8, 7)
        parts = [high, rows - high]
    return jnp.stack(parts).astype(dtype), jnp.tile(offset, plan.packed)[None]


def _gated_operands(plan: ChunkPlan, inputs: Inputs) -> GatedOperands:
    by_channel = by_head = None
    log_decay, beta = inputs.log_decay, inputs.beta
    if log_decay is not None and log_decay.ndim == 4:
        parts = PARTS[inputs.value.dtype.name]
        by_channel = _in_parts(plan.by_key(log_decay, plan.head_size), parts)
    elif log_decay is not None:
        by_head = _by_tiles(plan, log_decay)
    return GatedOperands(
        plan.by_query(inputs.query, plan.head_size),
        plan.by_key(inputs.key, plan.head_size),
        plan.by_key(inputs.value, plan.value_size),
        by_channel,
        by_head,
        *constants(by_channel is not None),
        None if beta is None else _by_tiles(plan, beta),
    )


def _by_tiles(
    plan: ChunkPlan, x: Float[Array, "B T K"]
) -> Float[Array, "B tiles P length"]:
    """Repeat an array of key heads for query heads, and split these into tiles.

    Tokens beyond the last are 0.
    """
    x = jnp.repeat(x, plan.heads // x.shape[2], axis=2)
    x = jnp.pad(x, ((0, 0), (0, plan.length - x.shape[1]), (0, 0)))
    x = jnp.swapaxes(x, 1, 2)
    return x.reshape(plan.batch, -1, plan.packed, plan.length)


def _summed_from_tiles(
    plan: ChunkPlan, x: Float[Array, "B tiles P length"], like: Float[Array, "B T K"]
) -> Float[Array, "B T K"]:
    """Return the gradient of `like` from the gradient x of what `_by_tiles` returns."""
    x = x.reshape(*like.shape[::2], plan.groups, plan.length).sum(axis=2)
    return jnp.swapaxes(x[:, :, : like.shape[1]], 1, 2)


def _in_parts(x: Float[Array, "*shape"], count: int) -> Array:
    """Return bfloat16 arrays [count …] that add up to x."""
    parts = []
    for _ in range(count):
        parts.append(jax.lax.reduce_precision(x, 8, 7))
        x -= parts[-1]
    return jnp.stack(parts).astype(jnp.bfloat16)
