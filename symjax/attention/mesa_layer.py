"""The Mesa layer: a query reads from the ridge regression of values on keys.

    def mesa(q, k, v, ridge):  # one head: q, k [T H], v [T V]
        moments, sums, out = ridge * np.eye(k.shape[1]), 0, []
        for t in range(len(q)):
            moments = moments + np.outer(k[t], k[t])
            sums = sums + np.outer(k[t], v[t])
            out.append(q[t] @ np.linalg.inv(moments) @ sums)
        return np.stack(out)

`mesa_causal` computes a sequence, chunk by chunk. `mesa_step` computes one token from a
state.

The recurrence is in `symjax.attention.recurrent.ridge`. With keys equal to queries, the
values minus the output are a causal function of QQᵀ, the resolvent
(`symjax.attention.causal_matrix_function`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.arguments import as_array, check_heads, check_positive
from symjax.attention.core.products import sum_dtype
from symjax.attention.recurrent.arguments import state_sizes
from symjax.attention.recurrent.engine import attend_causal, attend_step
from symjax.attention.recurrent.ridge import Mesa, MesaState


def mesa_causal(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    mask: Bool[Array, "B 1 1 T"] | None = None,
    *,
    ridge: float | Float[Array, " K"] | Float[Array, "K H"] = 1.0,
    chunk_size: int = 64,
    state: MesaState | None = None,
    return_state: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    axis_name: str | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], MesaState]:
    """Return what queries read from the ridge regression of past values on past keys.

    out[t] = q_t (Λ + Σ_{s≤t} k_s k_sᵀ)⁻¹ Σ_{s≤t} k_s v_sᵀ, with Λ = diag(ridge).

    There is no scale and no denominator. Query head n uses key head n // (N/K). Sums
    run in float32 at least. Time O(T (H² + H V + chunk_size (H + V + chunk_size))):
    each chunk factorises one matrix [chunk_size chunk_size]. The backward pass saves
    one state per chunk, or per group of chunks that run in parallel.

    Keys that are long relative to the ridge cost digits in float32. With 256 tokens of
    16 channels and chunks of 64, the error is up to 1e-3 of the largest output if |k|²
    is 2e3 times the ridge, and up to 4e-2 at 2e5 times. At 2e7 times outputs are NaN.
    With chunks of 16 the error is up to 8e-4 at 2e5 times and 4e-3 at 2e7 times. In the
    layers of symjax keys have length 1 and the ridge is above 0.25.

    Args:
        ridge: Λ, above 0: a number, one per key head, or one per key head and channel.
        mask: True = attend; it may only hide keys. A hidden token is not read into the
            state. Its own output is read from the state.
        chunk_size: tokens per chunk; accelerators round it up to a multiple of 128.
        state: from `mesa_state`, `mesa_step` or an earlier call with the same ridge.
        return_state, segment_ids, axis_name: as in `linear_causal`. Devices also
            exchange matrices [H H].
    Raises:
        ValueError: shapes that do not fit, a ridge that is not above 0, a mask that
            hides pairs and not keys, or a state of other sizes; `state` or
            `return_state` together with axis_name.
    Source: von Oswald et al. 2025, arXiv:2506.05233. The paper solves by conjugate
        gradients; here the solution is exact.
    """
    who = "mesa_causal"
    query, key = _over_root_of_ridge(who, query, key, value, ridge)
    return attend_causal(
        who,
        Mesa(),
        query,
        key,
        value,
        mask,
        parameters=_one(query, key, value),
        chunk_size=chunk_size,
        state=state,
        return_state=return_state,
        segment_ids=segment_ids,
        axis_name=axis_name,
    )


def mesa_step(
    state: MesaState,
    query: Float[Array, "B 1 N H"],
    key: Float[Array, "B 1 K H"],
    value: Float[Array, "B 1 K V"],
    *,
    ridge: float | Float[Array, " K"] | Float[Array, "K H"] = 1.0,
) -> tuple[Float[Array, "B 1 N V"], MesaState]:
    """Return the output for one more token of `mesa_causal`, and the new state.

    Time O(H² + H V).

    Args:
        state: from `mesa_state` or an earlier call with the same ridge.
    Raises:
        ValueError: as `mesa_causal`; more than one token.
    """
    who = "mesa_step"
    query, key = _over_root_of_ridge(who, query, key, value, ridge)
    tokens = query, key, value
    return attend_step(who, Mesa(), state, *tokens, parameters=_one(*tokens))


def mesa_state(
    batch: int,
    kv_heads: int,
    head_size: int,
    value_size: int,
    *,
    dtype: Any = jnp.float32,
) -> MesaState:
    """Return the state of `mesa_causal` before the first token.

    It has H (H + V) numbers per key head, float32 at least.

    Raises:
        ValueError: a size or a dtype that is wrong.
    """
    sizes = state_sizes("mesa_state", batch, kv_heads, head_size, value_size, dtype)
    return Mesa().empty(None, sizes, dtype)


def _one(*arrays: Array) -> Float[Array, ""]:
    """Return 1, the β of `Mesa`: the keys are already divided by √ridge."""
    return jnp.ones((), sum_dtype(*arrays))


def _over_root_of_ridge(
    who: str, query: Array, key: Array, value: Array, ridge: Any
) -> tuple[Array, Array]:
    """Return queries and keys divided by √ridge, so that Λ is the identity.

    Raises:
        ValueError: shapes that do not fit, or a ridge that is not above 0.
    """
    check_heads(who, query, key, value)
    heads, size = key.shape[2:]
    if isinstance(ridge, int | float):
        check_positive(who, "ridge", ridge)
        return query * ridge**-0.5, key * ridge**-0.5
    ridge = as_array(who, "ridge", ridge)
    if not isinstance(ridge, Tracer) and not (np.asarray(ridge) > 0).all():
        raise ValueError(f"{who}: ridge must be positive, got {ridge}")
    if ridge.shape not in ((), (heads,), (heads, size)):
        raise ValueError(
            f"{who}: ridge must be one number, [{heads}] or [{heads}, {size}] for key "
            f"{key.shape}, got {ridge.shape}"
        )
    factor = jax.lax.rsqrt(ridge.astype(sum_dtype(key, ridge)))
    factor = factor.reshape((1, 1, -1, 1) if ridge.ndim < 2 else (1, 1, heads, size))
    groups = 1 if ridge.ndim == 0 else query.shape[2] // heads
    return query * jnp.repeat(factor, groups, axis=2), key * factor
