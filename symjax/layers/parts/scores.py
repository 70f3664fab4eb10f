"""Weights of score mechanisms: forget gates and sinks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from symjax import config
from symjax.attention.gated_linear import LOG_DECAYS
from symjax.layers.parts.decays import decay_of
from symjax.layers.parts.part import Part, Sizes
from symjax.layers.sharded import Operand


def _weights(
    options: config.Model, depth: int, sizes: Sizes, rngs: nnx.Rngs
) -> dict[str, Any]:
    """Return the forget gate and the logits of the sink, as far as they are chosen.

    Raises:
        ValueError: model.attention.forget has a decay per channel.
    """
    chosen, weights = options.attention, {}
    if chosen.forget != "none":
        if LOG_DECAYS[chosen.forget].per == "channel":
            raise ValueError(
                f"model.attention.forget {chosen.forget!r} is a decay per channel: "
                "scores take one per head"
            )
        attention = dataclasses.replace(chosen, decay=chosen.forget)
        gated = dataclasses.replace(options, attention=attention)
        weights["forget"] = decay_of(gated, depth, sizes, rngs)["decay"]
    if chosen.sink:
        weights["sink"] = nnx.Param(jnp.zeros(sizes.groups))
    return weights


def _operands(layer: Any, x: Array, operands: dict[str, Operand]) -> dict[str, Operand]:
    chosen = layer.chosen
    if chosen.forget != "none":
        operands = operands | {"log_decay": Operand(layer.forget(x), "BSK")}
    if chosen.sink:
        operands = operands | {"sink": Operand(layer.sink[...], "N")}
    return operands


def _converted(
    weights: dict[str, Any], source: config.Model, target: config.Model
) -> dict[str, Any]:
    """Return the weights of a layer of the target.

    Gates of another kind start fresh. For differential V1 from one map, both branches
    of a head get its gate.
    """
    before, after = source.attention, target.attention
    if before.forget != after.forget:
        return {name: x for name, x in weights.items() if name != "forget"}
    if (before.differential, after.differential) != ("none", "v1"):
        return weights
    twice = {
        name: jax.tree.map(lambda x: jnp.repeat(x, 2, axis=-1), weight)
        for name, weight in weights.get("forget", {}).items()
        if name != "down"  # a map that all heads share
    }
    return weights | ({"forget": weights["forget"] | twice} if twice else {})


SCORES = Part(
    weights=_weights,
    operands=_operands,
    state=lambda layer: {"forgets": True} if layer.chosen.forget != "none" else {},
    keys=lambda chosen: ("forget", "sink"),
    rules=(
        ("forget/up/kernel", P("fsdp", "tensor")),
        ("forget/rate", P("tensor")),
        ("forget/bias", P("tensor")),
        ("sink", P("tensor")),
    ),
    owned=("forget", "sink"),
    convert=_converted,
)
