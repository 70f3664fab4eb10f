"""Performer: softmax attention estimated by random features, in linear time.

    def performer_causal(q, k, v, W):        # one head: q, k [T H], v [T V], W [M H]
        q, k = q / q.shape[-1] ** 0.25, k / k.shape[-1] ** 0.25
        φ = lambda x: np.exp(x @ W.T - (x * x).sum(axis=-1, keepdims=True) / 2)
        weights = np.tril(φ(q) @ φ(k).T)
        return weights @ v / weights.sum(axis=-1, keepdims=True)

exp(q·k) = E[φ(q)·φ(k)] over random rows w of the projection, with features that hold
exponentials. Their exponents are kept below a running maximum, so that nothing is added
to a feature or a denominator, at any size of the inputs whose squared lengths float32
holds (entries up to 1e18), and the causal form depends on the past alone.

The estimate is close where queries and keys are small: at head size 64 and entries of
size 0.5 the relative output error is 0.54, 0.41 and 0.23 with 128, 256 and 1024
features, and at size 1 it is worse than the mean of the values. Normalise queries and
keys.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.arguments import check_kind, check_positive, state_sizes
from symjax.attention.core.feature_maps import RandomFeatures
from symjax.attention.favor import KINDS, Statistics, adapted
from symjax.attention.features import RANDOM, default_projection, named
from symjax.attention.recurrent.bidirectional import attend
from symjax.attention.recurrent.engine import attend_causal, attend_step
from symjax.attention.recurrent.normalised import LinearState, Normalised


def performer(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    projection: Float[Array, "M H"] | None = None,
    mask: Bool[Array, "B 1 1 S"] | None = None,
    *,
    features: str = "positive",
    scale: float | None = None,
    statistics: Statistics | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T N V"]:
    """An estimate of softmax(scale q·k) attention over all keys, by random features.

    With x' = x √scale and rows w of the projection,
    out[t] = Σ_s φ(q_t)·φ(k_s) v_s / Σ_s φ(q_t)·φ(k_s)

    positive       φ(x) = exp(w·x' − |x'|²/2)
    hyperbolic     the same for w and −w: twice the features, less variance
    trigonometric  φ(x) = exp(|x'|²/2) [cos w·x', sin w·x'], good for small x only; its
                   weights may be negative and a denominator near zero
    favor++        φ(x) = exp(a |w|² + √(1 − 4a) w·x' − |x'|²/2), less variance by `a`
    favor#         the same with an `a` for each direction of the statistics
    relu           φ(x) = relu(w·x'), no estimate of softmax but an attention of its own

    Query head n uses key head n // (N/K). Time O((T + S) M (H + V)), with no [T S]
    map. Sums run in float32 at least. A row that sees no key is zero.

    Args:
        projection: from `orthogonal_projection`; by default the same 256 orthogonal
            rows every time.
        mask: True = attend; it may only hide keys. A hidden key changes nothing.
        features: a name of the list above.
        scale: of the scores, above 0; 1/√H by default.
        statistics: of favor++ and favor#, from `favor_statistics`, which also decides
            whether `a` differs by direction. By default those of queries and keys with
            independent entries of variance 1, a = (1 − 2s − √((1 + 2s)² + 8s)) / 16
            with s = 2 scale in all directions: then both are the same.
        segment_ids: tokens see only their own run of equal ids; needs T = S. With
            them derivatives are those of `performer_causal`.
    Raises:
        ValueError: shapes that do not fit, an unknown name, statistics that the
            features do not have, or a mask that hides pairs and not keys.
    Source: Choromanski et al. 2021, arXiv:2009.14794 (positive, hyperbolic, relu);
        Likhosherstov et al. 2022, arXiv:2205.15317, and 2023, arXiv:2302.00787.
    """
    given = features, query, key, projection, scale, statistics
    recurrence, random = _recurrence("performer", *given)
    tokens = query, key, value, mask, segment_ids
    return attend("performer", recurrence, *tokens, parameters=random)


def performer_causal(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    projection: Float[Array, "M H"] | None = None,
    mask: Bool[Array, "B 1 1 T"] | None = None,
    *,
    features: str = "positive",
    scale: float | None = None,
    statistics: Statistics | None = None,
    chunk_size: int = 64,
    state: LinearState | None = None,
    return_state: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    axis_name: str | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], LinearState]:
    """`performer` over a token itself, its past, and what `state` has seen.

    out[t] = Σ_{s≤t} φ(q_t)·φ(k_s) v_s / Σ_{s≤t} φ(q_t)·φ(k_s)

    Time O(T M (H + V + chunk_size)); the backward pass keeps one state a chunk.
    A change of the future leaves
    the rows of earlier chunks as they are, bit for bit, and moves earlier rows of its
    own chunk by rounding alone.

    On one TPU kernels compute features that are exponentials. On one NVIDIA GPU they
    compute all features except trigonometric ones, in bfloat16 with errors of TF32, for
    values of 16, 32, 64 or 128; states are kept in float32 every 64 tokens. There are
    at most 1024 features in both. Without kernels features that have no exponent (relu)
    have a forward-mode derivative (`jax.jvp`).

    Args:
        state: from `performer_state`, `performer_step` or an earlier call, made with
            the same projection, features, scale and statistics. Its last segment
            continues with the first run of `segment_ids`.
        chunk_size: the tokens of a chunk; accelerators take multiples of 128.
        segment_ids: the sums start anew wherever the id changes.
        axis_name: in a `jax.shard_map`, the mesh axis that time is split over; every
            array is a device's own stretch. Devices exchange their states.
    Returns:
        The output, and the state after the last token if `return_state`.
    Raises:
        ValueError: as `performer`; T differs from S; a state of other sizes; a
            state given or wanted with an axis_name.
    Source: Choromanski et al. 2021, arXiv:2009.14794; the running maximum is ours.
    """
    who = "performer_causal"
    given = features, query, key, projection, scale, statistics
    recurrence, random = _recurrence(who, *given)
    return attend_causal(
        who,
        recurrence,
        query,
        key,
        value,
        mask,
        parameters=random,
        chunk_size=chunk_size,
        state=state,
        return_state=return_state,
        segment_ids=segment_ids,
        axis_name=axis_name,
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
    statistics: Statistics | None = None,
) -> tuple[Float[Array, "B 1 N V"], LinearState]:
    """One more token of `performer_causal`, in O(M (H + V)): output and new state.

    The denominator of a row, relative to the state's running maximum, is at least 1.

    Raises:
        ValueError: as `performer_causal`; more than one token.
    """
    who = "performer_step"
    given = features, query, key, projection, scale, statistics
    recurrence, random = _recurrence(who, *given)
    return attend_step(who, recurrence, state, query, key, value, parameters=random)


def performer_state(
    batch: int,
    kv_heads: int,
    head_size: int,
    value_size: int,
    projection: Float[Array, "M H"] | None = None,
    *,
    features: str = "positive",
    statistics: Statistics | None = None,
    dtype: Any = jnp.float32,
) -> LinearState:
    """The state of `performer_causal` before the first token; float32 at least."""
    who = "performer_state"
    sizes = state_sizes(who, batch, kv_heads, head_size, value_size, dtype)
    like = jax.ShapeDtypeStruct((batch, 1, kv_heads, head_size), dtype)
    given = features, like, like, projection, None, statistics
    recurrence, random = _recurrence(who, *given)
    return recurrence.empty(random, sizes, dtype)


def _recurrence(
    who: str,
    features: str,
    query: Array | jax.ShapeDtypeStruct,
    key: Array | jax.ShapeDtypeStruct,
    projection: Array | None,
    scale: float | None,
    statistics: Statistics | None,
) -> tuple[Normalised, RandomFeatures]:
    """The recurrence and its parameters."""
    recurrence = Normalised(named(who, RANDOM, features))
    check_kind(who, jnp.floating, query=query, key=key, projection=projection)
    check_positive(who, "scale", scale)
    size = query.shape[-1]
    if projection is None:
        projection = jnp.asarray(default_projection(size))
    shape = projection.shape
    if len(shape) != 2 or shape[1] != size or not shape[0]:
        raise ValueError(
            f"{who}: projection must be [M H] for query {query.shape} and "
            f"key {key.shape}, M not 0, got {shape}"
        )
    scale = 1 / math.sqrt(size) if scale is None else scale
    random = RandomFeatures(projection, jnp.asarray(scale))
    if features in KINDS:
        random = adapted(who, random, statistics)
    elif statistics is not None:
        raise ValueError(
            f"{who}: features {features!r} take no statistics: choose from "
            f"{', '.join(KINDS)}"
        )
    return recurrence, random
