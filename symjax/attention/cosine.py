"""Cosine ("norm") attention: a pair weighs 1 + the cosine of its angle.

    def cosine_causal(q, k, v):              # one head: q, k [T H], v [T V]
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        weights = np.tril(1 + q @ k.T)
        return weights @ v / weights.sum(axis=-1, keepdims=True)

1 + cos is a product of the features [1, x/|x|], so it is a linear attention: it needs
no map, and decodes from a state of (H + 1)·V numbers a head.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.arguments import state_sizes
from symjax.attention.features import UNIT
from symjax.attention.recurrent.bidirectional import attend
from symjax.attention.recurrent.engine import attend_causal, attend_step
from symjax.attention.recurrent.normalised import LinearState, Normalised

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
    """Attention whose weights are 1 + cos(q, k), normalised over the keys.

    out[t] = Σ_s (1 + q̂_t·k̂_s) v_s / Σ_s (1 + q̂_t·k̂_s), with x̂ = x / (|x| + 1e-6)

    Query head n uses key head n // (N/K). Time O((T + S) H V), with no [T S] map. Sums
    run in float32 at least, which must hold |x|²: entries up to 1e18, and for gradients
    lengths from 1e-18 on. A row that sees no key is zero, and so is one whose keys all
    point away from it, as far as rounding can tell: 1 + cos is below 2⁻²⁴.

    Above that, rows nearly antiparallel to keys of one direction lose no digits, if
    those are all the keys, or all in a chunk of `cosine_causal`. Otherwise, and where
    keys are read from a state (of tokens over 64 with `segment_ids`), a weight is off
    by about ε = 2⁻²³, so that the output is off by ε / (1 + cos) of the values.
    A row that reads less than ε a key from a state has the mean of their values.

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
        given = query, key, value, mask
        output: Any = cosine_causal(*given, segment_ids=segment_ids)
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
    """`cosine` over a token itself, its past, and what `state` has seen.

    Time O(T (H V + chunk_size (H + V))); the backward pass keeps one state a chunk.
    One NVIDIA GPU runs bfloat16
    on the kernels of linear attention, with the features [1, x/|x|]. The mean weight of
    a row then has an error of about 1e-4, at most 1e-3, and the relative error of the
    output is that over the mean weight. A row whose mean weight is below 2⁻¹⁰ is 0. The
    kernels have no forward-mode derivative.

    Args:
        state: from `cosine_state`, `cosine_step` or an earlier call.
        chunk_size, return_state, segment_ids, axis_name: as in `linear_causal`.
    Raises:
        ValueError: as `cosine`; T differs from S; a state of other sizes; a
            state given or wanted with an axis_name.
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
    """One more token of `cosine_causal`, in O(H V): the output and the state after it.

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
    """The state of `cosine_causal` before the first token; float32 at least."""
    sizes = state_sizes("cosine_state", batch, kv_heads, head_size, value_size, dtype)
    return RECURRENCE.empty(None, sizes, dtype)
