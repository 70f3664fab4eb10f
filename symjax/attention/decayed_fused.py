"""Causal linear attention with a decay of each token's own on TPU kernels."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.chunks import Tokens
from symjax.attention.kernels import decay as kernels
from symjax.attention.kernels.decay import BLOCK, Operands, Plan
from symjax.attention.kernels.lanes import (
    apart,
    even,
    heads_in_a_tile,
    side_by_side,
    summed_apart,
)
from symjax.attention.masks import only_seen, segment_runs, starts, visible_keys

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
        query, key, value, (decay,), mask, segment_ids = tokens
        dtype = jnp.result_type(query, key, value)
        query, key, value = (x.astype(dtype) for x in (query, key, value))
        decay = jnp.broadcast_to(decay, key.shape).astype(jnp.float32)
        if mask is not None:
            visible = visible_keys(mask, *key.shape[:2])
            key, value, decay = only_seen(visible, key, value, decay)
        if segment_ids is not None:
            first = starts(segment_runs(segment_ids))[:, :, None, None]
            decay = jnp.where(first, NEVER, decay)
        decay = jnp.maximum(decay, NEVER)
        output: Array = _attend(self.interpret, query, key, value, decay)
        return output.astype(tokens.value.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    interpret: Any,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    decay: Float[Array, "B T K H"],
) -> Float[Array, "B T N V"]:
    plan, operands = _operands(interpret, query, key, value, decay)
    (output,) = kernels.forward(plan, operands, keep=False)
    return apart(output, plan.heads, value)


def _forward(interpret: Any, *given: Array) -> tuple[Array, tuple]:
    plan, operands = _operands(interpret, *given)
    output, before = kernels.forward(plan, operands, keep=True)
    return apart(output, plan.heads, given[2]), (given, operands, before)


def _backward(interpret: Any, saved: tuple, change: Array) -> tuple[Array, ...]:
    given, operands, before = saved
    plan = _plan(interpret, *given[:3])
    change = side_by_side(change, plan.heads, plan.length, plan.value_size)
    found = kernels.backward(plan, operands, change, before)
    pairs = zip(found, given, strict=True)
    return tuple(summed_apart(x, plan.heads, like) for x, like in pairs)


_attend.defvjp(_forward, _backward)


def _plan(interpret: Any, query: Array, key: Array, value: Array) -> Plan:
    batch, length, heads, size = query.shape
    packed = heads_in_a_tile(heads, size, value.shape[3])
    sizes = size, value.shape[3]
    if packed == 1:
        sizes = even(size), even(value.shape[3])
    groups = heads // key.shape[2]
    return Plan(batch, heads, groups, packed, even(length, BLOCK), *sizes, interpret)


def _operands(
    interpret: Any, query: Array, key: Array, value: Array, decay: Array
) -> tuple[Plan, Operands]:
    plan = _plan(interpret, query, key, value)
    wide = partial(side_by_side, heads=plan.heads, length=plan.length)
    parts, rest = [], wide(decay, size=plan.head_size)
    for _ in range(kernels.PARTS[value.dtype.name]):
        parts.append(jax.lax.reduce_precision(rest, 8, 7))
        rest -= parts[-1]
    return plan, Operands(
        wide(query, size=plan.head_size),
        wide(key, size=plan.head_size),
        wide(value, size=plan.value_size),
        jnp.stack(parts).astype(jnp.bfloat16),
        *kernels.constants(),
    )
