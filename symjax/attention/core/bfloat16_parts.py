"""Float32 numbers as sums of bfloat16 numbers, for products on matrix units."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def in_parts(x: Float[Array, "_ _"], count: int) -> list[Array]:
    """Return bfloat16 arrays, the largest first, whose sum is near a float32 array.

    Each has 8 of the 24 bits of a number, so the sum of three is exact.
    """
    parts = []
    for _ in range(count):
        parts.append(x.astype(jnp.bfloat16))
        x -= parts[-1].astype(x.dtype)
    return parts
