"""Layers under a mesh: what each device computes on its own part.

Without a mesh (`jax.set_mesh`) every function here does nothing, so that modules work
in a notebook. Weights are not annotated here: their places are a table in
`symjax.training.sharding`.
"""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

BATCH = ("data", "fsdp")  # mesh axes that split the batch
HEADS = "tensor"


def has_mesh() -> bool:
    return not jax.sharding.get_abstract_mesh().empty


def constrain(x: Array, *axes: str | tuple[str, ...] | None) -> Array:
    """`x` laid out over the named mesh axes, one entry a dimension."""
    return jax.lax.with_sharding_constraint(x, P(*axes)) if has_mesh() else x


def per_device(
    function: Callable[..., Array],
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    replicated: dict[str, Array],
) -> Float[Array, "B T N V"]:
    """function(query, key, value, **replicated), each device on its examples and heads.

    Attention needs no communication between examples or heads; inside a `shard_map`
    the compiler cannot add any (a loop over a sharded batch would gather it).
    """
    if not has_mesh():
        return function(query, key, value, **replicated)
    local = P(BATCH, None, HEADS, None)
    return jax.shard_map(
        lambda query, key, value, rest: function(query, key, value, **rest),
        in_specs=(local, local, local, P()),
        out_specs=local,
        check_vma=False,
    )(query, key, value, replicated)
