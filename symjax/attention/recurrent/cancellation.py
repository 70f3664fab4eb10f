"""Rows read from a state of features that change sign.

If features change sign, the terms of a row may cancel. Then its denominator may be
smaller than the rounding errors of numerator and denominator, and their ratio would be
arbitrary. `read_around_mean` bounds the ratio: it reads the state relative to the mean
of the values.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.core.where import where


def read_around_mean(
    product: Callable[..., Array],
    nonnegative_count: int,
    sums: Float[Array, "B K M V"],
    total: Float[Array, "B K M"],
    row: Float[Array, "B K G T M"],
    denominator: Float[Array, "B K G T"],
    magnitude: Float[Array, "B K G T"],
) -> tuple[Float[Array, "B K G T V"], Float[Array, "B K G T"]]:
    """Return numerators and denominators whose ratio stays bounded if terms cancel.

    The numerator is computed as

        row · sums = row · (sums − total meanᵀ) + denominator · mean

    The mean is a weighted mean of the values. The weight of a value is the sum of the
    first `nonnegative_count` features of its key. A rounding error of the denominator
    is then in numerator and denominator alike, and cancels in the ratio.

    - Entries of sums − total meanᵀ below the rounding error of total meanᵀ become 0. So
      if all values are equal, the ratio is this value.
    - A denominator below its own rounding error is raised to that error, and the ratio
      is the mean.

    Args:
        product: an einsum.
        nonnegative_count: number of first features of a key that are never negative.
        sums, total: Σ φ(k) vᵀ and Σ φ(k) over the keys of the state.
        row: features of the queries.
        denominator: row · total.
        magnitude: Σ |terms| of the denominator, or a bound of it.
    """
    weight = total[..., :nonnegative_count].sum(axis=-1)
    mean = sums[..., :nonnegative_count, :].sum(axis=-2)
    tiny = float(jnp.finfo(weight.dtype).tiny)
    mean = mean / where(weight < tiny, tiny, weight)[..., None]
    constant_mean = jax.lax.stop_gradient(mean)
    means = product("bkm,bkv->bkmv", total, constant_mean)
    deviation = sums - means
    rounding = 8 * jnp.finfo(deviation.dtype).eps * jnp.abs(means)
    deviation = deviation - jax.lax.stop_gradient(
        where(jnp.abs(deviation) <= rounding, deviation, 0)
    )
    least = jnp.finfo(magnitude.dtype).eps * jax.lax.stop_gradient(magnitude)
    raised = denominator < least
    denominator = where(raised, least, denominator)
    numerator = product("bkgtm,bkmv->bkgtv", row, deviation)
    numerator = numerator + product("bkgt,bkv->bkgtv", denominator, constant_mean)
    means = product("bkgt,bkv->bkgtv", least, mean)
    return where(raised[..., None], means, numerator), denominator
