"""Normalisation layers by name."""

import jax.numpy as jnp
from flax import nnx

EPSILON = 1e-5


def norm(
    kind: str, features: int, *, bias: bool = True, dtype=jnp.float32, rngs: nnx.Rngs
) -> nnx.LayerNorm | nnx.RMSNorm:
    """LayerNorm (`bias` says whether it shifts) or RMSNorm, with float32 statistics.

    Raises:
        ValueError: the kind is unknown.
    """
    if kind == "layernorm":
        return nnx.LayerNorm(
            features, epsilon=EPSILON, use_bias=bias, dtype=dtype, rngs=rngs
        )
    if kind == "rmsnorm":
        return nnx.RMSNorm(features, epsilon=EPSILON, dtype=dtype, rngs=rngs)
    raise ValueError(f"norm {kind!r} is unknown: choose from layernorm, rmsnorm")
