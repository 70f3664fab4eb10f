"""Rows that left float32, computed once more by a form that is exact at any scale.

A chunk whose factors all refer to its highest exponent is one matrix product, and loses
rows where a later key is e⁴⁶ times larger than all that they see. Here each row refers
to its own highest exponent, and each pair and feature takes an exponential of its own:
time O(T chunk_size M), some ten times as long as the products.

Only features with exponents come here, and this runs only if a row was lost.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from symjax.attention.features import LogFeatures
from symjax.attention.linear_state import finite
from symjax.attention.quotients import Weights, largest_exponent


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def if_any(function: Callable, some: Array, fixed: Any, arrays: Any, zeros: Any) -> Any:
    """function(fixed, arrays), or `zeros` of its result unless `some`: in both passes.

    The derivative of a plain `jax.lax.cond` would fill what the rare branch keeps for
    its backward pass with zeros every time.

    Args:
        fixed: what has no gradient.
    """
    return jax.lax.cond(some, function, lambda *_: zeros, fixed, arrays)


def _forward(function: Callable, some: Array, *given: Any) -> tuple[Any, tuple]:
    return if_any(function, some, *given), (some, *given)


def _backward(function: Callable, saved: tuple, cotangents: Any) -> tuple:
    some, fixed, arrays, _ = saved

    def pull(fixed: Any, arrays: Any) -> Any:
        return jax.vjp(partial(function, fixed), arrays)[1](cotangents)[0]

    def nothing(fixed: Any, arrays: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, arrays)

    return None, None, jax.lax.cond(some, pull, nothing, fixed, arrays), None


if_any.defvjp(_forward, _backward)


def exact_weights(
    before: Float[Array, "B K M"],
    query: LogFeatures,
    key: LogFeatures,
    pairs: Bool[Array, "#B T T"],
    reaches: Bool[Array, "B T"] | None,
) -> Weights:
    """Feature weights for the state, the rows' shifts, and the weights of pairs.

    Args:
        before: the running maximum of the state before the chunk, to which it refers.
        query, key: features [B K G T M] and [B K T M].
        pairs: which query may see which key.
        reaches: which row reads the state (None: all).
    """
    row = query.raised(before[:, :, None, None])
    if reaches is not None:
        row = row.where(reaches[:, None, None])
    columns = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), (key, pairs))

    def seen(key: LogFeatures, sees: Array) -> LogFeatures:
        """The products of one key's features with those of the rows that see it."""
        both = query.raised(key.exponent[:, :, None, None])
        if key.amplitude is not None:
            amplitude = both.amplitude * key.amplitude[:, :, None, None]
            both = both._replace(amplitude=amplitude)
        return both.where(sees[:, None, None])

    def highest(shift: Array, column: tuple) -> tuple[Array, None]:
        return jnp.maximum(shift, largest_exponent(seen(*column))), None

    shift, _ = jax.lax.scan(highest, largest_exponent(row), columns)
    shift = finite(shift)

    @jax.checkpoint
    def score(_: None, column: tuple) -> tuple[None, Array]:
        return None, seen(*column).raised(-shift).weights().sum(axis=-1)

    _, scores = jax.lax.scan(score, None, columns)
    scores = jnp.moveaxis(scores, 0, -1)
    return Weights(row.raised(-shift).weights(), shift[..., 0], scores)
