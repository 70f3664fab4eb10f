"""How fast a decay mechanism forgets: a number a head, or a gate a channel."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from symjax import attention, config
from symjax.layers.linear import Linear

RANK = 16  # of the gate's map, as in GLA


class FixedDecay(nnx.Module):
    """The log-decay of RetNet or of one of the published Lightning slopes, a head.

    Args:
        branches: key heads of each head, which forget alike.
    """

    def __init__(self, options: config.Model, depth: int, branches: int):
        self.heads = options.kv_heads or options.heads
        self.branches = branches
        self.depth, self.layers = depth, options.depth
        self.kind = options.attention.decay

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "1 1 K"]:
        if self.kind == "retention":
            rates = attention.retention_log_decay(self.heads)
        else:
            convention = {"lightning": "fla"}.get(self.kind, self.kind)
            rates = attention.lightning_log_decay(
                self.heads, self.depth, self.layers, convention=convention
            )
        return jnp.repeat(jnp.asarray(rates), self.branches)[None, None]


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
