"""Products of matrices with the precision that a mechanism needs.

`products(*arrays)` returns an einsum that is as precise as the dtypes of the arrays.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from symjax.attention.core.devices import by_platform, split_by_xla


def _einsum(
    precision: jax.lax.Precision,
    spec: str,
    *arrays: Array,
    cuda: jax.lax.DotAlgorithmPreset | None = None,
) -> Array:
    """Return `jnp.einsum(spec, *arrays)`.

    On a CPU the axes b and k of `spec` are merged into one, and so are g and t: with
    two batch axes XLA's compiler for CPUs transposes and recomputes the operands. Two
    axes are merged if they are adjacent in every term that has one of them, no axis is
    broadcast, and XLA may not split arrays over devices. Call this function inside
    `on_any_mesh`.

    Args:
        cuda: algorithm on NVIDIA GPUs, in place of `precision`.
    """
    plain = partial(jnp.einsum, spec, precision=precision)
    forms = {}
    if merged := _merged(precision, spec, arrays):
        forms["cpu"] = merged
    if cuda is not None:
        forms["cuda"] = partial(_separate_einsum, spec, cuda)
    if not forms:
        return plain(*arrays)
    return by_platform(*arrays, **forms, default=plain)


def _separate_einsum(
    spec: str, precision: jax.lax.DotAlgorithmPreset, *arrays: Array
) -> Array:
    """Return a product that XLA does not combine with another one.

    XLA for GPUs would combine two products with a common operand into one, and fails
    for some sizes of the result.
    """
    separate = map(jax.lax.optimization_barrier, arrays)
    return jnp.einsum(spec, *separate, precision=precision)


def _merged(
    precision: jax.lax.Precision, spec: str, arrays: tuple[Array, ...]
) -> Callable | None:
    """Return the einsum with b and k, or g and t, as one axis; None if impossible."""
    *names, output = terms = re.split(",|->", spec)
    pairs = [
        pair
        for pair in ("bk", "gt")
        if pair in spec and all(pair in x or not {*pair} & {*x} for x in terms)
    ]
    if not pairs or split_by_xla():
        return None
    shapes = [n for x in arrays for n in x.shape]
    every = list(zip("".join(names), shapes, strict=True))
    sizes = dict(every)
    if any(sizes[c] != n for c, n in every):  # an axis is broadcast
        return None

    def merged(*arrays: Array) -> Array:
        short, merged_sizes = spec, dict(sizes)
        for one, two in pairs:
            short = short.replace(one + two, one)
            merged_sizes[one] *= sizes[two]
        operands = [
            x.reshape([merged_sizes[c] for c in name])
            for x, name in zip(arrays, re.split(",|->", short), strict=False)
        ]
        result = jnp.einsum(short, *operands, precision=precision)
        return result.reshape([sizes[c] for c in output])

    return merged


# Full float32 precision.
einsum = partial(_einsum, jax.lax.Precision.HIGHEST)

# Three bfloat16 passes on TPUs, TF32 on GPUs.
in_three_passes = partial(_einsum, jax.lax.Precision.HIGH)

# Six bfloat16 passes on TPUs and on NVIDIA GPUs.
in_six_passes = partial(einsum, cuda=jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6)


def squared_length(x: Array) -> Array:
    """Return |x|² [… 1]. The einsum is faster on a CPU than a sum of squares."""
    return einsum("...h,...h->...", x, x)[..., None]


TILE = 128  # rows of a tile in the matrix products of accelerators


def sum_dtype(*arrays: Array) -> Any:
    """Return the dtype of sums over time: that of the arrays, float32 at least."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def over(x: Array, divisor: Array) -> Array:
    """Return x / divisor, and 0 where the divisor is 0, with finite gradients."""
    return jnp.where(divisor == 0, 0, x / jnp.where(divisor == 0, 1, divisor))


def over_root(x: Array, square: Array) -> Array:
    """Return x / √square, and 0 where square is not above 0, with finite gradients."""
    root = jax.lax.rsqrt(jnp.where(square > 0, square, 1))
    return jnp.where(square > 0, x * root, 0)


def products(*arrays: Array, cancel: bool = False) -> Callable[..., Array]:
    """Return an einsum with float32 sums that is as precise as the arrays.

    For arrays of more than 16 bits the result is `einsum`, in full precision. For
    arrays of 16 bits it is faster: three bfloat16 passes on TPUs, and TF32 on GPUs,
    whose tensor cores do not multiply in full precision.

    Args:
        cancel: sums of the products will cancel. Then 16-bit arrays also have full
            precision; NVIDIA GPUs reach it in six bfloat16 passes, as TPUs do.
    """
    if jnp.result_type(*arrays).itemsize > 2:
        return einsum
    return in_six_passes if cancel else in_three_passes
