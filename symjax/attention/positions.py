"""Rotary position embedding."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotate(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "#B T"],
    base: float = 10000.0,
) -> Float[Array, "B T N H"]:
    """Turn feature pairs (i, i + H/2) by the angle position · base^(−2i/H).

    The product of a rotated query and a rotated key depends on their distance alone.
    Angles are computed in float32 at least.

    Raises:
        ValueError: the head size is odd.
    Source: Su et al. 2021, arXiv:2104.09864; pairs as halves, as in GPT-NeoX.
    """
    size = x.shape[-1]
    if size % 2:
        raise ValueError(f"rotary positions need an even head size, got {x.shape}")
    wide = jnp.promote_types(x.dtype, jnp.float32)
    frequencies = base ** (-jnp.arange(0, size, 2, dtype=wide) / size)
    angles = positions[..., None, None].astype(wide) * frequencies[None, None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(wide), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
