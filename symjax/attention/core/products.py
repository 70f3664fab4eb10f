"""Products of matrices with the precision that a mechanism needs."""

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
    """`jnp.einsum`; on a CPU with B and K as one axis, and G and T, where they are side
    by side and no mesh may split them. It stands inside `on_any_mesh`.

    XLA's compiler for CPUs transposes the operands of products with two batch axes, and
    computes once more what these are made of.

    Args:
        cuda: how NVIDIA GPUs multiply, where not by `precision`.
    """
    plain = partial(jnp.einsum, spec, precision=precision)
    forms = {}
    if merged := _merged(precision, spec, arrays):
        forms["cpu"] = merged
    if cuda is not None:
        forms["cuda"] = partial(_apart, spec, cuda)
    if not forms:
        return plain(*arrays)
    return by_platform(*arrays, **forms, default=plain)


def _apart(spec: str, precision: jax.lax.DotAlgorithmPreset, *arrays: Array) -> Array:
    """XLA would make one of two products with one operand in common, and has no code
    for some sizes of it."""
    apart = map(jax.lax.optimization_barrier, arrays)
    return jnp.einsum(spec, *apart, precision=precision)


def _merged(
    precision: jax.lax.Precision, spec: str, arrays: tuple[Array, ...]
) -> Callable | None:
    """The same product with pairs of axes as one, where it has such pairs."""
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
    if any(sizes[c] != n for c, n in every):  # one of them is broadcast
        return None

    def merged(*arrays: Array) -> Array:
        short, both = spec, dict(sizes)
        for one, two in pairs:
            short = short.replace(one + two, one)
            both[one] *= sizes[two]
        operands = [
            x.reshape([both[c] for c in name])
            for x, name in zip(arrays, re.split(",|->", short), strict=False)
        ]
        found = jnp.einsum(short, *operands, precision=precision)
        return found.reshape([sizes[c] for c in output])

    return merged


einsum = partial(_einsum, jax.lax.Precision.HIGHEST)


on_tensor_cores = partial(_einsum, jax.lax.Precision.HIGH)


in_six_passes = partial(einsum, cuda=jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6)


TILE = 128  # accelerators multiply by tiles of so many rows


def sum_dtype(*arrays: Array) -> Any:
    """The dtype of sums over time: that of the arrays, float32 at least."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def products(*arrays: Array, cancel: bool = False) -> Callable[..., Array]:
    """`einsum` of float32 sums, as exact as what they are sums of.

    Where all arrays have 16 bits that is three passes on TPUs and TF32 on GPUs, whose
    tensor cores do not multiply in full precision.

    Args:
        cancel: what is multiplied cancels: then as `einsum`, on NVIDIA GPUs by the six
            passes of bfloat16 parts that full precision is on TPUs.
    """
    if jnp.result_type(*arrays).itemsize > 2:
        return einsum
    return in_six_passes if cancel else on_tensor_cores
