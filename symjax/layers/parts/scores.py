"""Weights of score mechanisms: forget gates, sinks, learned factors of the scores.

A law of length (model.attention.length_scale) changes the scores by the number of
visible keys, or by the distance between query and key.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from symjax import config
from symjax.attention.core.lengths import LAWS
from symjax.attention.gated_linear import LOG_DECAYS
from symjax.layers.parts.decays import decay_of, gate_of_key_heads, has_rates
from symjax.layers.parts.part import Part, Sizes, named_options
from symjax.layers.primitives import Linear
from symjax.layers.sharded import Operand


def _weights(
    options: config.Model, depth: int, sizes: Sizes, rngs: nnx.Rngs
) -> dict[str, Any]:
    """Return the weights of the gate, the sink and the law that are chosen.

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
        weights["forget"] = decay_of(options, depth, sizes, rngs, key="forget")
    if chosen.sink:
        weights["sink"] = nnx.Param(jnp.zeros(sizes.head_groups))
    if chosen.length_scale == "learned":
        weights["length_factor"] = nnx.Param(jnp.ones(sizes.queries))
    elif chosen.length_scale == "adaptive":
        shared = {"use_bias": False, "dtype": jnp.dtype(options.dtype), "rngs": rngs}
        for name in ("length_slope", "length_power"):
            weights[name] = Linear(options.width, sizes.head_groups, **shared)
    return weights


def _operands(layer: Any, x: Array, operands: dict[str, Operand]) -> dict[str, Operand]:
    chosen = layer.chosen
    if chosen.forget != "none":
        operands = operands | {"log_decay": Operand(layer.forget(x), "BSK")}
    if chosen.sink:
        operands = operands | {"sink": Operand(layer.sink[...], "N")}
    if chosen.length_scale == "learned":
        query = operands["query"]
        factor = layer.length_factor[...].astype(query.array.dtype)
        scaled = query._replace(array=query.array * factor[None, None, :, None])
        operands = operands | {"query": scaled}
    elif chosen.length_scale == "adaptive":
        slope, power = layer.length_slope(x), layer.length_power(x)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        law = jax.nn.softplus(slope.astype(wide)), 2 * jnp.tanh(power.astype(wide))
        operands = operands | {"length_scale": Operand(law, "BTN")}
    return operands


def _options(options: config.Model, mechanism: str) -> dict[str, Any]:
    """Return the options of a mechanism.

    A law of length with weights of the layer is left out: `_operands` adds it.

    Raises:
        ValueError: the law `learned` without model.attention.length_base, or another
            law with it.
    """
    values = named_options(options, mechanism)
    law, base = options.attention.length_scale, options.attention.length_base
    if (law == "learned") != bool(base) and law:
        needs = "needs" if law == "learned" else "replaces"
        raise ValueError(
            f"model.attention.length_scale {law!r} {needs} "
            f"model.attention.length_base, which is {base}"
        )
    return {x: y for x, y in values.items() if x != "length_scale" or y in LAWS}


def _converted(
    weights: dict[str, Any], source: config.Model, target: config.Model
) -> dict[str, Any]:
    """Return the weights of a layer of the target.

    Gates of another kind keep their initial values. Copies of a key head have its gate.
    If only the target is differential, both branches of a head get its length factor,
    and in V1 its gate.
    """
    before, after = source.attention, target.attention
    if before.forget != after.forget:
        weights = {name: x for name, x in weights.items() if name != "forget"}
    if "forget" in weights:
        repeated = gate_of_key_heads(weights["forget"], source, target)
        weights = weights | {"forget": repeated}
    combined = before.differential, after.differential
    if combined in (("none", "v1"), ("none", "v2")) and "length_factor" in weights:
        factor = jnp.repeat(weights["length_factor"], 2)
        weights = weights | {"length_factor": factor}
    if combined != ("none", "v1"):
        return weights
    twice = {
        name: jax.tree.map(lambda x: jnp.repeat(x, 2, axis=-1), weight)
        for name, weight in weights.get("forget", {}).items()
        if name != "down"  # a map that all heads share
    }
    return weights | ({"forget": weights["forget"] | twice} if twice else {})


def _check_rates(source: config.Model, target: config.Model) -> None:
    """Raise if key heads of the target would forget at other constant rates.

    Raises:
        ValueError: the numbers of key/value heads differ, naming the key.
    """
    forget = source.attention.forget
    heads, of_target = (x.kv_heads or x.heads for x in (source, target))
    if has_rates(forget) and forget == target.attention.forget and heads != of_target:
        raise ValueError(
            f"model.attention.forget {forget!r} has a rate for each of {heads} "
            f"key/value heads, which {of_target} key/value heads do not have"
        )


SCORES = Part(
    weights=_weights,
    operands=_operands,
    state=lambda layer: {"forgets": True} if layer.chosen.forget != "none" else {},
    options=_options,
    keys=lambda chosen: ("forget", "sink"),
    rules=(
        ("forget/up/kernel", P("fsdp", "tensor")),
        ("forget/rate", P("tensor")),
        ("forget/bias", P("tensor")),
        ("sink", P("tensor")),
        ("length_factor", P("tensor")),
        ("length_*/kernel", P("fsdp", "tensor")),
    ),
    owned=("forget", "sink", "length_factor", "length_slope", "length_power"),
    convert=_converted,
    check=_check_rates,
)
