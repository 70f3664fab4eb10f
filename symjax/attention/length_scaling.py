"""Entropy-invariant scaling: the scores of a row by the logarithm of what it sees."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

SHORTEST = 16  # visible keys below which the length scale no longer shrinks


def length_scale(visible: Int[Array, "*shape"], base: float) -> Shaped[Array, "*shape"]:
    """log n / log base, the entropy-invariant factor of a row that sees n keys.

    In a causal model n is the row's own count, so that decoding a token gives what
    the whole sequence gave. Counts below 16 are taken as 16: a short row would
    otherwise be blurred.

    Args:
        base: above 1, as `softmax` sees to.
    Source: Su Jianlin 2021, spaces.ac.cn/archives/8823 and 9588 (base 512).
    """
    return jnp.log(jnp.maximum(visible, SHORTEST).astype(float)) / math.log(base)
