"""Softmax attention, the measure of all the others.

    def softmax(q, k, v):                    # one head: q, k [T H], v [T V]; causal
        scores = q @ k.T / np.sqrt(q.shape[-1])
        weights = np.tril(np.exp(scores))
        return weights @ v / weights.sum(axis=-1, keepdims=True)

Without causality there is no `np.tril`.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from symjax.attention.scores.mechanism import ScoreMechanism
from symjax.attention.scores.rows import KEPT


def softmax_weights(
    scores: Float[Array, "*B t s"], visible: Bool[Array, "*#B t s"] | None
) -> tuple[Float[Array, "*B t s"], Float[Array, "*B t 1"]]:
    """exp(score − the row's largest), 0 where not visible, and what divides it."""
    if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
    top = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    top = checkpoint_name(jnp.where(jnp.isfinite(top), top, 0), KEPT)
    weights = jnp.exp(scores - top)
    total = checkpoint_name(weights.sum(axis=-1, keepdims=True), KEPT)
    return weights, jnp.where(total == 0, 1, total)


softmax = ScoreMechanism(
    "softmax",
    softmax_weights,
    """Scaled dot-product attention, softmax(q·k·scale + bias) V, in blocks of rows.

    In bfloat16 the derivatives of scores are rounded before their product with the
    keys, so that what all keys have in common does not cancel. The gradient of a query
    is then off by about 1e-3 times the size of the keys over the spread among them: by
    1.5 % where they differ by a tenth, 12 % where they differ by a hundredth.

    Source: Vaswani et al. 2017, arXiv:1706.03762, equation 1.
    """,
    implementations=("rows", "whole", "fused", "hopper", "cudnn", "ring"),
)
