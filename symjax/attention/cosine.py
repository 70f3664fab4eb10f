"""Cosine ("norm") attention: the weight of a pair is 1 + cos(query, key).

    def cosine_causal(q, k, v):              # one head: q, k [T H], v [T V]
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        weights = np.tril(1 + q @ k.T)
        return weights @ v / weights.sum(axis=-1, keepdims=True)

1 + cos is the dot product of the features [1, x/|x|] of query and key. So cosine
attention is linear attention with these features: its time is linear in T, and it
decodes from a state of (H + 1)(V + 1) numbers per head.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.features import UNIT
from symjax.attention.recurrent.arguments import state_sizes
from symjax.attention.recurrent.bidirectional import attend
from symjax.attention.recurrent.engine import attend_causal, attend_step
from symjax.attention.recurrent.linear_state import LinearState
from symjax.attention.recurrent.normalised import Normalised

RECURRENCE = Normalised(UNIT)


def cosine(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    mask: Bool[Array, "B 1 1 S"] | None = None,
    *,
    is_causal: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T N V"]:
    """Return attention whose weights are 1 + cos(q, k), normalised over the keys.

    out[t] = Σ_s (1 + q̂_t·k̂_s) v_s / Σ_s (1 + q̂_t·k̂_s), with x̂ = x / (|x| + 1e-6)

    Query head n uses key head n // (N/K). Time O((T + S) H V). If there are no segments
    and S ≤ (H + 1) V / (H + 1 + V), the weights [T S] are computed, since a state
    [H + 1, V] would cost more. Sums run in float32 at least. Float32 must hold
    |x|², so entries may be up to 1e18. Gradients need queries and keys of length 1e-18
    or more. No ε is added to the denominator of a row. A row is zero if it sees no key,
    or if 1 + cos is below 2⁻²⁴, the rounding error of 1, for all its keys. With more
    keys and no segments it is also zero if the mean of 1 + cos over its keys is below
    2⁻²⁴.

    Rounding. A query that is nearly antiparallel to its keys loses no digits if all
    keys, or all keys of a chunk of `cosine_causal`, have one direction. For other keys,
    and for keys that are read from a state, the error of a weight is about ε = 2⁻²³.
    The error of the output is then ε / (1 + cos) times the values. With `segment_ids`,
    keys 64 or more tokens away are read from a state. A row whose mean weight in a
    state is below 2ε gets the mean of the values of that state.

    Args:
        mask: True = attend; it may only hide keys. A hidden key changes nothing.
        is_causal: a token sees itself and the past, as in `cosine_causal`; needs T = S.
        segment_ids: tokens see only their own run of equal ids; needs T = S.
    Raises:
        ValueError: shapes that do not fit, or a mask that hides pairs and not keys.
    Source: the linear form is that of Katharopoulos et al. 2020, arXiv:2006.16236,
        equations 8 to 12.
    """
    if is_causal:
        arrays = query, key, value, mask
        output: Any = cosine_causal(*arrays, segment_ids=segment_ids)
        return output
    return attend("cosine", RECURRENCE, query, key, value, mask, segment_ids)


def cosine_causal(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    mask: Bool[Array, "B 1 1 T"] | None = None,
    *,
    chunk_size: int = 64,
    state: LinearState | None = None,
    return_state: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    axis_name: str | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], LinearState]:
    """Return `cosine` where each token sees itself, its past and the tokens in `state`.

    Time O(T (H V + chunk_size (H + V))). The backward pass saves one state per chunk,
    or per group of chunks that run in parallel.

    On one NVIDIA GPU, or inside `jax.shard_map`, the kernels of linear attention
    compute calls in bfloat16. In these kernels the mean weight of a row has an error of
    about 1e-4, at most 1e-3. The relative error of the output is this error divided by
    the mean weight. A row whose mean weight is below 2⁻¹⁰ is 0. Kernels have no
    forward-mode derivative.

    Args:
        state: from `cosine_state`, `cosine_step` or an earlier call.
        chunk_size, return_state, segment_ids, axis_name: as in `linear_causal`.
    Raises:
        ValueError: as `cosine`; T differs from S; a state of other sizes; `state` or
            `return_state` together with axis_name.
    """
    return attend_causal(
        "cosine_causal",
        RECURRENCE,
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


def cosine_step(
    state: LinearState,
    query: Float[Array, "B 1 N H"],
    key: Float[Array, "B 1 K H"],
    value: Float[Array, "B 1 K V"],
) -> tuple[Float[Array, "B 1 N V"], LinearState]:
    """Return the output for one more token of `cosine_causal`, and the new state.

    Time O(H V).

    Raises:
        ValueError: as `cosine_causal`; more than one token.
    """
    return attend_step("cosine_step", RECURRENCE, state, query, key, value)


def cosine_state(
    batch: int,
    kv_heads: int,
    head_size: int,
    value_size: int,
    *,
    dtype: Any = jnp.float32,
) -> LinearState:
    """Return the state of `cosine_causal` before the first token.

    It has (H + 1)(V + 1) numbers per key head, float32 at least.

    Raises:
        ValueError: a size or a dtype that is wrong.
    """
    sizes = state_sizes("cosine_state", batch, kv_heads, head_size, value_size, dtype)
    return RECURRENCE.empty(None, sizes, dtype)
