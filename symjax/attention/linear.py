"""Linear attention: weights that are products of features of query and key.

    def linear_causal(q, k, v, φ):           # one head: q, k [T H], v [T V]
        sums, total, out = 0, 0, []
        for t in range(len(q)):
            sums = sums + np.outer(φ(k[t]), v[t])
            total = total + φ(k[t])
            out.append(φ(q[t]) @ sums / (φ(q[t]) @ total))
        return np.stack(out)

φ maps one query or key to its features, by default elu(x) + 1. `linear` attends to all
keys, and `linear_causal` to the past, chunk by chunk. `linear_step` computes one token
from a state. The recurrence is in `symjax.attention.recurrent.normalised`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.arguments import check_arrays
from symjax.attention.core.feature_maps import feature_map
from symjax.attention.core.visibility import hidden_as_zero, visible_keys
from symjax.attention.features import IDENTITY, PLAIN
from symjax.attention.recurrent.arguments import check_mask, state_sizes
from symjax.attention.recurrent.bidirectional import attend
from symjax.attention.recurrent.engine import attend_causal, attend_step
from symjax.attention.recurrent.linear_state import LinearState
from symjax.attention.recurrent.normalised import Normalised

FeatureFunction = Callable[[Array], Array]


def linear(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    mask: Bool[Array, "B 1 1 S"] | None = None,
    *,
    features: str | FeatureFunction = "elu",
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T N V"]:
    """Return attention to all keys, with products of features as weights.

    out[t] = Σ_s φ(q_t)·φ(k_s) v_s / Σ_s φ(q_t)·φ(k_s)

    Query head n uses key head n // (N/K). Time O((T + S) M V). If there are no segments
    and S ≤ M V / (M + V), the weights [T S] are computed, since a state [M V] would
    cost more. Sums run in float32 at least. No ε is added to a denominator.
    A row is zero if it sees no key, or if its denominator is 0 or only rounding error;
    the paragraph "Rounding" has an exception for "squared" and "taylor".

    Range. Float32 must hold the features and their sums. With 300 tokens of head size
    64 that allows entries of queries and keys up to 1e18, and up to 1e15 with "relu2",
    "squared" and "taylor". Small entries keep their digits down to 1e-34 with "relu",
    and down to 1e-17 with "relu2" and "squared".

    Rounding. The features of "squared" and "taylor" change sign, so that sums over many
    keys lose digits. The error of the output is about 1e-5 with head size 64. The error
    is larger if nearly all keys are orthogonal to the query. The denominator may then
    be only rounding error. A row with such a denominator that is read from a state
    becomes the mean of the values, weighted by |k|² with "squared" and plain with
    "taylor", and its query gets no gradient.

    Args:
        mask: True = attend; it may only hide keys. A hidden key changes nothing.
        features: a name, or a function [B T N H] → [B T N M] that maps each query and
            each key by itself. With features that change sign a denominator may be near
            zero. The names are

            - "elu": elu(x) + 1;
            - "relu", "relu2" (relu(x)²) and "identity";
            - "squared": the weight of a pair is (q·k)²; M = H (H + 1)/2;
            - "taylor": the weight of a pair is 1 + s + s²/2 with s = q·k/√H;
              M = H (H + 1)/2 + H + 1.
        segment_ids: tokens see only their own run of equal ids; needs T = S.
    Raises:
        ValueError: shapes that do not fit, an unknown name, or a mask that hides
            pairs and not keys.
    Source: Katharopoulos et al. 2020, arXiv:2006.16236; taylor: Arora et al. 2024,
        arXiv:2402.18668; squared: Aksenov et al. 2024, arXiv:2402.10644.
    """
    recurrence = _recurrence("linear", features)
    query, key = _mapped("linear", features, query, key, mask)
    return attend("linear", recurrence, query, key, value, mask, segment_ids)


def linear_causal(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    mask: Bool[Array, "B 1 1 T"] | None = None,
    *,
    features: str | FeatureFunction = "elu",
    chunk_size: int = 64,
    state: LinearState | None = None,
    return_state: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    axis_name: str | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], LinearState]:
    """Return `linear` where each token sees itself, its past and the tokens in `state`.

    out[t] = Σ_{s≤t} φ(q_t)·φ(k_s) v_s / Σ_{s≤t} φ(q_t)·φ(k_s)

    Time O(T (M V + chunk_size (M + V))). The backward pass saves one state per chunk,
    or per group of chunks that run in parallel. Kernels compute elu, relu and relu2 on
    a TPU or an NVIDIA GPU: on one device, or inside `jax.shard_map`. GPU kernels take
    bfloat16 arrays and multiply in TF32. Kernels have no forward-mode derivative.

    Args:
        state: from `linear_state`, `linear_step` or an earlier call. Its tokens are in
            the same segment as the first token of this call.
        chunk_size: tokens per chunk; accelerators round it up to a multiple of 128.
        segment_ids: the sums begin again at zero where the id changes.
        axis_name: in a `jax.shard_map`, the mesh axis that time is split over; each
            device passes its part of every array. Devices exchange their states.
    Returns:
        The output; with `return_state` also the state after the last token.
    Raises:
        ValueError: as `linear`; T differs from S; a state of other sizes; `state` or
            `return_state` together with axis_name.
    Source: Katharopoulos et al. 2020, arXiv:2006.16236, equations 8 to 12.
    """
    who = "linear_causal"
    recurrence = _recurrence(who, features)
    query, key = _mapped(who, features, query, key, mask)
    return attend_causal(
        who,
        recurrence,
        query,
        key,
        value,
        mask,
        chunk_size=chunk_size,
        state=state,
        return_state=return_state,
        segment_ids=segment_ids,
        axis_name=axis_name,
    )


def linear_step(
    state: LinearState,
    query: Float[Array, "B 1 N H"],
    key: Float[Array, "B 1 K H"],
    value: Float[Array, "B 1 K V"],
    *,
    features: str | FeatureFunction = "elu",
) -> tuple[Float[Array, "B 1 N V"], LinearState]:
    """Return the output for one more token of `linear_causal`, and the new state.

    Time O(M V).

    Raises:
        ValueError: as `linear_causal`; more than one token.
    """
    recurrence = _recurrence("linear_step", features)
    query, key = _mapped("linear_step", features, query, key, None)
    return attend_step("linear_step", recurrence, state, query, key, value)


def linear_state(
    batch: int,
    kv_heads: int,
    head_size: int,
    value_size: int,
    *,
    features: str | FeatureFunction = "elu",
    dtype: Any = jnp.float32,
) -> LinearState:
    """Return the state of `linear_causal` before the first token.

    It has M (V + 1) numbers per key head, float32 at least.

    Raises:
        ValueError: an unknown name; a size or a dtype that is wrong.
    """
    recurrence = _recurrence("linear_state", features)
    sizes = state_sizes("linear_state", batch, kv_heads, head_size, value_size, dtype)
    if callable(features):
        like = jax.ShapeDtypeStruct((batch, 1, kv_heads, head_size), dtype)
        mapped = jax.eval_shape(partial(_applied, "linear_state", features), like)
        sizes = batch, kv_heads, mapped.shape[-1], value_size
    return recurrence.empty(None, sizes, dtype)


def _recurrence(who: str, features: str | FeatureFunction) -> Normalised:
    """Return the recurrence; `_mapped` applies features that are a function."""
    if callable(features):
        return Normalised(IDENTITY)
    return Normalised(feature_map(who, PLAIN, features))


def _mapped(
    who: str,
    features: str | FeatureFunction,
    query: Array,
    key: Array,
    mask: Array | None,
) -> tuple[Array, Array]:
    """Return query and key, mapped by `features` if that is a function.

    The function gets 0 for hidden keys.
    """
    if not callable(features):
        return query, key
    check_arrays(who, query=query, key=key)
    if mask is not None:
        check_mask(who, mask, key)
        (key,) = hidden_as_zero(visible_keys(mask, *key.shape[:2]), key)
    return _applied(who, features, query), _applied(who, features, key)


def _applied(who: str, features: FeatureFunction, x: Array) -> Array:
    """Return features(x); raise if its shape is not [B T N M]."""
    mapped = features(x)
    shape = jnp.shape(x)
    result = getattr(mapped, "shape", f"a {type(mapped).__name__}")
    if len(result) != 4 or result[:3] != shape[:3]:
        raise ValueError(
            f"{who}: features must map [B T N H] {shape} to [B T N M], got {result}"
        )
    return mapped
