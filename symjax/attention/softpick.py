"""Softpick: softmax with a rectifier, whose rows may add up to less than one.

    def softpick(q, k, v, epsilon=1e-6):     # one head: q, k [T H], v [T V]
        powers = np.exp(q @ k.T / np.sqrt(q.shape[-1])) - 1
        total = np.abs(powers).sum(axis=-1, keepdims=True) + epsilon
        return np.maximum(powers, 0) / total @ v

A key with a negative score has weight 0, and still counts in the denominator. All
weights of a row may be 0, so a model needs no token as an attention sink.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from symjax.attention.scores.mechanism import ScoreMechanism

EPSILON = 1e-6  # added to the denominator
NEAR = 1.0  # below this score expm1 is used: exp(score) − 1 would cancel near 0


def softpick_weights(
    scores: Float[Array, "*B t s"], visible: Bool[Array, "*#B t s"] | None
) -> tuple[Float[Array, "*B t s"], Float[Array, "*B t 1"]]:
    """Return the numerators relu(exp(score) − 1), and the divisors of the rows.

    Numerators of hidden pairs are 0. Numerators and divisors are multiplied by
    exp(−top), so that no exponential overflows. `top` is the maximum of the row, or 0
    if the maximum is negative.
    """
    if visible is not None:
        scores = jnp.where(visible, scores, 0)  # a score of 0 has no weight
    top = jnp.maximum(scores.max(axis=-1, keepdims=True), 0)
    top = jax.lax.stop_gradient(top)
    shrink = jnp.exp(-top)
    near = jnp.expm1(jnp.minimum(scores, NEAR)) * shrink
    powers = jnp.where(scores < NEAR, near, jnp.exp(scores - top) - shrink)
    total = jnp.abs(powers).sum(axis=-1, keepdims=True) + EPSILON * shrink
    return jax.nn.relu(powers), jnp.where(total == 0, 1, total)


softpick = ScoreMechanism(
    "softpick",
    softpick_weights,
    """Attention with rectified weights, relu(exp(z) − 1) / (Σ |exp(z) − 1| + 1e-6).

    z = q·k·scale + bias. A key whose score is not above 0 has weight zero. It still has
    a gradient, through the denominator. The weights of a row add up to at most one.

    Source: Zuhri, Fuadi & Aji 2025, arXiv:2504.20966.
    """,
)
