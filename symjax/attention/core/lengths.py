"""Laws of length: changes of scores by the number of visible keys, or by distance.

More keys flatten the weights of a row. A factor of the scores that grows with n, the
number of keys that the row sees, keeps the weights equally sharp for all n.

    log_scale        log n / log base
    floor_scale      1 + 0.1 log(1 + ⌊n / 8192⌋)
    adaptive_scale   1 + β (log(n + 1))^γ, with β and γ for each row
    distance_scale   a factor and a shift that depend on the distance of a pair

In a causal model each row has its own n, so that decoding token by token computes the
same rows as the whole sequence.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

SHORTEST = 16  # rows with fewer visible keys have the log scale of 16 keys
FLOOR, STEP = 8192, 0.1  # constants of `floor_scale`
NEAR = 10.0  # τ of `distance_scale`: closer keys have nearly unchanged scores
LAWS = ("floor", "distance")  # values of `length_scale` that are names, not arrays


def log_scale(visible: Int[Array, "*shape"], base: float) -> Shaped[Array, "*shape"]:
    """Return log n / log base, the entropy-invariant factor of a row with n keys.

    If n is below 16, the factor is that of 16: a smaller factor would flatten the
    weights of short rows.

    Args:
        visible: numbers n of keys that rows see.
        base: above 1; `ScoreMechanism` checks it.
    Source: Su Jianlin 2021, spaces.ac.cn/archives/8823 and 9588 (base 512).
    """
    return jnp.log(jnp.maximum(visible, SHORTEST).astype(float)) / math.log(base)


def floor_scale(visible: Int[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """Return 1 + 0.1 log(1 + ⌊n / 8192⌋), which is 1 up to 8191 keys.

    Source: Meta 2025, Llama 4, whose layers without RoPE have this factor.
    """
    return 1 + STEP * jnp.log1p((visible // FLOOR).astype(float))


def adaptive_scale(
    visible: Int[Array, "#B #N #T 1"],
    slope: Float[Array, "#B N #T 1"],
    power: Float[Array, "#B N #T 1"],
) -> Shaped[Array, "#B N #T 1"]:
    """Return 1 + slope · (log(n + 1))^power.

    Source: Vasylenko et al. 2025, arXiv:2506.16640 (ASEntmax).
    """
    logarithm = jnp.log1p(jnp.maximum(visible, 1).astype(slope.dtype))
    return 1 + slope * jnp.exp(power * jnp.log(logarithm))


def distance_scale(
    distance: Int[Array, "*shape"], dtype
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Return the factor a and the shift m of the scores at a distance d.

    a² = 1 + 2 log(1 + |d|/10) and m = 1 − a². If scores are normal with variance 1, the
    keys between distances d and 2d then have about the same total weight for every d.

    Source: Anson, Wang & Aitchison 2025, arXiv:2505.17083, with τ = 10.
    """
    square = 1 + 2 * jnp.log1p(jnp.abs(distance).astype(dtype) / NEAR)
    return jnp.sqrt(square), 1 - square
