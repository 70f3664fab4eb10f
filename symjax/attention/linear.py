"""Linear attention: weights that are products of features of query and key.

    def linear_causal(q, k, v, φ):           # one head: q, k [T H], v [T V]
        sums, total, out = 0, 0, []
        for t in range(len(q)):
            sums = sums + np.outer(φ(k[t]), v[t])
            total = total + φ(k[t])
            out.append(φ(q[t]) @ sums / (φ(q[t]) @ total))
        return np.stack(out)

φ are features of one vector, elu(x) + 1 by default.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.arguments import check_arrays, check_mask, state_sizes
from symjax.attention.core.visibility import only_seen, visible_keys
from symjax.attention.features import IDENTITY, PLAIN, named
from symjax.attention.recurrent.bidirectional import attend
from symjax.attention.recurrent.engine import attend_causal, attend_step
from symjax.attention.recurrent.normalised import LinearState, Normalised

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
    """Attention whose weights are products of features, over all keys.

    out[t] = Σ_s φ(q_t)·φ(k_s) v_s / Σ_s φ(q_t)·φ(k_s)

    Query head n uses key head n // (N/K). Time O((T + S) M V), with no [T S] map. Sums
    run in float32 at least. A row that sees no key, or whose denominator is nothing
    but rounding, is zero.

    "squared" and "taylor" weigh pairs by q·k where few keys are given, and inside the
    chunks of `linear_causal`. Sums over more keys, and states, hold features that
    cancel: what they add to a row is off by about ε|q|²Σ|k|² ("squared"), with
    ε = 2⁻²³, so that the output is off by ε|q|²Σ|k|² / Σ(q·k)² of the values' spread.
    That is 1e-5 for most rows of head size 64, and more for rows that read two or
    three keys from a state, all nearly orthogonal to the query. A row whose sum cannot
    be told from rounding has the mean of the values that were read, weighed by |k|²
    ("taylor": the plain mean), and no gradient from what their keys weigh. One key
    gives its value. The gradient of a query is off by up to 2|k|/|q·k| times as much as
    the output: for 150 equal keys at a cosine of 1e-3 to the query, where 0 is right,
    the output is off by 2e-3 and the gradient by 0.1 (values from N(0, 1)).

    Args:
        mask: True = attend; it may only hide keys. A hidden key changes nothing.
        features: "elu" (elu + 1), "relu", "relu2" (relu squared), "squared", "taylor",
            "identity", or a function of [B T N H] and [B S K H] that treats every token
            by itself. Pairs weigh (q·k)² with "squared", by H (H + 1)/2 features, and
            1 + s + s²/2 with s = q·k/√H with "taylor", by those and H + 1 more.
            Features that change sign may have a denominator near zero. Float32 must
            hold features and their sums: with 300 tokens of size 64 entries up to 1e18
            and of relu down to 1e-34, of relu2, squared and taylor up to 1e15 and of
            relu2 and squared down to 1e-17, below which outputs lose their digits (off
            by up to 1e-2 at 1e-18, by the size of the values at 1e-19).
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
    """`linear` over a token itself, its past, and what `state` has seen.

    out[t] = Σ_{s≤t} φ(q_t)·φ(k_s) v_s / Σ_{s≤t} φ(q_t)·φ(k_s)

    Time O(T (M V + chunk_size (M + V))); the backward pass keeps one state a chunk.
    Kernels compute elu, relu and relu2 on one TPU, and in bfloat16, with errors of
    TF32, on one NVIDIA GPU. Kernels have no forward-mode derivative.

    Args:
        state: from `linear_state`, `linear_step` or an earlier call. Its last segment
            continues with the first run of `segment_ids`.
        chunk_size: the tokens of a chunk; accelerators take multiples of 128.
        segment_ids: the sums start anew wherever the id changes.
        axis_name: in a `jax.shard_map`, the mesh axis that time is split over; every
            array is a device's own stretch. Devices exchange their states.
    Returns:
        The output, and the state after the last token if `return_state`.
    Raises:
        ValueError: as `linear`; T differs from S; a state of other sizes; a
            state given or wanted with an axis_name.
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
    """One more token of `linear_causal`, in O(M V): the output and the state after it.

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
    """The state of `linear_causal` before the first token; float32 at least."""
    recurrence = _recurrence("linear_state", features)
    sizes = state_sizes("linear_state", batch, kv_heads, head_size, value_size, dtype)
    if callable(features):
        like = jax.ShapeDtypeStruct((batch, 1, kv_heads, head_size), dtype)
        mapped = jax.eval_shape(partial(_applied, "linear_state", features), like)
        sizes = batch, kv_heads, mapped.shape[-1], value_size
    return recurrence.empty(None, sizes, dtype)


def _recurrence(who: str, features: str | FeatureFunction) -> Normalised:
    """A function is applied by the caller to whole arrays; the engine sees the rest."""
    if callable(features):
        return Normalised(IDENTITY)
    return Normalised(named(who, PLAIN, features))


def _mapped(
    who: str,
    features: str | FeatureFunction,
    query: Array,
    key: Array,
    mask: Array | None,
) -> tuple[Array, Array]:
    """Queries and keys after a feature function, which sees 0 for every hidden key."""
    if not callable(features):
        return query, key
    check_arrays(who, query=query, key=key)
    if mask is not None:
        check_mask(who, mask, key)
        (key,) = only_seen(visible_keys(mask, *key.shape[:2]), key)
    return _applied(who, features, query), _applied(who, features, key)


def _applied(who: str, features: FeatureFunction, x: Array) -> Array:
    mapped = features(x)
    given = jnp.shape(x)
    found = getattr(mapped, "shape", f"a {type(mapped).__name__}")
    if len(found) != 4 or found[:3] != given[:3]:
        raise ValueError(
            f"{who}: features must map [B T N H] {given} to [B T N M], got {found}"
        )
    return mapped
