"""Weights of the delta rule: β, and the decay of the state."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from symjax import config
from symjax.layers.parts.decays import DECAY, decay_converted, decay_of
from symjax.layers.parts.part import (
    Part,
    Sizes,
    recurrence_flops,
    repeat_key_heads,
)
from symjax.layers.primitives import Linear, unit_length
from symjax.layers.sharded import Operand


def _weights(
    options: config.Model, depth: int, sizes: Sizes, rngs: nnx.Rngs
) -> dict[str, Any]:
    shared = {"use_bias": False, "dtype": jnp.dtype(options.dtype), "rngs": rngs}
    weights = {"beta": Linear(options.width, sizes.keys, **shared)}
    if options.attention.decay == "none":
        return weights
    return weights | {"decay": decay_of(options, depth, sizes, rngs)}


def _operands(layer: Any, x: Array, operands: dict[str, Operand]) -> dict[str, Operand]:
    """Add β in (0, 1) per key head and decays; scale queries and keys to length 1."""
    logits = layer.beta(x)
    wide = jnp.promote_types(logits.dtype, jnp.float32)
    beta = jax.nn.sigmoid(logits.astype(wide))
    operands = operands | {"beta": Operand(beta, "BTK")}
    for name in ("query", "key"):
        operand = operands[name]
        operands[name] = operand._replace(array=unit_length(operand.array))
    if layer.chosen.decay != "none":
        operands["log_decay"] = Operand(layer.decay(x), "BTK")
    return operands


def _flops(mixer: Any, chosen: config.Attention, length: int) -> float:
    """Return the operations per token of the delta rule.

    The formula counts a key head as one more query head. The key reads the state as a
    query does (2 H V). Its pairs and the triangular solve cost as much as the pairs and
    the values of a query. Two terms are wrong: the added query head does not write to
    the state, but 2 H V are counted for it, and the inverse of a chunk of C tokens for
    the solve, 2 C²/3, is left out.
    """
    sizes = mixer.sizes
    reading = recurrence_flops(mixer, sizes.head_size, length)
    return reading * (1 + sizes.keys / sizes.queries)


def _converted(
    weights: dict[str, Any], source: config.Model, target: config.Model
) -> dict[str, Any]:
    """Return the weights of a layer of the target.

    Key heads that the target repeats keep their β and decay. If only the target is
    differential (V1), both branches of a head get the β and the decay of the head.
    """
    weights = decay_converted(weights, source, target)
    beta = repeat_key_heads(weights["beta"], source, target)
    combined = source.attention.differential, target.attention.differential
    if combined != ("none", "v1"):
        return weights | {"beta": beta}
    twice = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=-1), beta)
    return weights | {"beta": twice}


DELTA = Part(
    weights=_weights,
    operands=_operands,
    head_norm=True,
    keys=lambda chosen: ("decay", "decay_heads"),
    flops=_flops,
    rules=(("beta/kernel", P("fsdp", "tensor")),),
    owned=("beta", *DECAY.owned),
    convert=_converted,
    check=DECAY.check,
)
