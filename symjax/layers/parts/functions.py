"""Scale of functions of QQᵀ, and the weights of the Mesa layer."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from symjax import config
from symjax.attention.recurrent.power_series import TERMS
from symjax.layers.parts.part import (
    Part,
    Sizes,
    named_options,
    recurrence_flops,
    repeat_key_heads,
)
from symjax.layers.primitives import unit_length
from symjax.layers.sharded import Operand

LEAST_RIDGE = 0.25  # as in the published Mesa layer, whose ridge begins at 1


def _options_of_function(options: config.Model, mechanism: str) -> dict[str, Any]:
    """Return the options of the function, and in a decoder its constant scale.

    An encoder divides QQᵀ by the number of tokens. A decoder divides it by
    model.length, since its rows may not depend on how long the text becomes.
    """
    scale = {"scale": 1 / options.length} if config.is_causal(options) else {}
    return named_options(options, mechanism) | scale


def _scaled_queries(
    layer: Any, x: Any, operands: dict[str, Operand]
) -> dict[str, Operand]:
    """Multiply queries by √function_scale, and in a decoder also by H^(−1/4)."""
    factor = layer.chosen.function_scale**0.5
    if layer.mixer.causal:
        factor *= layer.mixer.sizes.head_size**-0.25
    return operands | {"query": Operand(operands["query"].array * factor, "BTN")}


def _flops_of_function(mixer: Any, chosen: config.Attention, length: int) -> float:
    """Return the operations per token of a function of QQᵀ.

    An encoder computes QᵀQ, QᵀV, and Q times a matrix [H V]. In a decoder a resolvent
    costs as much as the Mesa layer. The other functions are power series. Each term
    reads a state [H H]. exp and expm1 count with 128 terms, though they need fewer for
    small scores.
    """
    sizes = mixer.sizes
    if not mixer.causal:
        products = sizes.head_size**2 + 2 * sizes.head_size * sizes.value_size
        return 2 * sizes.queries * products
    if chosen.function.startswith("resolvent"):
        return _flops_of_mesa(mixer, chosen, length)
    size, chunk = sizes.head_size, min(chosen.chunk_size, length)
    term = 2 * sizes.queries * size * (size + chunk)
    terms = TERMS if chosen.function.startswith("exp") else 1
    reading = recurrence_flops(mixer, size, length)
    return reading + terms * term + 2 * sizes.queries * size**2


def _weights_of_mesa(
    options: config.Model, depth: int, sizes: Sizes, rngs: nnx.Rngs
) -> dict[str, Any]:
    """Return the weights of the ridge, by key head and channel, in one axis."""
    start = jnp.log(jnp.expm1(1 - LEAST_RIDGE))
    return {"ridge": nnx.Param(jnp.full(sizes.keys * sizes.head_size, start))}


def _operands_of_mesa(
    layer: Any, x: Any, operands: dict[str, Operand]
) -> dict[str, Operand]:
    """Add the ridge, above 0.25; scale queries and keys to length 1."""
    sizes = layer.mixer.sizes
    ridge = LEAST_RIDGE + jax.nn.softplus(layer.ridge[...])
    ridge = ridge.reshape(sizes.keys, sizes.head_size)
    operands = operands | {"ridge": Operand(ridge, "K")}
    for name in ("query", "key"):
        operand = operands[name]
        operands[name] = operand._replace(array=unit_length(operand.array))
    return operands


def _flops_of_mesa(mixer: Any, chosen: config.Attention, length: int) -> float:
    """Return the operations per token of a recurrence with two states.

    The state [H H] is read and written like the state [H V]. Each chunk also multiplies
    keys and values by an inverse.
    """
    sizes, chunk = mixer.sizes, min(chosen.chunk_size, length)
    size, value = sizes.head_size, sizes.value_size
    learning = 6 * size**2 + 4 * size * value + chunk * (4 * size + 2 * value + chunk)
    return recurrence_flops(mixer, size, length) + sizes.keys * learning


def _mesa_converted(
    weights: dict[str, Any], source: config.Model, target: config.Model
) -> dict[str, Any]:
    """Repeat the ridges of key heads that the target repeats.

    If only the target is differential, each branch keeps the ridges of its channels.
    """
    ridge = repeat_key_heads(weights["ridge"], source, target)
    return weights | {"ridge": ridge}


MATRIX_FUNCTION = Part(
    options=_options_of_function,
    operands=_scaled_queries,
    keys=lambda chosen: ("function_scale",),
    flops=_flops_of_function,
)
MESA = Part(
    weights=_weights_of_mesa,
    operands=_operands_of_mesa,
    head_norm=True,
    flops=_flops_of_mesa,
    rules=(("ridge", P("tensor")),),
    owned=("ridge",),
    convert=_mesa_converted,
)
