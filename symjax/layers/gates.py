"""The log-decays of a layer: a number a head, or a gate a channel."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from symjax import attention, config
from symjax.layers.parts import Part, Sizes
from symjax.layers.primitives import Linear
from symjax.layers.sharded import Operand

RANK = 16  # of the gate's map, as in GLA


class FixedDecay(nnx.Module):
    """The log-decay of RetNet or of one of the published Lightning slopes, a head.

    Args:
        branches: key heads of each head, which share one decay.
    """

    BY_DEPTH = ("rates",)

    def __init__(self, options: config.Model, depth: int, branches: int):
        heads, kind = options.kv_heads or options.heads, options.attention.decay
        self.branches = branches
        with jax.ensure_compile_time_eval():  # concrete numbers, also under eval_shape
            if kind == "retention":
                rates = attention.retention_log_decay(heads)
            else:
                rates = attention.lightning_log_decay(
                    heads,
                    depth,
                    options.depth,
                    convention={"lightning": "fla"}.get(kind, kind),
                )
            self.rates: Any = tuple(map(float, rates))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "1 1 K"]:
        return jnp.repeat(jnp.asarray(self.rates), self.branches)[None, None]


class GatedDecay(nnx.Module):
    """log sigmoid(up(down(x)))/16 for every channel of every key head.

    Source: Yang et al. 2023, arXiv:2312.06635, section 4.4.
    """

    def __init__(self, width: int, keys: int, head_size: int, *, dtype, rngs: nnx.Rngs):
        self.keys = keys
        shared = {"dtype": dtype, "rngs": rngs}
        self.down = Linear(width, RANK, use_bias=False, **shared)
        self.up = Linear(RANK, keys * head_size, use_bias=True, **shared)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T K H"]:
        logits = self.up(self.down(x)).astype(jnp.float32)
        logits = logits.reshape(*logits.shape[:2], self.keys, -1)
        return attention.gated_log_decay(logits)


def decay_of(
    options: config.Model, depth: int, sizes: Sizes, rngs: nnx.Rngs
) -> dict[str, Any]:
    """The module that says how fast the state of every key head forgets."""
    if options.attention.decay == "gated":
        dtype, shape = jnp.dtype(options.dtype), (sizes.keys, sizes.head_size)
        return {"decay": GatedDecay(options.width, *shape, dtype=dtype, rngs=rngs)}
    return {"decay": FixedDecay(options, depth, sizes.keys // sizes.kv_heads)}


DECAY = Part(
    weights=decay_of,
    operands=lambda layer, x, operands: (
        operands | {"log_decay": Operand(layer.decay(x), "BTK")}
    ),
    head_norm=True,
    keys=lambda chosen: ("decay",),
    rules=(
        ("decay/down/kernel", P("fsdp", None)),
        ("decay/up/kernel", P(None, "tensor")),
    ),
    owned=("decay",),
)
