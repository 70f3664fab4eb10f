"""How rows read a state of features that cancel: around the mean of the values.

A state holds features in float32: what it adds to a row is off by about ε|φ(q)|Σ|φ(k)|,
with ε = 2⁻²³, in numerator and denominator alike.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def read_centred(
    product: Callable[..., Array],
    leading: int,
    sums: Float[Array, "B K M V"],
    total: Float[Array, "B K M"],
    row: Float[Array, "B K G T M"],
    denominator: Float[Array, "B K G T"],
    size: Float[Array, "B K G T"],
) -> tuple[Float[Array, "B K G T V"], Float[Array, "B K G T"]]:
    """Numerator and denominator whose ratio is bounded where features cancel.

    row·sums = row·(sums − total meanᵀ) + denominator · mean. Both sides of the division
    then share the rounding of the denominator, and what does not cancel is the spread
    of the values around their mean, in which a key weighs the sum of its leading
    features. A difference below the rounding of the sums is 0: the ratio of one key, or
    of keys of one value, is this value. A denominator below its own rounding is lifted
    to that, and the ratio is the mean.

    Args:
        leading: so many of a key's first features are never negative.
        sums, total: of the state.
        row, denominator, size: of the rows: features, denominators, and the sizes of
            their terms.
    """
    weight = total[..., :leading].sum(axis=-1)
    mean = sums[..., :leading, :].sum(axis=-2)
    mean = mean / jnp.where(weight > 0, weight, 1)[..., None]
    constant = jax.lax.stop_gradient(mean)
    means = product("bkm,bkv->bkmv", total, constant)
    rest = sums - means
    noise = 8 * jnp.finfo(rest.dtype).eps * jnp.abs(means)
    rest = rest - jax.lax.stop_gradient(jnp.where(jnp.abs(rest) <= noise, rest, 0))
    least = jnp.finfo(size.dtype).eps * jax.lax.stop_gradient(size)
    lifted = denominator < least
    denominator = jnp.where(lifted, least, denominator)
    numerator = product("bkgtm,bkmv->bkgtv", row, rest)
    numerator = numerator + product("bkgt,bkv->bkgtv", denominator, constant)
    means = product("bkgt,bkv->bkgtv", least, mean)
    return jnp.where(lifted[..., None], means, numerator), denominator
