"""Performer: softmax attention estimated by random features, in linear time.

exp(q·k) = E[φ(q)·φ(k)] over random rows w of the projection, with features that are
exponentials of w·x. They are handled as logarithms below a running maximum, so that
nothing is added to a feature or a denominator, at any size of the inputs, and the
causal form depends on the past alone.

The estimate is close where queries and keys are small: at head size 64 and entries of
size 0.5 the relative output error is 0.54, 0.41 and 0.23 with 128, 256 and 1024
features, and at size 1 it is worse than the mean of the values. Normalise queries and
keys.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from symjax.attention import features as maps
from symjax.attention.execution import attend, attend_causal, attend_step, empty_state
from symjax.attention.features import Features
from symjax.attention.prefix import LinearState


def performer(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    projection: Float[Array, "M H"] | None = None,
    mask: Bool[Array, "B 1 1 S"] | None = None,
    *,
    features: str = "positive",
    scale: float | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T N V"]:
    """An estimate of softmax(scale q·k) attention over all keys, by random features.

    With x' = x √scale and rows w of the projection, φ(x) ∝ exp(w·x' − |x'|²/2):
    out[t] = Σ_s φ(q_t)·φ(k_s) v_s / Σ_s φ(q_t)·φ(k_s)

    Query head n uses key head n // (N/K). Time O((T + S) M (H + V)), with no [T S]
    map. Sums run in float32 at least. A row that sees no key is zero.

    Args:
        projection: from `orthogonal_projection`; by default the same 256 orthogonal
            rows every time.
        mask: True = attend; it may only hide keys. A hidden key changes nothing.
        features: "positive", or "hyperbolic": ±w, twice the features from the same
            projection and less variance.
        scale: of the scores, 1/√H by default.
        segment_ids: tokens see only their own run of equal ids; needs T = S.
    Raises:
        ValueError: shapes that do not fit, an unknown name, or a mask that hides
            pairs and not keys.
    Source: Choromanski et al. 2021, arXiv:2009.14794.
    """
    pair, parameters = _resolve("performer", features, query, key, projection, scale)
    return attend("performer", pair, parameters, query, key, value, mask, segment_ids)


def performer_causal(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    projection: Float[Array, "M H"] | None = None,
    mask: Bool[Array, "B 1 1 T"] | None = None,
    *,
    features: str = "positive",
    scale: float | None = None,
    chunk_size: int = 64,
    state: LinearState | None = None,
    return_state: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], LinearState]:
    """`performer` over a token itself, its past, and what `state` has seen.

    out[t] = Σ_{s≤t} φ(q_t)·φ(k_s) v_s / Σ_{s≤t} φ(q_t)·φ(k_s)

    Time O(T M (H + V + chunk_size)); the backward pass keeps one state a chunk. A
    change of the future leaves the rows of earlier chunks as they are, bit for bit,
    and moves earlier rows of its own chunk by rounding alone.

    Args:
        chunk_size: tokens handled together.
        state: from `performer_state`, `performer_step` or an earlier call, made with
            the same projection, features and scale. Its last segment goes on with the
            first run of `segment_ids`.
        segment_ids: the sums start anew wherever the id changes.
    Returns:
        The output, and the state after the last token if `return_state`.
    Raises:
        ValueError: as `performer`; T differs from S; a state of other sizes.
    Source: Choromanski et al. 2021, arXiv:2009.14794; the running maximum is ours.
    """
    who = "performer_causal"
    pair, parameters = _resolve(who, features, query, key, projection, scale)
    return attend_causal(
        who,
        pair,
        parameters,
        query,
        key,
        value,
        mask,
        chunk_size=chunk_size,
        state=state,
        return_state=return_state,
        segment_ids=segment_ids,
    )


def performer_step(
    state: LinearState,
    query: Float[Array, "B 1 N H"],
    key: Float[Array, "B 1 K H"],
    value: Float[Array, "B 1 K V"],
    projection: Float[Array, "M H"] | None = None,
    *,
    features: str = "positive",
    scale: float | None = None,
) -> tuple[Float[Array, "B 1 N V"], LinearState]:
    """One more token of `performer_causal`, in O(M (H + V)): output and new state.

    The denominator of a row, relative to the state's peak, is at least 1.

    Raises:
        ValueError: as `performer_causal`; more than one token.
    """
    who = "performer_step"
    pair, parameters = _resolve(who, features, query, key, projection, scale)
    return attend_step(who, pair, parameters, state, query, key, value)


def performer_state(
    batch: int,
    kv_heads: int,
    head_size: int,
    value_size: int,
    projection: Float[Array, "M H"] | None = None,
    *,
    features: str = "positive",
    dtype: Any = jnp.float32,
) -> LinearState:
    """The state of `performer_causal` before the first token; float32 at least."""
    like = jax.ShapeDtypeStruct((batch, 1, kv_heads, head_size), dtype)
    pair, parameters = _resolve(
        "performer_state", features, like, like, projection, None
    )
    return empty_state(pair, parameters, batch, kv_heads, head_size, value_size, dtype)


def _resolve(
    who: str,
    features: str,
    query: Array | jax.ShapeDtypeStruct,
    key: Array | jax.ShapeDtypeStruct,
    projection: Array | None,
    scale: float | None,
) -> tuple[Features, tuple[Array, Array]]:
    """The feature maps and their parameters: the projection and the scale."""
    pair = maps.named(who, maps.EXPONENTIAL, features)
    head_size = query.shape[-1]
    if projection is None:
        projection = jnp.asarray(maps.default_projection(head_size))
    if projection.ndim != 2 or projection.shape[1] != head_size:
        raise ValueError(
            f"{who}: projection must be [M H] for query {query.shape} and "
            f"key {key.shape}, got {projection.shape}"
        )
    if scale is None:
        scale = head_size**-0.5
    if isinstance(scale, int | float) and scale <= 0:
        raise ValueError(f"{who}: scale must be positive, got {scale}")
    return pair, (projection, jnp.asarray(scale))
