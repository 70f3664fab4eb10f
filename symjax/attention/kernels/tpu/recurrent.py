"""Causal linear attention with decays, and the delta rule, on TPU kernels."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from symjax.attention.core.operands import Tokens
from symjax.attention.kernels.operands import RESIDUAL, log_decay_of, seen_decays
from symjax.attention.kernels.tpu.chunks import Kernels, Plan, backward, forward
from symjax.attention.kernels.tpu.decays import PARTS, constants
from symjax.attention.kernels.tpu.delta import DELTA
from symjax.attention.kernels.tpu.gated import DECAY, Operands
from symjax.attention.kernels.tpu.lanes import apart, summed_apart


class FusedDecay(NamedTuple):
    """The kernels, as a `Kernel` of the engine. The log-decay is what all tokens share,
    or the operand of each."""

    interpret: Any = False

    platform = "tpu"

    def serves(self, tokens: Tokens, parameters: Array | None) -> bool:
        return True

    def attend(
        self, tokens: Tokens, parameters: Array | None = None
    ) -> Float[Array, "B T N V"]:
        given = seen_decays(tokens, log_decay_of(tokens.operands, parameters), None)
        output: Array = _attend((DECAY, self.interpret), *given)
        return output.astype(tokens.value.dtype)


class FusedDelta(NamedTuple):
    """The kernels of the delta rule. fades: a log-decay was given."""

    fades: bool
    interpret: Any = False

    platform = "tpu"

    def serves(self, tokens: Tokens, parameters: Array | None) -> bool:
        return True

    def attend(
        self, tokens: Tokens, parameters: Array | None = None
    ) -> Float[Array, "B T N V"]:
        beta, *own = tokens.operands
        log_decay = None
        if self.fades or tokens.segment_ids is not None:
            log_decay = log_decay_of(own, parameters)
        given = seen_decays(tokens, log_decay, beta.astype(jnp.float32))
        output: Array = _attend((DELTA, self.interpret), *given)
        return output.astype(tokens.value.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    static: tuple[Kernels, Any],
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    log_decay: Float[Array, "B T K *H"] | None,
    beta: Float[Array, "B T K"] | None,
) -> Float[Array, "B T N V"]:
    plan, operands = _operands(static, query, key, value, log_decay, beta)
    output, *_ = forward(static[0], plan, operands, keep=False)
    return apart(output, plan.heads, value)


def _forward(static: tuple[Kernels, Any], *given: Any) -> tuple[Array, tuple]:
    plan, operands = _operands(static, *given)
    found = forward(static[0], plan, operands, keep=True)
    output, *kept = checkpoint_name(found, RESIDUAL)
    return apart(output, plan.heads, given[2]), (given, operands, kept)


def _backward(static: tuple[Kernels, Any], saved: tuple, change: Array) -> tuple:
    given, operands, kept = saved
    plan = _plan(static, given[0], given[2])
    change = plan.by_query(change, plan.value_size)
    found = backward(static[0], plan, operands, [change], kept)
    changes, gradients = iter(found), []
    for like in given:
        if like is None:
            gradients.append(None)
        elif like.ndim == 4:
            gradients.append(summed_apart(next(changes), plan.heads, like))
        else:
            gradients.append(_summed_from_tiles(plan, next(changes), like))
    return tuple(gradients)


_attend.defvjp(_forward, _backward)


def _plan(static: tuple[Kernels, Any], query: Array, value: Array) -> Plan:
    kernels, interpret = static
    return Plan.of(query, value, interpret, together=kernels.together)


def _operands(
    static: tuple[Kernels, Any],
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array | None,
    beta: Array | None,
) -> tuple[Plan, Operands]:
    plan = _plan(static, query, value)
    by_channel = by_head = None
    if log_decay is not None and log_decay.ndim == 4:
        parts = PARTS[value.dtype.name]
        by_channel = _in_parts(plan.by_key(log_decay, plan.head_size), parts)
    elif log_decay is not None:
        by_head = _by_tiles(plan, log_decay)
    return plan, Operands(
        plan.by_query(query, plan.head_size),
        plan.by_key(key, plan.head_size),
        plan.by_key(value, plan.value_size),
        by_channel,
        by_head,
        *constants(by_channel is not None),
        None if beta is None else _by_tiles(plan, beta),
    )


def _by_tiles(plan: Plan, x: Float[Array, "B T K"]) -> Float[Array, "B tiles P length"]:
    """A number of each token and key head, for the query heads of each tile of lanes;
    0 beyond the end."""
    x = jnp.repeat(x, plan.heads // x.shape[2], axis=2)
    x = jnp.pad(x, ((0, 0), (0, plan.length - x.shape[1]), (0, 0)))
    x = jnp.swapaxes(x, 1, 2)
    return x.reshape(plan.batch, -1, plan.packed, plan.length)


def _summed_from_tiles(
    plan: Plan, x: Float[Array, "B tiles P length"], like: Float[Array, "B T K"]
) -> Float[Array, "B T K"]:
    """The gradient of `like` by that of `_by_tiles`."""
    x = x.reshape(*like.shape[::2], plan.groups, plan.length).sum(axis=2)
    return jnp.swapaxes(x[:, :, : like.shape[1]], 1, 2)


def _in_parts(x: Float[Array, "*shape"], count: int) -> Array:
    """bfloat16 numbers [count …] that add up to these."""
    parts = []
    for _ in range(count):
        parts.append(jax.lax.reduce_precision(x, 8, 7))
        x -= parts[-1]
    return jnp.stack(parts).astype(jnp.bfloat16)
