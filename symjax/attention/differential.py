"""Differential attention: one map minus λ times another, over any mechanism."""

import math
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.mechanisms import row_weights_of
from symjax.attention.rows import attend_rows
from symjax.attention.softmax import softmax


def lambda_initial(depth: int) -> float:
    """0.8 − 0.6 exp(−0.3 depth), the constant part of λ; depth counts from 0.

    Source: Ye et al. 2024, arXiv:2410.05258, section 2.1 (there from layer 1).
    """
    return 0.8 - 0.6 * math.exp(-0.3 * depth)


def differential_lambda(
    query_1: Float[Array, "H"],
    key_1: Float[Array, "H"],
    query_2: Float[Array, "H"],
    key_2: Float[Array, "H"],
    initial: float,
) -> Float[Array, ""]:
    """λ = exp(query_1·key_1) − exp(query_2·key_2) + initial, in float32 at least.

    One λ a layer, shared by its heads; it may become negative.

    Source: Ye et al. 2024, arXiv:2410.05258, equation 2.
    """
    wide = jnp.promote_types(query_1.dtype, jnp.float32)
    first = jnp.exp(jnp.sum(query_1.astype(wide) * key_1.astype(wide)))
    second = jnp.exp(jnp.sum(query_2.astype(wide) * key_2.astype(wide)))
    return first - second + initial


def differential(
    query: Float[Array, "B T 2N H"],
    key: Float[Array, "B S 2K H"],
    value: Float[Array, "B S K V"],
    lam: Float[Array, "*N"] | float,
    *,
    attend: Callable = softmax,
    **options,
):
    """(A₁ − λA₂) V, with A₁ and A₂ the maps of `attend` for two branches of a head.

    Sub-heads are ordered (head, branch): 2n is branch 1 of head n, 2n+1 branch 2. With
    grouped key/value heads, branch b of head n uses key branch b of its group. The
    norm over each head and the factor 1 − λ_init belong to the layer.

    A mechanism with row weights subtracts the maps before they meet the values: one
    pass, at 1.1–1.4 times the cost of a single map. Any other runs once with twice
    the heads, and its outputs are subtracted: for a linear one that is two states.

    Args:
        lam: λ, a scalar, or one a head [N].
        attend: a mechanism with the arguments (query, key, value, **options). If it
            returns (output, state), so does this.
        options: of `attend`; a mask or bias has N heads, or one for all.
    Raises:
        ValueError: shapes that do not fit together, naming both.
    Source: Ye et al. 2024, arXiv:2410.05258, equation 1.
    """
    heads = query.shape[2] // 2
    if query.shape[2] % 2 or key.shape[2] != 2 * value.shape[2]:
        raise ValueError(
            "differential attention needs two query and two key heads for each head, "
            f"got query {query.shape}, key {key.shape}, value {value.shape}"
        )
    if heads % value.shape[2]:
        raise ValueError(
            f"query heads must be a multiple of value heads, got query {query.shape} "
            f"and value {value.shape}"
        )
    lam = jnp.asarray(lam)
    if lam.shape not in ((), (heads,)):
        raise ValueError(
            f"lam must be a scalar or one a head {(heads,)}, got {lam.shape}"
        )
    for name in ("mask", "bias"):
        if (array := options.get(name)) is not None and array.shape[1] == heads > 1:
            options[name] = jnp.repeat(array, 2, axis=1)
    lam = jnp.broadcast_to(lam, (1, 1, heads))
    weights = row_weights_of(attend)
    if weights is not None:
        return attend_rows(weights, query, key, value, lam=lam, **options)
    return _subtract_outputs(query, key, value, lam, attend, options)


def _subtract_outputs(query, key, value, lam, attend, options):
    """Both branches as heads of one call, each with its own copy of the values."""
    batch, time, _, size = query.shape
    kv_heads = value.shape[2]
    # (k g p) → (k p g): the g queries of branch p must stand together at key (k p)
    split = query.reshape(batch, time, kv_heads, -1, 2, size)
    query = jnp.swapaxes(split, 3, 4).reshape(query.shape)
    result = attend(query, key, jnp.repeat(value, 2, axis=2), **options)
    output, *state = result if isinstance(result, tuple) else (result,)
    wide = jnp.promote_types(output.dtype, jnp.float32)
    pairs = output.astype(wide).reshape(batch, time, kv_heads, 2, -1, output.shape[-1])
    factor = lam.reshape(1, 1, kv_heads, -1, 1).astype(wide)
    mixed = pairs[:, :, :, 0] - factor * pairs[:, :, :, 1]
    mixed = mixed.reshape(batch, time, -1, output.shape[-1]).astype(output.dtype)
    return (mixed, *state) if state else mixed
