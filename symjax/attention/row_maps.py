"""The whole map of a score mechanism's weights, for reading."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.rows import RowWeights
from symjax.attention.scores import ScoreMechanism


def row_map(
    weights: RowWeights,
    query: Float[Array, "B T Nq H"],
    key: Float[Array, "B S Nk H"],
    *,
    lam: Float[Array, "#B #T N"] | None = None,
    shared_keys: bool = False,
    **options: Any,
) -> Float[Array, "B N T S"]:
    """The whole map of weights, for reading: O(T S) memory.

    It is the output of a score mechanism of these weights for unit vectors as values;
    `options` are its own.

    Args:
        shared_keys: with `lam`, both query heads of a pair look at one key
            (differential V2); otherwise each has its own (V1).
    """
    branches = 1 if lam is None or shared_keys else 2
    heads = key.shape[2] // branches
    units = jnp.eye(key.shape[1], dtype=query.dtype)[None, :, None]
    value = jnp.broadcast_to(units, (key.shape[0], key.shape[1], heads, key.shape[1]))
    attend = ScoreMechanism("row_map", weights)
    options = {"implementation": "whole", **options}
    return jnp.swapaxes(attend(query, key, value, lam=lam, **options), 1, 2)
