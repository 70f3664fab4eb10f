"""Position term of scores, which gives symmetric attention a direction."""

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from symjax import attention
from symjax.layers.sharded import Operand

RULES = (
    ("attention/position_term/scale", P("tensor")),
    ("attention/position_term/bias", P("tensor", None)),
)


class PositionTerm(nnx.Module):
    """Scores a·S_ts + w·f(s) of a query t and a key s, with a and w learned per head.

    f(s) are sinusoidal features of the position of the key. At first a = 1 and w = 0.

    The paper has a·S_ts + w₁·f(t) + w₂·f(s) + b. The parts w₁·f(t) and b are left out.
    They are equal for all keys of a row, so they change no weight of softmax, sparsemax
    or entmax. With softpick or a sink they would.

    Args:
        heads: number of pairs (a, w): `Sizes.head_groups`.
        features: number of features f, an even number.
    Source: Kayyam et al. 2026, arXiv:2606.04032.
    """

    def __init__(self, heads: int, features: int):
        self.scale = nnx.Param(jnp.ones(heads))
        self.bias = nnx.Param(jnp.zeros((heads, features)))

    def scaled(self, query: Float[Array, "B T Nq H"]) -> Float[Array, "B T Nq H"]:
        """Return the queries times a, which multiplies their scores by a."""
        scale = self.scale[...]
        scale = jnp.repeat(scale, query.shape[2] // len(scale)).astype(query.dtype)
        return query * scale[None, None, :, None]

    def bias_of(self, positions: Int[Array, "#B S"]) -> Operand:
        """Return w·f(s) of all keys [#B N 1 S], given their positions."""
        return Operand(attention.position_bias(self.bias[...], positions), "BN")
