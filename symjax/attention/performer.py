"""Performer: softmax attention estimated by random features, in linear time.

    def performer_causal(q, k, v, W):        # one head: q, k [T H], v [T V], W [M H]
        q, k = q / q.shape[-1] ** 0.25, k / k.shape[-1] ** 0.25
        φ = lambda x: np.exp(x @ W.T - (x * x).sum(axis=-1, keepdims=True) / 2)
        weights = np.tril(φ(q) @ φ(k).T)
        return weights @ v / weights.sum(axis=-1, keepdims=True)

With M random rows w of the projection W, φ(q)·φ(k) has the expected value M exp(q·k).
The factor M cancels when a row is divided by its denominator.

These features φ are exponentials. The recurrence (`recurrent/normalised.py`) subtracts
a running maximum from their exponents, so that no feature overflows and no ε is needed.
Queries and keys may be large, as long as float32 can hold their squared length: entries
up to 1e18.

The estimate is good if queries and keys are small. At head size 64 and normal entries
with a standard deviation of 0.5 the relative error of the output is 0.54, 0.41 and 0.23
with 128, 256 and 1024 features. With a standard deviation of 1 the error is larger than
if the output were the plain mean of all values. So normalise queries and keys.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.arguments import check_kind, check_positive
from symjax.attention.core.feature_maps import FeatureParameters, feature_map
from symjax.attention.favor import WITH_STATISTICS, Statistics, favor_parameters
from symjax.attention.random_features import RANDOM_FEATURES, default_projection
from symjax.attention.recurrent.arguments import state_sizes
from symjax.attention.recurrent.bidirectional import attend
from symjax.attention.recurrent.engine import attend_causal, attend_step
from symjax.attention.recurrent.linear_state import LinearState
from symjax.attention.recurrent.normalised import Normalised


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
    """Return an estimate of softmax(scale q·k) attention over all keys.

    With x' = x √scale and rows w of the projection,
    out[t] = Σ_s φ(q_t)·φ(k_s) v_s / Σ_s φ(q_t)·φ(k_s)

    positive       φ(x) = exp(w·x' − |x'|²/2)
    hyperbolic     positive features of w and −w: twice as many, less variance
    trigonometric  φ(x) = exp(|x'|²/2) [cos w·x', sin w·x'], good for small x only;
                   weights may be negative, and a denominator may be near zero
    favor++        φ(x) = exp(a |w|² + √(1 − 4a) w·x' − |x'|²/2); `favor_statistics`
                   chooses the number a that gives the least variance
    favor#         as favor++, with one a for each principal direction of queries and
                   keys
    relu           φ(x) = relu(w·x'), which does not estimate softmax
    slay           features of x / |x|, whose products estimate a function of the
                   cosine of query and key (`symjax.attention.slay`)

    Query head n uses key head n // (N/K). Time O((T + S) M (H + V)). If there are no
    segments and S ≤ M V / (M + V), the weights [T S] are computed, since a state [M V]
    would cost more. Sums run in float32 at least. A row that sees no key
    is zero. No ε is added.

    Args:
        projection: from `orthogonal_projection`. None means 256 rows, orthogonal in
            blocks of H, which are the same in each call.
        mask: True = attend; it may only hide keys. A hidden key changes nothing.
        features: a name of the list above.
        scale: factor of the scores, above 0; 1/√H by default. It does not change the
            weights of relu and slay.
        statistics: for favor++ and favor#, from `favor_statistics`. By default they are
            those of queries and keys whose entries are independent and have variance 1.
            With the default, favor++ and favor# are the same features.
        segment_ids: tokens see only their own run of equal ids; needs T = S. With
            segments only relu and slay have a forward-mode derivative (`jax.jvp`).
    Raises:
        ValueError: shapes that do not fit, an unknown name, a scale that is not above
            0, statistics for features that take none, or a mask that hides pairs and
            not keys.
    Source: Choromanski et al. 2021, arXiv:2009.14794 (positive, hyperbolic, relu);
        Likhosherstov et al. 2022, arXiv:2205.15317, and 2023, arXiv:2302.00787; Luna et
        al. 2026, arXiv:2602.04915 (slay).
    """
    options = features, query, key, projection, scale, statistics
    recurrence, random = _recurrence("performer", *options)
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
    """Return causal `performer`: a token sees itself, earlier tokens and `state`.

    out[t] = Σ_{s≤t} φ(q_t)·φ(k_s) v_s / Σ_{s≤t} φ(q_t)·φ(k_s)

    Time O(T (M (H + V) + chunk_size (M + V))). The backward pass saves one state per
    chunk, or per group of chunks that run in parallel. If a token changes, rows of
    earlier chunks stay bitwise the same. Earlier rows of the token's chunk change only
    by rounding errors. No ε is added.

    Kernels run on one device, or inside `jax.shard_map`. On TPUs they compute positive,
    hyperbolic, favor++ and favor#. On NVIDIA GPUs they compute all features except
    trigonometric ones, for value sizes 16, 32, 64 and 128. GPU kernels take bfloat16
    queries, keys and values. They multiply the features, which are float32, in TF32,
    and save a float32 state every 64 tokens. All kernels take
    at most 1024 features. `jax.jvp` works only with relu and slay, and only if no
    kernel runs.

    Args:
        state: from `performer_state`, `performer_step` or an earlier call, made with
            the same projection, features, scale and statistics. Its tokens are in the
            same segment as the first token of this call.
        chunk_size: tokens per chunk; accelerators round it up to a multiple of 128.
        segment_ids: the sums begin again at zero where the id changes.
        axis_name: in a `jax.shard_map`, the mesh axis that time is split over; each
            device passes its part of every array. Devices exchange their states.
    Returns:
        The output; with `return_state` also the state after the last token.
    Raises:
        ValueError: as `performer`; T differs from S; a state of other sizes; `state` or
            `return_state` together with axis_name.
    Source: Choromanski et al. 2021, arXiv:2009.14794; the running maximum is ours.
    """
    who = "performer_causal"
    options = features, query, key, projection, scale, statistics
    recurrence, random = _recurrence(who, *options)
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
    """Return the output for one more token of `performer_causal`, and the new state.

    Time O(M (H + V)).

    Raises:
        ValueError: as `performer_causal`; more than one token.
    """
    who = "performer_step"
    options = features, query, key, projection, scale, statistics
    recurrence, random = _recurrence(who, *options)
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
    """Return the state of `performer_causal` before the first token.

    With M features the state has M V sums, M totals and M running maxima per key head,
    in float32 at least. Trigonometric features share one maximum; relu and slay have
    none. M is the number of rows of the projection, and twice that number for
    hyperbolic and trigonometric features.

    Raises:
        ValueError: as `performer`; a size or a dtype that is wrong.
    """
    who = "performer_state"
    sizes = state_sizes(who, batch, kv_heads, head_size, value_size, dtype)
    like = jax.ShapeDtypeStruct((batch, 1, kv_heads, head_size), dtype)
    options = features, like, like, projection, None, statistics
    recurrence, random = _recurrence(who, *options)
    return recurrence.empty(random, sizes, dtype)


def _recurrence(
    who: str,
    features: str,
    query: Array | jax.ShapeDtypeStruct,
    key: Array | jax.ShapeDtypeStruct,
    projection: Array | None,
    scale: float | None,
    statistics: Statistics | None,
) -> tuple[Normalised, FeatureParameters]:
    """Check the arguments, and return the recurrence and its parameters."""
    recurrence = Normalised(feature_map(who, RANDOM_FEATURES, features))
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
    random = FeatureParameters(projection, jnp.asarray(scale))
    if features in WITH_STATISTICS:
        random = favor_parameters(who, random, statistics)
    elif statistics is not None:
        raise ValueError(
            f"{who}: features {features!r} take no statistics: choose from "
            f"{', '.join(WITH_STATISTICS)}"
        )
    return recurrence, random
