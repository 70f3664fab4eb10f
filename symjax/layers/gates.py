"""How fast a decay mechanism forgets: a number a head, or a gate a channel."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from symjax import attention, config
from symjax.layers.primitives import Linear

RANK = 16  # of the gate's map, as in GLA


class FixedDecay(nnx.Module):
    """The log-decay of RetNet or of one of the published Lightning slopes, a head.

    Args:
        branches: key heads of each head, which forget alike.
    """

    BY_DEPTH = ("rates",)

    def __init__(self, options: config.Model, depth: int, branches: int):
        heads, kind = options.kv_heads or options.heads, options.attention.decay
        self.branches = branches
        with jax.ensure_compile_time_eval():  # numbers, also where shapes are traced
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
