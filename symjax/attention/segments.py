"""Segments: runs of equal ids, whose tokens see no other."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from symjax.attention.meshes import like_its_first


@like_its_first
def segment_runs(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The number of each token's run of equal ids, from 0, consecutive in time."""
    return jnp.cumsum(starts(segment_ids), axis=1)


def starts(ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """The first tokens of runs of equal ids, but for that at time 0."""
    return ids != jnp.concatenate([ids[:, :1], ids[:, :-1]], axis=1)
