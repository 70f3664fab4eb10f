"""Sparse attention: sparsemax and entmax-1.5, whose weights are often exactly zero.

    def sparsemax(q, k, v):                  # one head: q, k [T H], v [T V]
        scores = q @ k.T / np.sqrt(q.shape[-1])
        ordered = np.sort(scores)[:, ::-1]                 # the n largest weigh, for
        τ = (np.cumsum(ordered, axis=-1) - 1) / np.arange(1, len(k) + 1)
        return np.maximum(scores - τ.max(axis=-1, keepdims=True), 0) @ v

Both are powers of what a score has above its row's threshold τ, with τ such that the
weights sum to one: [z − τ]₊ is sparsemax, [z/2 − τ]₊² is entmax-1.5, and softmax is
the limit of the family. So both share one function of the power, 1 or 2.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from symjax.attention.scores.mechanism import ScoreMechanism
from symjax.attention.scores.rows import KEPT

FLOOR = -2.0  # below the highest score, scaled; every threshold lies above −1


def sparsemax_weights(
    scores: Float[Array, "*B t s"], visible: Bool[Array, "*#B t s"] | None
) -> Float[Array, "*B t s"]:
    """The nearest point of the simplex; zeros where no key is visible."""
    return _excess(1, _hide(scores, visible))


def entmax15_weights(
    scores: Float[Array, "*B t s"], visible: Bool[Array, "*#B t s"] | None
) -> Float[Array, "*B t s"]:
    """[score/2 − τ]₊² along the visible keys; zeros where none is visible."""
    return _excess(2, _hide(scores, visible)) ** 2


sparsemax = ScoreMechanism(
    "sparsemax",
    sparsemax_weights,
    """Attention whose rows of weights are the points of the simplex nearest to z.

    weights = [z − τ]₊ with Σ [z − τ]₊ = 1, for z = q·k·scale + bias

    A key more than 1 below the row's best has weight zero, and takes no gradient. The
    threshold τ is exact to rounding and found without sorting, in a few passes over
    the row, O(log S) of them at worst.

    Source: Martins & Astudillo 2016, arXiv:1602.02068; τ as in Michelot 1986.
    """,
)

entmax15 = ScoreMechanism(
    "entmax15",
    entmax15_weights,
    """Attention by entmax-1.5, halfway between softmax and sparsemax.

    weights = [z/2 − τ]₊² with Σ [z/2 − τ]₊² = 1, for z = q·k·scale + bias

    A key more than 2 below the row's best has weight zero, and takes no gradient.
    Exactness and cost are as in `sparsemax`.

    Source: Peters, Niculae & Martins 2019, arXiv:1905.05702.
    """,
)


def _hide(scores: Array, visible: Array | None) -> Array:
    return scores if visible is None else jnp.where(visible, scores, -jnp.inf)


def _above_threshold(power: int, scores: Array) -> Array:
    """[z/power − τ]₊ along the last axis, with Σ [z/power − τ]₊^power = 1.

    Scores of −∞, and rows of nothing else, give zeros. The rest is referred to the
    highest and cut at a floor that no threshold reaches: sums stay small and finite.
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
    """The threshold moves with the mean of the support, by the weights' own slopes.

    The backward pass keeps the threshold, and does not search for it again.
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
    """Derivative of excess^power / power, which is 0 where the excess is."""
    return (excess > 0).astype(excess.dtype) if power == 1 else excess ** (power - 1)


def _threshold(power: int, scores: Array) -> Array:
    """τ of each row, by Newton's method from 1 below its highest score, where Σ ≥ 1.

    Scores are up to 0. Σ [z − τ]₊^power is convex and falls with τ: steps stay below
    the root, and each takes the surplus times the slope to a quarter or less. That is
    O(log S) steps at worst, 2 to 14 for rows of 64 to 32768 scores of many shapes;
    from the right support sparsemax needs one.
    """
    least = jnp.finfo(scores.dtype).eps

    def newton(threshold: Array) -> Array:
        excess = jnp.maximum(scores - threshold, 0)
        surplus = (excess**power).sum(axis=-1, keepdims=True) - 1
        return surplus / (power * _slopes(power, excess)).sum(axis=-1, keepdims=True)

    def step(past: tuple[Array, Array]) -> tuple[Array, Array]:
        rise = jnp.maximum(newton(past[0]), 0)
        return past[0] + rise, rise

    def moves(past: tuple[Array, Array]) -> Array:
        threshold, rise = past  # −τ is what the highest score has above it
        return (rise > -least * threshold).any()

    start = scores.max(axis=-1, keepdims=True) - 1
    threshold, _ = jax.lax.while_loop(moves, step, (start, -start))
    return threshold + newton(threshold)  # steps from afar were rounded; this goes back
