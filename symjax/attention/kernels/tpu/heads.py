"""TPU kernels that rotate or normalise heads without a change of layout.

Heads [B T N H] whose size H is a multiple of 128 are read as [B T N·H], the layout in
which products with weights write them and kernels of attention read them. For a
rotation or a norm of [B T N H] XLA chooses another layout, and copies the array before
and after it. Each kernel here reads and writes every number once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from symjax.attention.kernels.operands import result
from symjax.attention.kernels.tpu import tiles

BLOCKS = (2048, 1024, 512, 256, 128)  # tokens of a block, the preferred number first
LARGEST = 2**19  # most numbers in a block of more than 128 tokens
ROWS = 256  # most tokens that are computed at once


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def turn(
    distance: int,
    interpret: Any,
    x: Float[Array, "B T N H"],
    same: Float[Array, "#B T H"],
    other: Float[Array, "#B T H"],
) -> Float[Array, "B T N H"]:
    """Return x · same + partner · other; partners are the two features of a pair.

    Args:
        distance: between the two features of a pair: 1 or H/2.
        same, other: factors in float32, for all heads. In `other` one feature of a pair
            has minus the factor of its partner, as in a rotation.
    """
    size, batch = x.shape[3], same.shape[0]

    def head(b, t, n):
        return b, n, t

    def token(b, t, n):
        return b * (batch > 1), 0, t

    block = _block(x)
    heads, factors = (tiles.head_blocks(size, block, y) for y in (head, token))
    flat = jax.lax.collapse(x, 2)
    turned = pl.pallas_call(
        partial(_turn, distance),
        out_shape=result(x, flat.shape, x.dtype),
        grid=(x.shape[0], x.shape[1] // block, x.shape[2]),
        in_specs=[heads, factors, factors],
        out_specs=heads,
        compiler_params=tiles.compiler(3),
        cost_estimate=tiles.estimate(0, 0, [x, x, same, other]),
        interpret=interpret,
        name="heads_turn",
    )(flat, same, other)
    return turned.reshape(x.shape)


def _turn(distance: int, x, same, other, turned) -> None:
    roll = partial(pltpu.roll, axis=1)

    def rows(at: Any) -> None:
        wide = x[at, :].astype(jnp.float32)
        found = wide * same[at, :] + _partners(distance, wide, roll) * other[at, :]
        turned[at, :] = found.astype(turned.dtype)

    _by_rows(rows, x.shape[0])


def _by_rows(compute: Callable, length: int) -> None:
    """Call compute(slice) for the rows of a block, at most `ROWS` at a time."""
    count = min(ROWS, length)

    def step(i: Array, _: None) -> None:
        compute(pl.ds(i * count, count))

    jax.lax.fori_loop(0, length // count, step, None)


def _partners(distance: int, x: Array, roll: Callable) -> Array:
    """Return the partner of each feature."""
    size = x.shape[-1]
    if 2 * distance == size:
        return roll(x, distance)
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    first = lane // distance % 2 == 0
    return jnp.where(first, roll(x, size - distance), roll(x, distance))


def _turn_forward(distance: int, interpret: Any, x: Any, same: Any, other: Any):
    learned = same.perturbed or other.perturbed
    x, same, other = (y.value for y in (x, same, other))
    kept = same, other, x if learned else None
    return turn(distance, interpret, x, same, other), kept


def _turn_backward(distance: int, interpret: Any, kept: tuple, change: Any) -> tuple:
    same, other, x = kept
    if isinstance(change, jax.custom_derivatives.SymbolicZero):
        like = cast(Any, change)
        change = jnp.zeros(like.shape, like.dtype)
    turned = turn(distance, interpret, change, same, -other)
    if x is None:
        return turned, jnp.zeros_like(same), jnp.zeros_like(other)
    wide, change = (y.astype(jnp.float32) for y in (x, change))
    batch = (0,) if same.shape[0] == 1 else ()
    changes = (
        (change * y).sum(axis=(*batch, 2), keepdims=True)[:, :, 0]
        for y in (wide, _partners(distance, wide, partial(jnp.roll, axis=-1)))
    )
    return turned, *changes


turn.defvjp(_turn_forward, _turn_backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def norm(
    epsilon: float,
    interpret: Any,
    x: Float[Array, "B T N H"],
    scale: Float[Array, " H"],
) -> Float[Array, "B T N H"]:
    """Return x / √(mean of squares + epsilon) · scale for each head, as x.dtype."""
    call = partial(_norm, epsilon)
    (normed,) = _call_norm(call, interpret, "heads_norm", [x], scale)
    return normed


def _norm(epsilon: float, x, scale, normed) -> None:
    def rows(at: Any) -> None:
        wide = x[at, :].astype(jnp.float32)
        found = wide * _inverse(epsilon, wide) * scale[...]
        normed[at, :] = found.astype(normed.dtype)

    _by_rows(rows, x.shape[0])


def _inverse(epsilon: float, x: Float[Array, "r H"]) -> Float[Array, "r 1"]:
    squares = (x * x).sum(axis=1, keepdims=True) * (1 / x.shape[1])
    return jax.lax.rsqrt(squares + epsilon)


def _norm_forward(epsilon: float, interpret: Any, x: Array, scale: Array) -> tuple:
    return norm(epsilon, interpret, x, scale), (x, scale)


def _norm_backward(epsilon: float, interpret: Any, kept: tuple, change: Array) -> tuple:
    x, scale = kept
    call = partial(_norm_gradient, epsilon)
    found, sums = _call_norm(
        call, interpret, "heads_norm_backward", [x, change], scale, with_sums=True
    )
    return found, sums.sum(axis=(0, 1, 2)).astype(scale.dtype)


def _norm_gradient(epsilon: float, x, change, scale, found, sums) -> None:
    """Compute the gradient of x, and that of the scale as 8 partial sums per feature.

    With d = √(mean of squares + epsilon), u = x / d and g = change · scale, the
    gradient of x is (g − u mean(u g)) / d.
    """

    @pl.when(pl.program_id(2) == 0)
    def _():
        sums[...] = jnp.zeros_like(sums)

    def rows(at: Any) -> None:
        wide, wide_change = (y[at, :].astype(jnp.float32) for y in (x, change))
        inverse = _inverse(epsilon, wide)
        unit = wide * inverse
        product = unit * wide_change
        sums[...] += product.reshape(-1, 8, unit.shape[1]).sum(axis=0)
        along = (product * scale[...]).sum(axis=1, keepdims=True) / unit.shape[1]
        turned = (wide_change * scale[...] - unit * along) * inverse
        found[at, :] = turned.astype(found.dtype)

    _by_rows(rows, x.shape[0])


def _call_norm(
    kernel: Any,
    interpret: Any,
    name: str,
    arrays: list[Float[Array, "B T N H"]],
    scale: Float[Array, " H"],
    with_sums: bool = False,
) -> list[Array]:
    """Return the heads [B T N H] that a kernel computes, block by block.

    If `with_sums`, the list also has the kernel's sums over tokens [B N 8 H].
    """
    x = arrays[0]
    batch, length, heads, size = x.shape
    block = _block(x)
    spec = tiles.head_blocks(size, block, lambda b, n, t: (b, n, t))
    flat = [jax.lax.collapse(y, 2) for y in arrays]
    row = scale.astype(jnp.float32)[None]
    shapes, specs = [result(x, flat[0].shape, x.dtype)], [spec]
    if with_sums:
        shapes.append(result(x, (batch, heads, 8, size), jnp.float32))
        specs.append(pl.BlockSpec((None, None, 8, size), lambda b, n, t: (b, n, 0, 0)))
    found, *sums = pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid=(batch, heads, length // block),
        in_specs=[*[spec] * len(flat), pl.BlockSpec((1, size), lambda b, n, t: (0, 0))],
        out_specs=specs,
        compiler_params=tiles.compiler(2, 1),
        cost_estimate=tiles.estimate(0, x.size // size, [arrays, shapes]),
        interpret=interpret,
        name=name,
    )(*flat, row)
    return [found.reshape(x.shape), *sums]


norm.defvjp(_norm_forward, _norm_backward)


def _block(x: Float[Array, "B T N H"]) -> int:
    """Return the number of tokens of a block, a divisor of T."""
    fit = (
        size for size in BLOCKS if size * x.shape[3] <= LARGEST or size == BLOCKS[-1]
    )
    return next(size for size in fit if x.shape[1] % size == 0)
