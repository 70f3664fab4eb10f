"""Second computation of the rows of output that underflow in a chunk.

Each feature of the keys of a chunk is divided by its maximum over the chunk and the
state before it, so that the weights of pairs are one matrix product
(`recurrent/normalised.py`). A row underflows if the sum of the |terms| of its
denominator is below 1e-20 = e⁻⁴⁶. That can only happen if a key that the row does not
see, a later one or one of another segment, has features e⁴⁶ times as large as all keys
that the row sees.

`recompute_underflow` replaces the rows that underflowed by rows of a second function.
For `Normalised` this function is `exact_rows`. It divides each row by the largest term
of its denominator: the largest product of a feature of the query and the same feature
of a key that the row sees. This costs one exponential per pair and feature. For GPU
kernels the second function is their fallback in XLA, one token after the other. TPU
kernels do not use this file: they recompute such rows themselves.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from symjax.attention.core.feature_maps import LogFeatures, finite
from symjax.attention.core.meshes import RARE, batched_alike
from symjax.attention.core.where import where

exact_product = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def recompute_underflow(
    fast: Callable[..., tuple[Any, Array]],
    exact: Callable[..., Any],
    visibility: Any,
    inputs: Any,
) -> Any:
    """Return the rows of `fast`; rows that underflowed are those of `exact`.

    If any row underflowed, `exact` computes all rows in a `jax.lax.cond`, once forward
    and once backward. Rows that did not underflow are still bitwise those of `fast`, so
    that no example depends on another one.

    Args:
        fast: (visibility, inputs) → (rows, underflowed); `underflowed` has a bool for
            each row.
        exact: (visibility, inputs) → rows.
        visibility: arrays without a gradient.
        inputs: arrays with a gradient.
    """
    rows, underflowed = fast(visibility, inputs)
    return batched_alike(
        _if_any(
            underflowed, _replace_rows, rows, exact, underflowed, visibility, inputs
        )
    )


def _forward(fast: Callable, exact: Callable, visibility: Any, inputs: Any) -> tuple:
    rows, vjp, underflowed = jax.vjp(partial(fast, visibility), inputs, has_aux=True)
    rows = _if_any(
        underflowed, _replace_rows, rows, exact, underflowed, visibility, inputs
    )
    return batched_alike(rows), (vjp, underflowed, visibility, inputs)


def _backward(fast: Callable, exact: Callable, saved: tuple, cotangent: Any) -> tuple:
    vjp, underflowed, visibility, inputs = saved
    zeros = jax.tree.map(jnp.zeros_like, cotangent)
    (gradient,) = vjp(_select_rows(underflowed, zeros, cotangent))
    cotangent = _select_rows(underflowed, cotangent, zeros)
    return None, _if_any(
        underflowed, _add_gradient, gradient, exact, visibility, inputs, cotangent
    )


recompute_underflow.defvjp(_forward, _backward)


def _if_any(
    underflowed: Array, function: Callable, result: Any, exact, *inputs: Any
) -> Any:
    """Return function(exact, result, …) if a row underflowed, else the result."""
    with jax.named_scope(RARE):
        form = partial(function, exact)
        return jax.lax.cond(underflowed.any(), form, lambda *x: x[0], result, *inputs)


def _replace_rows(
    exact: Callable, rows: Any, underflowed: Array, visibility: Any, inputs: Any
) -> Any:
    return _select_rows(underflowed, exact(visibility, inputs), rows)


def _add_gradient(
    exact: Callable, gradient: Any, visibility: Any, inputs: Any, cotangent: Any
) -> Any:
    _, vjp = jax.vjp(partial(exact, visibility), inputs)
    return jax.tree.map(jnp.add, gradient, vjp(cotangent)[0])


def _select_rows(underflowed: Bool[Array, "*rows"], chosen: Any, others: Any) -> Any:
    """Return the rows of `chosen` that underflowed, and the other rows of `others`."""

    def select(chosen: Array, others: Array) -> Array:
        rows = jnp.expand_dims(underflowed, tuple(range(underflowed.ndim, others.ndim)))
        return where(rows, chosen, others)

    return jax.tree.map(select, chosen, others)


def exact_rows(
    read: Callable[..., Any],
    running_max: Float[Array, "B K M"],
    query: LogFeatures,
    key: LogFeatures,
    value: Float[Array, "B K T V"],
    pairs: Bool[Array, "B T S"],
    reaches: Bool[Array, "B T"] | None,
) -> Any:
    """Return the rows [B K G T …] of a chunk, each with its own maximum.

    Time O(T² M) without matrix products. A loop over keys bounds the memory.

    Args:
        read: (weights for the state, shift, weights of pairs, values) → rows.
        running_max: the largest exponents of the keys in the state before the chunk.
        query, key: features [B K G T M] and [B K T M].
        pairs: the keys that a row sees.
        reaches: the rows that see the state; None: all.
    """
    row = query.times_exp(running_max[:, :, None, None])
    if reaches is not None:
        row = row.where(reaches[:, None, None])
    keys = jax.tree.map(lambda x: jnp.moveaxis(x[:, :, None, None], 4, 0), key)
    by_key = keys, jnp.moveaxis(pairs[:, None, None], 4, 0)

    def exponents(key_and_pairs: tuple[LogFeatures, Array]) -> LogFeatures:
        """Return log φ(q)·φ(k) by feature, of all queries q and one key k."""
        key, seen = key_and_pairs
        return query.times_exp(key.exponent).where(seen)

    def highest(key_and_pairs: tuple[LogFeatures, Array]) -> Float[Array, "B K G T 1"]:
        return exponents(key_and_pairs).exponent.max(axis=-1, keepdims=True)

    @jax.checkpoint
    def weights(key_and_pairs: tuple[LogFeatures, Array]) -> Float[Array, "B K G T"]:
        products = exponents(key_and_pairs).times_exp(-shift).weights()
        if key.amplitude is not None:
            products = products * key_and_pairs[0].amplitude
        return products.sum(axis=-1)

    shift = jnp.maximum(
        jax.lax.map(highest, by_key).max(axis=0),
        row.exponent.max(axis=-1, keepdims=True),
    )
    shift = finite(jax.lax.stop_gradient(shift))
    scores = jnp.moveaxis(jax.lax.map(weights, by_key), 0, -1)
    return read(row.times_exp(-shift).weights(), shift[..., 0], scores, value)
