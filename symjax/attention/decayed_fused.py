"""Causal linear attention with decays, and the delta rule, on TPU kernels."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from symjax.attention.chunks import Tokens
from symjax.attention.kernels.blocks import RESIDUAL
from symjax.attention.kernels.decay import DECAY, PARTS, Operands, constants
from symjax.attention.kernels.delta import DELTA
from symjax.attention.kernels.lanes import apart, summed_apart
from symjax.attention.kernels.passes import Kernels, Plan, backward, forward
from symjax.attention.kernels.seen import Shown
from symjax.attention.masks import only_seen
from symjax.attention.segments import starts

NEVER = -1e30  # the logarithm of a decay that forgets all; no sum of them is NaN


class FusedDecay(NamedTuple):
    """The kernels, as a `Kernel` of the engine."""

    interpret: Any = False

    def serves(self, tokens: Tokens, parameters: Array | None) -> bool:
        """One that all tokens share is as fast as products of XLA."""
        return parameters is None

    def attend(
        self, tokens: Tokens, parameters: Array | None = None
    ) -> Float[Array, "B T N V"]:
        (log_decay,) = tokens.operands
        given = _seen(tokens, log_decay, None)
        output: Array = _attend((DECAY, self.interpret), *given)
        return output.astype(tokens.value.dtype)


class FusedDelta(NamedTuple):
    """The kernels of the delta rule. fades: a log-decay was given."""

    fades: bool
    interpret: Any = False

    def serves(self, tokens: Tokens, parameters: Array | None) -> bool:
        return True

    def attend(
        self, tokens: Tokens, parameters: Array | None = None
    ) -> Float[Array, "B T N V"]:
        beta, *own = tokens.operands
        if parameters is not None:
            own = [parameters[None, None]]
        log_decay = own[0] if self.fades or tokens.segment_ids is not None else None
        given = _seen(tokens, log_decay, beta.astype(jnp.float32))
        output: Array = _attend((DELTA, self.interpret), *given)
        return output.astype(tokens.value.dtype)


def _seen(tokens: Tokens, log_decay: Array | None, beta: Array | None) -> list:
    """Query, key, value, log-decays of each channel and β, 0 for hidden tokens; the
    first token of a segment forgets all."""
    query, key, value, visible, segment = Shown.of(tokens)
    if log_decay is not None:
        log_decay = jnp.broadcast_to(log_decay, key.shape).astype(jnp.float32)
    if visible is not None:
        if log_decay is not None:
            (log_decay,) = only_seen(visible, log_decay)
        if beta is not None:
            beta = jnp.where(visible[..., None], beta, 0)
    if log_decay is not None:
        if segment is not None:
            first = starts(segment)[:, :, None, None]
            log_decay = jnp.where(first, NEVER, log_decay)
        log_decay = jnp.maximum(log_decay, NEVER)
    return [query, key, value, log_decay, beta]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    static: tuple[Kernels, Any],
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    log_decay: Float[Array, "B T K H"] | None,
    beta: Float[Array, "B T K"] | None,
) -> Float[Array, "B T N V"]:
    kernels, interpret = static
    plan, operands = _operands(interpret, query, key, value, log_decay, beta)
    output, *_ = forward(kernels, plan, operands, keep=False)
    return apart(output, plan.heads, value)


def _forward(static: tuple[Kernels, Any], *given: Any) -> tuple[Array, tuple]:
    kernels, interpret = static
    plan, operands = _operands(interpret, *given)
    found = forward(kernels, plan, operands, keep=True)
    output, *kept = checkpoint_name(found, RESIDUAL)
    return apart(output, plan.heads, given[2]), (given, operands, kept)


def _backward(static: tuple[Kernels, Any], saved: tuple, change: Array) -> tuple:
    kernels, interpret = static
    given, operands, kept = saved
    query, key, value, log_decay, beta = given
    plan = Plan.of(query, value, interpret)
    change = plan.by_query(change, plan.value_size)
    found = backward(kernels, plan, operands, [change], kept)
    pairs = zip(found, given[:4], strict=False)
    of_tokens = [
        None if like is None else summed_apart(x, plan.heads, like) for x, like in pairs
    ]
    if beta is None:
        return *of_tokens, None
    rows = found[-1].reshape(plan.batch, plan.heads, plan.length)
    rows = jnp.swapaxes(rows, 1, 2)[:, : beta.shape[1]]
    of_beta = rows.reshape(*beta.shape, plan.groups).sum(axis=3)
    return *of_tokens, of_beta


_attend.defvjp(_forward, _backward)


def _operands(
    interpret: Any,
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array | None,
    beta: Array | None,
) -> tuple[Plan, Operands]:
    plan = Plan.of(query, value, interpret)
    fading = constants(log_decay is not None)
    if log_decay is not None:
        rest = plan.by_key(log_decay, plan.head_size)
        log_decay = _in_parts(rest, PARTS[value.dtype.name])
    if beta is not None:
        beta = jnp.repeat(beta, plan.groups, axis=2)
        beta = jnp.pad(beta, ((0, 0), (0, plan.length - beta.shape[1]), (0, 0)))
        beta = jnp.swapaxes(beta, 1, 2)
        beta = beta.reshape(plan.batch, -1, plan.packed, plan.length)
    return plan, Operands(
        plan.by_query(query, plan.head_size),
        plan.by_key(key, plan.head_size),
        plan.by_key(value, plan.value_size),
        log_decay,
        *fading,
        beta,
    )


def _in_parts(x: Float[Array, "*shape"], count: int) -> Array:
    """bfloat16 numbers [count …] that add up to these."""
    parts = []
    for _ in range(count):
        parts.append(jax.lax.reduce_precision(x, 8, 7))
        x -= parts[-1]
    return jnp.stack(parts).astype(jnp.bfloat16)
