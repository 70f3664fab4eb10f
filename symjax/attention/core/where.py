"""Choice between two arrays, entry by entry."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

Values = Array | float


def where(condition: Bool[Array, "*#shape"], chosen: Values, other: Values) -> Array:
    """Return `chosen` where `condition` is True, else `other`.

    The result equals that of `jnp.where`. But `jnp.where` is jitted: each call with new
    shapes adds a function to the program. Here no function is added.
    """
    values = chosen, other
    dtype = jnp.result_type(*values)
    shape = jnp.broadcast_shapes(condition.shape, *map(jnp.shape, values))
    chosen, other = (jnp.broadcast_to(jnp.asarray(x, dtype), shape) for x in values)
    return jax.lax.select(jnp.broadcast_to(condition, shape), chosen, other)
