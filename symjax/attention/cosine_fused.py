"""Causal cosine attention on TPU kernels."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.chunks import Tokens
from symjax.attention.kernels import cosine as kernels
from symjax.attention.kernels.blocks import RESIDUAL
from symjax.attention.kernels.cosine import BLOCK, Operands, Plan
from symjax.attention.kernels.lanes import (
    apart,
    even,
    heads_in_a_tile,
    side_by_side,
    summed_apart,
)
from symjax.attention.kernels.seen import described
from symjax.attention.masks import only_seen, segment_runs, visible_keys


class FusedCosine(NamedTuple):
    """The kernels, as a `Kernel` of the engine."""

    interpret: Any = False

    def serves(self, tokens: Tokens, parameters: None) -> bool:
        return True

    def attend(
        self, tokens: Tokens, parameters: None = None
    ) -> Float[Array, "B T N V"]:
        query, key, value, _, mask, segment_ids = tokens
        dtype = jnp.result_type(query, key, value)
        query, key, value = (x.astype(dtype) for x in (query, key, value))
        visible = segment = None
        if mask is not None:
            visible = visible_keys(mask, *key.shape[:2])
            key, value = only_seen(visible, key, value)
        if segment_ids is not None:
            segment = segment_runs(segment_ids)
        output: Array = _attend(self.interpret, query, key, value, visible, segment)
        return output.astype(tokens.value.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    interpret: Any,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    visible: Bool[Array, "B T"] | None,
    segment: Int[Array, "B T"] | None,
) -> Float[Array, "B T N V"]:
    plan, operands = _operands(interpret, query, key, value, visible, segment)
    output, *_ = kernels.forward(plan, operands, keep=False)
    return apart(output, plan.heads, value)


def _forward(interpret: Any, *given: Any) -> tuple[Array, tuple]:
    plan, operands = _operands(interpret, *given)
    found = kernels.forward(plan, operands, keep=True)
    output, *kept = checkpoint_name(found, RESIDUAL)
    return apart(output, plan.heads, given[2]), (given[:3], operands, kept)


def _backward(interpret: Any, saved: tuple, change: Array) -> tuple:
    given, operands, kept = saved
    plan = _plan(interpret, *given)
    change = side_by_side(change, plan.heads, plan.length, plan.value_size)
    found = kernels.backward(plan, operands, change, kept)
    pairs = zip(found, given, strict=True)
    return *(summed_apart(x, plan.heads, like) for x, like in pairs), None, None


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
    interpret: Any,
    query: Array,
    key: Array,
    value: Array,
    visible: Array | None,
    segment: Array | None,
) -> tuple[Plan, Operands]:
    plan = _plan(interpret, query, key, value)
    of_rows = described(visible, segment, query, plan.length, BLOCK)
    wide = partial(side_by_side, heads=plan.heads, length=plan.length)
    return plan, Operands(
        wide(query, size=plan.head_size),
        wide(key, size=plan.head_size),
        wide(value, size=plan.value_size),
        *of_rows,
    )
