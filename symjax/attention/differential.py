"""Differential attention: one map minus λ times another, over any mechanism."""

import math
from collections.abc import Callable

import jax.numpy as jnp
from einops import rearrange, repeat
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
    own = {}  # options that may differ by head
    for name in ("mask", "bias"):
        if (array := options.get(name)) is not None and array.ndim == 4:
            if array.shape[1] not in (1, heads):
                raise ValueError(
                    f"{name} must have one head or {heads}, as many as half of query "
                    f"{query.shape}, got {array.shape}"
                )
            own |= {name: array} if array.shape[1] > 1 else {}
    lam = jnp.broadcast_to(lam, (1, 1, heads))
    weights = row_weights_of(attend)
    if weights is not None:
        own = {name: jnp.repeat(array, 2, axis=1) for name, array in own.items()}
        return attend_rows(weights, query, key, value, lam=lam, **{**options, **own})
    # The queries of branch p must stand together at their key head (k p).
    groups = {"k": value.shape[2], "p": 2}
    own = {
        name: repeat(array, "b (k g) t s -> b (k p g) t s", **groups)
        for name, array in own.items()
    }
    query = rearrange(query, "b t (k g p) h -> b t (k p g) h", **groups)
    wide = jnp.promote_types(value.dtype, jnp.float32)
    both = jnp.repeat(value.astype(wide), 2, axis=2)
    result = attend(query, key, both, **{**options, **own})
    output, *state = result if isinstance(result, tuple) else (result,)
    pairs = rearrange(output, "b t (k p g) v -> p b t (k g) v", **groups)
    mixed = pairs[0] - lam[..., None].astype(wide) * pairs[1]
    mixed = mixed.astype(value.dtype)
    return (mixed, *state) if state else mixed
