"""Weights of the delta rule: its gates, and the decay of the state.

Each gate is the sigmoid of a linear map of the token without a bias.
`model.attention.delta_gates` chooses the gates:

head       β per key head: D K weights for width D
channel    erase gates per channel of the keys, and write gates per channel of the
           values, of Gated DeltaNet-2 (arXiv:2605.22791): D K H + D Kv V weights for Kv
           value heads; β is 1
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

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

GATES = "beta", "erase", "write"


def _weights(
    options: config.Model, depth: int, sizes: Sizes, rngs: nnx.Rngs
) -> dict[str, Any]:
    shared = {"use_bias": False, "dtype": jnp.dtype(options.dtype), "rngs": rngs}
    widths = {"beta": sizes.keys}
    if options.attention.delta_gates == "channel":
        widths = {
            "erase": sizes.keys * sizes.head_size,
            "write": sizes.kv_heads * sizes.value_size,
        }
    weights = {x: Linear(options.width, y, **shared) for x, y in widths.items()}
    if options.attention.decay == "none":
        return weights
    return weights | {"decay": decay_of(options, depth, sizes, rngs)}


def _operands(layer: Any, x: Array, operands: dict[str, Operand]) -> dict[str, Operand]:
    """Add gates in (0, 1) and decays; scale queries and keys to length 1.

    Write gates multiply the values.
    """
    operands = dict(operands)
    if layer.chosen.delta_gates == "channel":
        key, value = operands["key"].array, operands["value"]
        erase = _gate(layer.erase, x).reshape(key.shape)
        write = _gate(layer.write, x).reshape(value.array.shape)
        written = (write * value.array).astype(value.array.dtype)
        operands["value"] = value._replace(array=written)
        operands["erase"] = Operand(erase, "BTK")
        beta = jnp.ones(key.shape[:3], erase.dtype)
    else:
        beta = _gate(layer.beta, x)
    operands["beta"] = Operand(beta, "BTK")
    for name in ("query", "key"):
        operand = operands[name]
        operands[name] = operand._replace(array=unit_length(operand.array))
    if layer.chosen.decay != "none":
        operands["log_decay"] = Operand(layer.decay(x), "BTK")
    return operands


def _gate(gate: Linear, x: Float[Array, "B T D"]) -> Float[Array, "B T W"]:
    """Return the sigmoid of a linear map of each token, in float32 at least."""
    logits = gate(x)
    return jax.nn.sigmoid(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))


def _flops(mixer: Any, chosen: config.Attention, length: int) -> float:
    """Return the operations per token of the delta rule.

    It is an estimate: a key head counts as one more query head, since the key reads the
    state too. The inverse for the triangular solve is not counted.
    """
    sizes = mixer.sizes
    reading = recurrence_flops(mixer, sizes.head_size, length)
    return reading * (1 + sizes.keys / sizes.queries)


def _converted(
    weights: dict[str, Any], source: config.Model, target: config.Model
) -> dict[str, Any]:
    """Return the weights of a layer of the target.

    Gates of another kind keep their initial values. Copies of a key head have its gates
    and decay. If only the target is differential (V1), both branches of a head get its
    β, and the erase gates of their channels.
    """
    weights = decay_converted(weights, source, target)
    before, after = source.attention, target.attention
    gates = {x: weights[x] for x in GATES if x in weights}
    if before.delta_gates != after.delta_gates:
        return {x: y for x, y in weights.items() if x not in gates}
    gates = repeat_key_heads(gates, source, target)
    if "beta" in gates and (before.differential, after.differential) == ("none", "v1"):
        gates = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=-1), gates)
    return weights | gates


DELTA = Part(
    weights=_weights,
    operands=_operands,
    head_norm=True,
    keys=lambda chosen: ("decay", "decay_heads", "delta_gates"),
    flops=_flops,
    rules=tuple((f"{gate}/kernel", P("fsdp", "tensor")) for gate in GATES),
    owned=(*GATES, *DECAY.owned),
    convert=_converted,
    check=DECAY.check,
)
