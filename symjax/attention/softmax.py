"""Softmax attention, the measure of all the others."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.ring import attend_rows_or_ring


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


def softmax(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    bias: Float[Array, "#B #N #T #S"] | None = None,
    mask: Bool[Array, "#B #N #T #S"] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    length_base: float | None = None,
    mask_self: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
    axis_name: str | None = None,
) -> Float[Array, "B T N V"]:
    """Scaled dot-product attention, softmax(q·k·scale + bias) V, in blocks of rows.

    Time O(T S (H + V)) a head, half of it if causal; memory linear in T and S. The
    softmax runs in float32 at least; a row that sees no key gives zeros.

    Args:
        mask: True = attend.
        scale: of the scores, 1/√H by default.
        is_causal: the last query sees every key (bottom-right alignment).
        length_base: multiply a row's scores by log n / log length_base, n the keys it
            sees (entropy-invariant scaling); None or 0: off.
        mask_self: hide a token from itself unless it sees nothing else.
        segment_ids: tokens see only their own run of equal ids; needs T = S.
        implementation: "rows" (default), "whole", or "ring": over an axis keys and
            values travel and are not gathered, see `attend_ring`; otherwise as "rows".
        axis_name: in a `jax.shard_map`, the mesh axis that time is split over: query,
            key, value and segment_ids are a device's own stretch, mask and bias are of
            its own rows and of all keys.
    Raises:
        ValueError: shapes that do not fit together, naming both.
    Source: Vaswani et al. 2017, arXiv:1706.03762, equation 1.
    """
    return attend_rows_or_ring(
        softmax_weights,
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        length_base=length_base,
        mask_self=mask_self,
        segment_ids=segment_ids,
        implementation=implementation,
        axis_name=axis_name,
    )
