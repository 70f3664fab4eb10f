"""Symmetric attention: keys made from the queries.

    def symmetric(q, v, U):                  # one head: q [T H], v [T V], U [H H]
        weights = np.exp(q @ (q @ U.T).T / np.sqrt(q.shape[-1]))
        return weights @ v / weights.sum(axis=-1, keepdims=True)

If U is the identity, the keys are the queries.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.core.arguments import (
    check_arrays,
    check_choice,
    check_floating,
    check_function,
)
from symjax.attention.softmax import softmax

NORMALISERS = ("unit", "rms")


def symmetric_key(
    query: Float[Array, "B T N H"],
    metric: Float[Array, "N H H"] | None = None,
    *,
    normalise: str | None = None,
) -> Float[Array, "B T N H"]:
    """Return the keys of symmetric attention: query or U·query, optionally normalised.

    With a metric U the score of a pair is q_tᵀ U q_s. U may be any matrix. Apply rotary
    positions to query and key after this function, not before. With a metric the cost
    is O(T N H²).

    Args:
        normalise: "unit" divides a key by its length, or by 1e-12 if the length is less
            (shared queries and keys of Reformer). "rms" divides a key by
            √(mean of squares + 1e-6).
    Raises:
        ValueError: the metric does not fit the query, or normalise is unknown.
    Source: Courtois et al. 2024, arXiv:2406.06366 (pairwise); Kitaev et al. 2020,
        arXiv:2001.04451 (shared and normalised).
    """
    if normalise is not None:
        check_choice("symmetric_key", "normalise", normalise, NORMALISERS)
    check_arrays("symmetric_key", query=query)
    key = query
    if metric is not None:
        check_floating("symmetric_key", metric=metric)
        heads, size = query.shape[-2:]
        if metric.shape != (heads, size, size):
            raise ValueError(
                f"symmetric_key: metric must be [heads, size, size] "
                f"{(heads, size, size)} for query {query.shape}, got {metric.shape}"
            )
        key = jnp.einsum("nhg,btng->btnh", metric.astype(query.dtype), query)
    if normalise is None:
        return key
    wide = key.astype(jnp.promote_types(key.dtype, jnp.float32))
    squares = wide * wide
    if normalise == "rms":
        inverse = 1 / jnp.sqrt(squares.mean(axis=-1, keepdims=True) + 1e-6)
    else:  # a least length inside the root keeps the gradient of a zero query finite
        total = squares.sum(axis=-1, keepdims=True)
        inverse = 1 / jnp.sqrt(jnp.maximum(total, 1e-24))
    return (wide * inverse).astype(key.dtype)


def symmetric(
    query: Float[Array, "B T N H"],
    value: Float[Array, "B T N V"],
    *,
    metric: Float[Array, "N H H"] | None = None,
    normalise: str | None = None,
    attend: Callable[..., Array] = softmax,
    **options,
) -> Float[Array, "B T N V"]:
    """Return attend(query, key, value), where `symmetric_key` makes key from query.

    Scores are symmetric, s_ts = s_st, if keys are not normalised and there is no metric
    or a symmetric one. Without a metric a token usually has its highest score, |q|²/√H,
    with itself; `mask_self=True` hides this pair. The cost is that of `attend`, plus
    O(T N H²) with a metric.

    Args:
        metric, normalise: options of `symmetric_key`.
        attend: any mechanism with the arguments (query, key, value, **options). This
            excludes `flash` and `matrix_function`.
        options: options of `attend`.
    Raises:
        ValueError: value and query differ in heads. Grouped heads are impossible, since
            each query head has its own key. Also as `symmetric_key` and `attend`.
    Source: Courtois et al. 2024, arXiv:2406.06366 (a metric); Kitaev et al. 2020,
        arXiv:2001.04451 (shared and normalised keys).
    """
    check_function("symmetric", attend)
    check_arrays("symmetric", query=query, value=value)
    if query.shape[2] != value.shape[2]:
        raise ValueError(
            "symmetric: as many value heads as query heads are needed, got query "
            f"{query.shape} and value {value.shape}"
        )
    key = symmetric_key(query, metric, normalise=normalise)
    return attend(query, key, value, **options)
