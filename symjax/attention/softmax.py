"""Softmax attention, the measure of all the others.

    def softmax(q, k, v):                    # one head: q, k [T H], v [T V]; causal
        scores = q @ k.T / np.sqrt(q.shape[-1])
        weights = np.tril(np.exp(scores))
        return weights @ v / weights.sum(axis=-1, keepdims=True)

Without causality there is no `np.tril`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from symjax.attention.scores import ScoreMechanism


def softmax_weights(
    scores: Float[Array, "*B t s"], visible: Bool[Array, "*#B t s"] | None
) -> Float[Array, "*B t s"]:
    """exp(score) over its sum along the visible keys; zeros where none is visible."""
    if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
    top = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    unnormalised = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0))
    total = unnormalised.sum(axis=-1, keepdims=True)
    return unnormalised / jnp.where(total == 0, 1, total)


softmax = ScoreMechanism(
    "softmax",
    softmax_weights,
    """Scaled dot-product attention, softmax(q·k·scale + bias) V, in blocks of rows.

    Source: Vaswani et al. 2017, arXiv:1706.03762, equation 1.
    """,
    implementations=("rows", "whole", "fused", "cudnn", "ring"),
)
