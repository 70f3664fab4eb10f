"""Checksums of arrays, computed on the devices and equal on every mesh."""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def checksums(arrays: list[jax.Array]) -> list[int]:
    """Return a number below 2³² for each array, from its bits and their positions.

    It is Σ mix(word + mix(position)) modulo 2³² over the 32-bit words of the array.
    Narrower elements are widened, and a float64 is two words. `mix` is a bijection, so
    a change within one word always changes the sum. Any other change, swapped elements
    too, leaves the sum unchanged with probability 2⁻³². The order of integer additions
    does not matter, so the sum is equal on every mesh and nothing is gathered.

    Each array is read once (454 MB in 65 ms on two CPU cores). There is one compiled
    program for each shape: a single program for a tree of 648 arrays took ten times as
    long to compile. The function waits for the arrays, so the caller may donate them
    afterwards. It takes one array after another, since several sums over processes at
    once can deadlock on CPUs.
    """
    return [int(_checksum(array)) for array in arrays]


def checksum_of(tree: Any) -> str:
    """Return a checksum of all arrays of a tree in their order: eight hex digits."""
    return f"{zlib.crc32(str(checksums(jax.tree.leaves(tree))).encode()):08x}"


@jax.jit
def _checksum(array: jax.Array) -> jax.Array:
    words = _words(array)
    position = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(words.ndim)):
        index = lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        position += index * np.uint32(stride % 2**32)
        stride *= words.shape[axis]
    return jnp.sum(
        _mix(words + _mix(position + np.uint32(0x9E3779B9))), dtype=jnp.uint32
    )


def _words(array: jax.Array) -> jax.Array:
    """Return the bits of every element as one uint32, or as two in a new last axis."""
    if jnp.iscomplexobj(array):
        array = jnp.stack([array.real, array.imag], axis=-1)
    if array.dtype == jnp.bool:
        array = array.astype(jnp.uint8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32)
    return lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)


def _mix(word: jax.Array) -> jax.Array:
    """Apply the finaliser of MurmurHash3, a bijection that mixes all bits."""
    word = (word ^ (word >> 16)) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * np.uint32(0xC2B2AE35)
    return word ^ (word >> 16)
