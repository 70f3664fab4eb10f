"""Softmax attention, to which all other mechanisms are compared.

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
    """Return the weights exp(score − maximum of the row), and the sum of each row.

    Weights of hidden pairs are 0. A row without visible keys gets 1 as its sum.
    """
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
    """Scaled dot-product attention, softmax(q·k·scale + bias) V.

    In bfloat16 the gradient of the query loses precision if the keys of a row are
    nearly equal. Its relative error is 1.5 % if the keys differ by a tenth of their
    size, and 12 % if they differ by a hundredth.

    Source: Vaswani et al. 2017, arXiv:1706.03762, equation 1.
    """,
    implementations=("rows", "whole", "tpu", "gpu_differential", "cudnn", "ring"),
)
