"""Rows that are exact at any scale, where those of a chunk left float32.

A chunk whose factors all refer to its highest exponent is one matrix product, and loses
rows where a later key is e⁴⁶ times larger than all that they see. Here each row refers
to its own running maximum. Pairs are split as in a merge sort: at each level the second
half of a block looks at the first half, through the running maximum at the boundary.
Keys of the first half lie below it, and it lies below the maxima of the second half:
all factors are at most 1. log₂ T levels, each at the cost of the chunk itself.

Only features with exponents come here, and only if a row was lost.

How rows read a state of features that cancel: around the mean of the values.

A state holds features in float32: what it adds to a row is off by about ε|φ(q)|Σ|φ(k)|,
with ε = 2⁻²³, in numerator and denominator alike.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.devices import backend, on_one_device
from symjax.attention.core.feature_maps import LogFeatures, finite, row_shift
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
    """Rows by quick(shown, given) → (rows, lost), and in place of lost ones those of
    exactly(shown, given).

    The others stay as they are, so that no example depends on what another one needed.
    The gradient, of `given` alone, is one branch or the other as a whole. That of a
    branch between two kinds of rows would fill arrays with zeros where nothing was
    lost: a fifth of a small chunk's time on a CPU.
    """
    return batched_alike(_if_lost(exactly, *quick(shown, given), shown, given))


def _forward(quick: Callable, exactly: Callable, shown: Any, given: Any) -> tuple:
    rows, pull, lost = jax.vjp(partial(quick, shown), given, has_aux=True)
    saved = pull, lost, shown, given
    return batched_alike(_if_lost(exactly, rows, lost, shown, given)), saved


def _backward(quick: Callable, exactly: Callable, saved: tuple, change: Any) -> tuple:
    pull, lost, shown, given = saved

    def exact(change: Any) -> Any:
        nothing = jax.tree.map(jnp.zeros_like, change)
        form = partial(_in_place, exactly, nothing, lost, shown)
        (one,) = jax.vjp(form, given)[1](change)
        (two,) = pull(_where(lost, nothing, change))
        return (jax.tree.map(jnp.add, one, two),)

    with jax.named_scope(RARE):
        return None, *jax.lax.cond(lost.any(), exact, pull, change)


rescued.defvjp(_forward, _backward)


def _if_lost(exactly: Callable, rows: Any, lost: Array, shown: Any, given: Any) -> Any:
    form = partial(_in_place, exactly)
    with jax.named_scope(RARE):
        return jax.lax.cond(lost.any(), form, lambda *x: x[0], rows, lost, shown, given)


def _in_place(exactly: Callable, rows: Any, lost: Array, shown: Any, given: Any) -> Any:
    """Exact rows in place of the lost ones. On a CPU of its own, in little memory: of
    one example after the other, and of those alone that lost rows."""
    if backend() != "cpu" or not on_one_device():
        return _where(lost, exactly(shown, given), rows)

    @jax.checkpoint
    def one(now: tuple) -> Any:
        rows, lost, shown, given = jax.tree.map(lambda x: x[None], now)
        rows = jax.lax.cond(
            lost.any(), lambda: _where(lost, exactly(shown, given), rows), lambda: rows
        )
        return jax.tree.map(lambda x: x[0], rows)

    return jax.lax.map(one, (rows, lost, shown, given))


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
    segment: Int[Array, "B T"] | None,
) -> Any:
    """The rows [B K G T …] of a chunk.

    Args:
        read: (weights for the state, shift, weights of pairs, values) → rows.
        running_max: of the state before the chunk.
        query, key: features [B K G T M] and [B K T M].
        segment: numbers the segments; None: the chunk is one.
    """
    length, constant = key.exponent.shape[2], jax.lax.stop_gradient(key.exponent)
    first = jnp.maximum(constant[:, :, :1], running_max[:, :, None])
    running = jnp.concatenate([first, constant[:, :, 1:]], axis=2)
    running = _running_max(running, segment)  # the state counts in its own segment
    shift = row_shift(query.raised(running[:, :, None]))
    query = query.raised(-shift)
    row = query.raised(running_max[:, :, None, None])
    if segment is not None:
        row = row.where((segment == segment[:, :1])[:, None, None])

    @jax.checkpoint
    def level(scores: Array, half: Array) -> tuple[Array, None]:
        """Between the second half and the first of every block of 2·half rows."""
        time = jnp.arange(length)
        block, second = time // (2 * half), (time // half) % 2 == 1
        last = jnp.minimum(block * 2 * half + half - 1, length - 1)  # of the first half
        boundary = running[:, :, last]
        near, far = second[None], ~second[None]
        if segment is not None:
            same = segment == segment[:, last]
            near, far = near & same, far & same
        earlier = key.raised(-finite(boundary)).where(far[:, None])
        later = query.raised(boundary[:, :, None]).where(near[:, None, None])
        pairs = exact_product("bkgtm,bksm->bkgts", later.weights(), earlier.weights())
        inside = (block[:, None] == block[None, :])[None, None, None]
        return scores + pairs * inside.astype(pairs.dtype), None

    own = query.raised(key.exponent[:, :, None]).weights()
    if key.amplitude is not None:
        own = own * key.amplitude[:, :, None]
    oneself = jnp.eye(length, dtype=own.dtype)[None, None, None]
    halves = 2 ** jnp.arange(max(length - 1, 0).bit_length())
    scores, _ = jax.lax.scan(level, own.sum(axis=-1)[..., None] * oneself, halves)
    return read(row.weights(), shift[..., 0], scores, value)


def _running_max(exponent: Array, segment: Array | None) -> Float[Array, "B K T M"]:
    """Running maximum along time that starts anew with each segment [B T]."""
    if segment is None:
        return jax.lax.cummax(exponent, axis=2)

    def latest(one: tuple, two: tuple) -> tuple:
        """Of two stretches of time, by the last segment of each."""
        highest = jnp.where(one[1] == two[1], jnp.maximum(one[0], two[0]), two[0])
        return highest, two[1]

    numbered = exponent, segment[:, None, :, None]
    return jax.lax.associative_scan(latest, numbered, axis=2)[0]


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
