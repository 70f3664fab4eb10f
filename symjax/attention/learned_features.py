"""Learned features for `linear(features="identity")`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.checks import check_floating
from symjax.attention.chunks import products


def hedgehog(
    x: Float[Array, "B T N H"], weight: Float[Array, "N H M"]
) -> Float[Array, "B T N 2M"]:
    """Learned features softmax([x W, −x W]) for `linear(features="identity")`.

    Cost: O(T H M). In float32 at least, as the features that are given by name.

    Raises:
        ValueError: a weight that does not fit.
    Source: Zhang et al. 2024, arXiv:2402.04347.
    """
    projected = _learned("hedgehog", x, weight)
    return jax.nn.softmax(jnp.concatenate([projected, -projected], axis=-1), axis=-1)


def t2r(
    x: Float[Array, "B T N H"],
    weight: Float[Array, "N H M"],
    bias: Float[Array, "N M"],
) -> Float[Array, "B T N M"]:
    """Learned features relu(x W + b) for `linear(features="identity")`.

    Cost: O(T H M). In float32 at least, as the features that are given by name. A row
    whose features are all 0 gets an output of 0.

    Raises:
        ValueError: a weight or a bias that does not fit.
    Source: Kasai et al. 2021, arXiv:2103.13076.
    """
    projected = _learned("t2r", x, weight)
    check_floating("t2r", bias=bias)
    if bias.shape != projected.shape[2:]:
        raise ValueError(
            f"t2r: bias must be [N M] of x {x.shape} and weight {weight.shape}, "
            f"got {bias.shape}"
        )
    return jax.nn.relu(projected + bias[None, None].astype(projected.dtype))


def _learned(who: str, x: Array, weight: Array) -> Array:
    check_floating(who, x=x, weight=weight)
    if x.ndim != 4 or weight.ndim != 3 or weight.shape[:2] != x.shape[2:]:
        raise ValueError(
            f"{who}: weight must be [N H M] for x [B T N H], got weight "
            f"{weight.shape} and x {x.shape}"
        )
    dtype = jnp.promote_types(jnp.result_type(x, weight), jnp.float32)
    given = x.astype(dtype), weight.astype(dtype)
    return products(x, weight)("btnh,nhm->btnm", *given)
