"""Attention of gated attention units (GAU): squared ReLU of scores, not normalised.

    def gau(q, k, v, divisor):               # one head: q, k [T H], v [T V]
        scores = q @ k.T / np.sqrt(q.shape[-1])
        return np.maximum(scores, 0) ** 2 / divisor @ v

The weight of a pair is relu²(score) / divisor. The divisor has no default, since
published implementations differ in it. With n keys, head size s and bias b they have

    relu²(q·k / √s + b) / n      divisor=n, the default scale       (bert4keras)
    relu²((q·k + b) / n)         scale=1, divisor=n²                (FLASH-pytorch)
    relu²(q·k / n + b)           scale=1/n, divisor=1               (the paper)

In a causal model the divisor must not depend on the length of the input: otherwise rows
would change when tokens are added. Use a constant, for instance the length in training,
or "count", the number of keys that the row sees.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from symjax.attention.core.arguments import shown
from symjax.attention.scores.mechanism import ScoreMechanism

DIVISORS = ("count", "squared_count")


class SquaredReLU(NamedTuple):
    """Row weights relu²(score) / divisor; hashable, as a static argument must be."""

    divisor: float | str

    def __call__(
        self, scores: Float[Array, "*B t s"], visible: Bool[Array, "*#B t s"] | None
    ) -> Float[Array, "*B t s"]:
        divisor: Any = self.divisor
        if isinstance(divisor, str):
            count: Any = scores.shape[-1]
            if visible is not None:
                count = jnp.maximum(visible.sum(axis=-1, keepdims=True), 1)
                count = count.astype(scores.dtype)
            divisor = count if divisor == "count" else count**2
        if visible is not None:
            scores = jnp.where(visible, scores, 0)
        return jnp.square(jax.nn.relu(scores)) / divisor


def gau(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    bias: Float[Array, "#B #N #T #S"] | None = None,
    mask: Bool[Array, "#B #N #T #S"] | None = None,
    *,
    divisor: float | str,
    **options: Any,
) -> Float[Array, "B T N V"]:
    """Return relu²(q·k·scale + bias) V / divisor, the attention of a GAU.

    Time O(T S (H + V)) per head; memory linear in T and S. Weights are float32 at
    least. A row that sees no key is zero.

    A gated attention unit has one head, with small queries and keys (H = 128) and wide
    values. This function also takes several heads, as softmax does.

    Args:
        divisor: a number; "count", the number of keys that a row sees; or
            "squared_count", its square.
        options: all other options of `softmax`. `implementation` may be "rows" or
            "whole".
    Raises:
        ValueError: shapes that do not fit together, naming both; a divisor that is not
            above 0, or an unknown name.
    Source: Hua et al. 2022, arXiv:2202.10447, section 3.
    """
    weights = SquaredReLU(fixed_divisor("gau: divisor", divisor, DIVISORS))
    attend = ScoreMechanism("gau", weights)
    return attend(query, key, value, bias, mask, **options)


def fixed_divisor(name: str, divisor: Any, known: tuple[str, ...] = ()) -> float | str:
    """Return the divisor as a Python number, or its name if it is one of `known`.

    Raises:
        ValueError: the divisor is not a constant number above 0, nor a known name.
    """
    if isinstance(divisor, str) and divisor in known:
        return divisor
    try:
        number = 0.0 if isinstance(divisor, str | bytes | bool) else float(divisor)
    except (TypeError, OverflowError):  # an array, None, a tracer, or too large
        number = 0.0
    if not 0 < number < math.inf:
        also = f", or one of {', '.join(known)}" if known else ""
        raise ValueError(
            f"{name} must be a constant number above 0{also}, got {shown(divisor)}"
        )
    return number
