"""Causal cosine attention on TPU kernels."""

from functools import partial
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.chunks import Tokens
from symjax.attention.kernels.blocks import RESIDUAL
from symjax.attention.kernels.cosine import COSINE, Operands
from symjax.attention.kernels.lanes import apart, summed_apart
from symjax.attention.kernels.passes import Plan, backward, forward
from symjax.attention.kernels.seen import Shown, described


class FusedCosine(NamedTuple):
    """The kernels, as a `Kernel` of the engine."""

    interpret: Any = False

    platform = "tpu"

    def serves(self, tokens: Tokens, parameters: None) -> bool:
        return True

    def attend(
        self, tokens: Tokens, parameters: None = None
    ) -> Float[Array, "B T N V"]:
        output: Array = _attend(self.interpret, *Shown.of(tokens))
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
    output, *_ = forward(COSINE, plan, operands, keep=False)
    return apart(output, plan.heads, value)


def _forward(interpret: Any, *given: Any) -> tuple[Array, tuple]:
    plan, operands = _operands(interpret, *given)
    found = forward(COSINE, plan, operands, keep=True)
    output, *kept = checkpoint_name(found, RESIDUAL)
    return apart(output, plan.heads, given[2]), (given[:3], operands, kept)


def _backward(interpret: Any, saved: tuple, change: Array) -> tuple:
    given, operands, kept = saved
    plan = Plan.of(given[0], given[2], interpret)
    change = plan.by_query(change, plan.value_size)
    found = backward(COSINE, plan, operands, [change], kept)
    pairs = zip(found, given, strict=True)
    return *(summed_apart(x, plan.heads, like) for x, like in pairs), None, None


_attend.defvjp(_forward, _backward)


def _operands(
    interpret: Any,
    query: Array,
    key: Array,
    value: Array,
    visible: Array | None,
    segment: Array | None,
) -> tuple[Plan, Operands]:
    plan = Plan.of(query, value, interpret)
    return plan, Operands(
        plan.by_query(query, plan.head_size),
        plan.by_key(key, plan.head_size),
        plan.by_key(value, plan.value_size),
        *described(visible, segment, query, plan.length, plan.block),
    )
