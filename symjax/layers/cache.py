"""The keys and values that score mechanisms decode with."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Cache(NamedTuple):
    """The decoding state of score mechanisms: the keys and values seen so far."""

    key: Float[Array, "B L K H"]
    value: Float[Array, "B L K V"]


def write(
    cache: Float[Array, "B L *rest"],
    new: Float[Array, "B T *rest"],
    positions: Int[Array, "B T"],
) -> Float[Array, "B L *rest"]:
    """`new` at each example's own positions; those beyond the end are dropped.

    A piece may be filled up with tokens that do not exist, and they need no room.
    """
    examples = jnp.arange(cache.shape[0])[:, None]
    return cache.at[examples, positions].set(new.astype(cache.dtype), mode="drop")
