"""Rows of output that keep their digits where plain sums would not.

Underflow. All factors of a chunk refer to its highest exponent, so that its weights are
one matrix product. A row underflows where a later key is e⁴⁶ times larger than all keys
that the row sees. Such rows are computed again (`rescued`, `exact_rows`): each refers
to its own highest exponent, and each pair takes an exponential for every feature.

Cancellation. A state holds features in float32. Where features change sign, a state
adds an error of about ε|φ(q)|Σ|φ(k)| to the numerator and to the denominator of a row,
with ε = 2⁻²³. `read_centred` therefore reads a state around the mean of its values.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from symjax.attention.core.feature_maps import LogFeatures, finite
from symjax.attention.core.meshes import RARE, batched_alike

# Without the other form that `chunks.einsum` has on a CPU: these rows are rare.
exact_product = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def rescued(
    quick: Callable[..., tuple[Any, Array]],
    exactly: Callable[..., Any],
    shown: Any,
    given: Any,
) -> Any:
    """Return rows by quick(shown, given) → (rows, lost), and in place of the lost ones
    those of exactly(shown, given).

    The other rows stay as they are, so that no example depends on what another one
    needed. Only `given` has a gradient. The exact form runs in a branch of its own,
    once forward and once backward, and only if a row was lost.
    """
    rows, lost = quick(shown, given)
    return batched_alike(_if_lost(lost, _replace, rows, exactly, lost, shown, given))


def _forward(quick: Callable, exactly: Callable, shown: Any, given: Any) -> tuple:
    rows, pull, lost = jax.vjp(partial(quick, shown), given, has_aux=True)
    rows = _if_lost(lost, _replace, rows, exactly, lost, shown, given)
    return batched_alike(rows), (pull, lost, shown, given)


def _backward(quick: Callable, exactly: Callable, saved: tuple, change: Any) -> tuple:
    pull, lost, shown, given = saved
    nothing = jax.tree.map(jnp.zeros_like, change)
    (gradient,) = pull(_where(lost, nothing, change))
    change = _where(lost, change, nothing)
    return None, _if_lost(lost, _add_gradient, gradient, exactly, shown, given, change)


rescued.defvjp(_forward, _backward)


def _if_lost(lost: Array, function: Callable, result: Any, exactly, *given: Any) -> Any:
    """Return function(result, …) if a row was lost, else the result."""
    with jax.named_scope(RARE):
        form = partial(function, exactly)
        return jax.lax.cond(lost.any(), form, lambda *x: x[0], result, *given)


def _replace(exactly: Callable, rows: Any, lost: Array, shown: Any, given: Any) -> Any:
    return _where(lost, exactly(shown, given), rows)


def _add_gradient(
    exactly: Callable, gradient: Any, shown: Any, given: Any, change: Any
) -> Any:
    _, pull = jax.vjp(partial(exactly, shown), given)
    return jax.tree.map(jnp.add, gradient, pull(change)[0])


def _where(lost: Bool[Array, "*rows"], one: Any, two: Any) -> Any:
    """Rows of one, where they are lost, or of the other."""

    def chosen(one: Array, two: Array) -> Array:
        rows = jnp.expand_dims(lost, tuple(range(lost.ndim, two.ndim)))
        return jnp.where(rows, one, two)

    return jax.tree.map(chosen, one, two)


def exact_rows(
    read: Callable[..., Any],
    running_max: Float[Array, "B K M"],
    query: LogFeatures,
    key: LogFeatures,
    value: Float[Array, "B K T V"],
    pairs: Bool[Array, "B T S"],
    reaches: Bool[Array, "B T"] | None,
) -> Any:
    """The rows [B K G T …] of a chunk.

    Args:
        read: (weights for the state, shift, weights of pairs, values) → rows.
        running_max: of the state before the chunk.
        query, key: features [B K G T M] and [B K T M].
        pairs: the keys that a row sees.
        reaches: the rows that see the state; None: all.
    """
    row = query.raised(running_max[:, :, None, None])
    if reaches is not None:
        row = row.where(reaches[:, None, None])
    keys = jax.tree.map(lambda x: jnp.moveaxis(x[:, :, None, None], 4, 0), key)
    by_key = keys, jnp.moveaxis(pairs[:, None, None], 4, 0)

    def exponents(now: tuple[LogFeatures, Array]) -> LogFeatures:
        """Feature by feature, of all rows with one key."""
        key, seen = now
        return query.raised(key.exponent).where(seen)

    def highest(now: tuple[LogFeatures, Array]) -> Float[Array, "B K G T 1"]:
        return exponents(now).exponent.max(axis=-1, keepdims=True)

    @jax.checkpoint
    def weights(now: tuple[LogFeatures, Array]) -> Float[Array, "B K G T"]:
        both = exponents(now).raised(-shift).weights()
        if key.amplitude is not None:
            both = both * now[0].amplitude
        return both.sum(axis=-1)

    shift = jnp.maximum(
        jax.lax.map(highest, by_key).max(axis=0),
        row.exponent.max(axis=-1, keepdims=True),
    )
    shift = finite(jax.lax.stop_gradient(shift))
    scores = jnp.moveaxis(jax.lax.map(weights, by_key), 0, -1)
    return read(row.raised(-shift).weights(), shift[..., 0], scores, value)


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
    mean = mean / jnp.maximum(weight, jnp.finfo(weight.dtype).tiny)[..., None]
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
