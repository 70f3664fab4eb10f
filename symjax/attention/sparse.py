"""Sparse attention: sparsemax and entmax-1.5, with many weights that are exactly zero.

    def sparsemax(q, k, v):                  # one head: q, k [T H], v [T V]
        scores = q @ k.T / np.sqrt(q.shape[-1])
        ordered = np.sort(scores)[:, ::-1]                   # highest first
        τ = (np.cumsum(ordered, axis=-1) - 1) / np.arange(1, len(k) + 1)
        return np.maximum(scores - τ.max(axis=-1, keepdims=True), 0) @ v

Weights are powers of the excess of a score over the threshold τ of its row: [z − τ]₊ in
sparsemax and [z/2 − τ]₊² in entmax-1.5. The weights of a row sum to one, which fixes τ.
The limit of [z/p − τ]₊^p for large p is softmax. Both mechanisms share one function of
the power p, 1 or 2.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from symjax.attention.scores.mechanism import ScoreMechanism
from symjax.attention.scores.rows import KEPT

FLOOR = -2.0  # least scaled score, relative to the maximum; thresholds are at least −1


def sparsemax_weights(
    scores: Float[Array, "*B t s"], visible: Bool[Array, "*#B t s"] | None
) -> Float[Array, "*B t s"]:
    """Return the point of the simplex nearest to the scores; 0 for hidden pairs."""
    return _excess(1, _hide(scores, visible))


def entmax15_weights(
    scores: Float[Array, "*B t s"], visible: Bool[Array, "*#B t s"] | None
) -> Float[Array, "*B t s"]:
    """Return [score/2 − τ]₊², and 0 for hidden pairs."""
    return _excess(2, _hide(scores, visible)) ** 2


sparsemax = ScoreMechanism(
    "sparsemax",
    sparsemax_weights,
    """Attention whose weights are the point of the simplex nearest to the scores.

    weights = [z − τ]₊ with Σ [z − τ]₊ = 1, for z = q·k·scale + bias

    A key whose score is more than 1 below the maximum of the row has weight zero and no
    gradient. The threshold τ is exact up to rounding. It is computed without sorting,
    in a few passes over the row, O(log S) at worst.

    Source: Martins & Astudillo 2016, arXiv:1602.02068; τ as in Michelot 1986.
    """,
)

entmax15 = ScoreMechanism(
    "entmax15",
    entmax15_weights,
    """Attention by entmax-1.5, halfway between softmax and sparsemax.

    weights = [z/2 − τ]₊² with Σ [z/2 − τ]₊² = 1, for z = q·k·scale + bias

    A key whose score is more than 2 below the maximum of the row has weight zero and no
    gradient. Exactness and cost are as in `sparsemax`.

    Source: Peters, Niculae & Martins 2019, arXiv:1905.05702.
    """,
)


def _hide(scores: Array, visible: Array | None) -> Array:
    return scores if visible is None else jnp.where(visible, scores, -jnp.inf)


def _above_threshold(power: int, scores: Array) -> Array:
    """Return [z/power − τ]₊ along the last axis, with Σ [z/power − τ]₊^power = 1.

    Scores of −∞ give zeros. The maximum of the row is subtracted. Scaled scores below
    `FLOOR`, which is below every threshold, are raised to it. The maximum and the
    threshold are saved, so the backward pass does not compute them again.
    """
    top = scores.max(axis=-1, keepdims=True)
    top = checkpoint_name(jnp.where(top == -jnp.inf, 0, top), KEPT)
    scaled = jnp.maximum((scores - top) / power, FLOOR)
    threshold = checkpoint_name(_threshold(power, scaled), KEPT)
    excess = jnp.maximum(scaled - threshold, 0)
    return jnp.where(scores == -jnp.inf, 0, excess)


_excess = jax.custom_jvp(_above_threshold, nondiff_argnums=(0,))


@_excess.defjvp
def _excess_change(power: int, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """Return the excess and its derivative.

    The derivative of τ is the mean change of z/power, weighted by `_slopes`.
    """
    (scores,), (change,) = primals, tangents
    excess = _above_threshold(power, scores)
    support = excess > 0
    slopes = _slopes(power, excess)
    total = slopes.sum(axis=-1, keepdims=True)
    shift = (slopes * change).sum(axis=-1, keepdims=True)
    shift /= jnp.where(total == 0, 1, total)
    return excess, jnp.where(support, (change - shift) / power, 0)


def _slopes(power: int, excess: Array) -> Array:
    """Derivative of excess^power / power, which is 0 where the excess is 0."""
    return (excess > 0).astype(excess.dtype) if power == 1 else excess ** (power - 1)


def _threshold(power: int, scores: Array) -> Array:
    """Return τ of each row, by Newton's method for Σ [z − τ]₊^power = 1.

    The first τ is 1 below the maximum, where the sum is at least 1. The sum is convex
    and falls with τ, so τ rises in each step and never passes the root. The number of
    steps is O(log S) at worst; for rows of 64 to 32768 scores it was 2 to 14.
    """
    epsilon = jnp.finfo(scores.dtype).eps

    def newton(threshold: Array) -> Array:
        excess = jnp.maximum(scores - threshold, 0)
        surplus = (excess**power).sum(axis=-1, keepdims=True) - 1
        return surplus / (power * _slopes(power, excess)).sum(axis=-1, keepdims=True)

    def step(past: tuple[Array, Array]) -> tuple[Array, Array]:
        rise = jnp.maximum(newton(past[0]), 0)
        return past[0] + rise, rise

    def moves(past: tuple[Array, Array]) -> Array:
        threshold, rise = past  # the largest score is 0, its excess −threshold
        return (rise > -epsilon * threshold).any()

    start = scores.max(axis=-1, keepdims=True) - 1
    threshold, _ = jax.lax.while_loop(moves, step, (start, -start))
    return threshold + newton(threshold)  # corrects the rounding of large steps
