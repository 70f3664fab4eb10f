"""Checksums: every flipped bit and every swap changes them, and no mesh does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from symjax.checkpoints.checksum import checksums

NARROW = ("bool", "int8", "uint16", "int32", "uint32", "bfloat16", "float16", "float32")
WIDE = ("int64", "float64")


def draw(name, shape=(3, 5)):
    """Draw random bits as an array on the device (a bool has one bit)."""
    rng = np.random.default_rng(0)
    if name == "bool":
        return jnp.asarray(rng.random(shape) < 0.5)
    kind = jnp.dtype(name)
    count = int(np.prod(shape)) * kind.itemsize
    return jnp.asarray(np.frombuffer(rng.bytes(count), kind).reshape(shape))


def flipped(array, bit):
    """Return the array with one bit of its memory changed."""
    memory = bytearray(np.asarray(array).tobytes())
    memory[bit // 8] ^= 1 << bit % 8
    return jnp.asarray(np.frombuffer(memory, array.dtype).reshape(array.shape))


def check_flips_and_swaps(name):
    array = draw(name)
    (whole,) = checksums([array])
    assert 0 <= whole < 2**32
    step = 8 if name == "bool" else 1
    altered = [flipped(array, bit) for bit in range(0, 8 * array.nbytes, step)]
    flat = np.asarray(array).reshape(-1)
    for left in range(flat.size):
        for right in range(left):
            if flat[left].tobytes() != flat[right].tobytes():
                other = flat.copy()
                other[[left, right]] = other[[right, left]]
                altered.append(jnp.asarray(other.reshape(array.shape)))
    assert whole not in checksums(altered)


@pytest.mark.parametrize("name", NARROW)
def test_every_flipped_bit_and_every_swap_shows(name):
    check_flips_and_swaps(name)


@pytest.mark.parametrize("name", WIDE)
def test_every_flipped_bit_and_every_swap_of_wide_types_shows(name, x64):
    check_flips_and_swaps(name)


def test_complex_numbers_show_their_imaginary_part():
    array = jnp.array([1 + 2j, 3 + 4j])
    assert checksums([array]) != checksums([array.conj()])


def test_swaps_of_round_numbers_show():
    """Powers of two at distances that are powers of two: a weighted sum would miss
    it."""
    array = np.zeros(4096, np.float32)
    array[0], array[2048] = 1.0, 2.0
    other = array.copy()
    other[0], other[2048] = 2.0, 1.0
    one, two = checksums([jnp.asarray(array), jnp.asarray(other)])
    assert one != two


def test_a_transposed_and_a_shifted_array_show():
    array = jax.random.normal(jax.random.key(0), (6, 6))
    others = [array, array.T, jnp.roll(array, 1, 0), jnp.roll(array, 1, 1), -array]
    assert len(set(checksums(others))) == len(others)


def test_rows_of_zeros_count():
    assert len(set(checksums([jnp.zeros(n) for n in range(1, 9)]))) == 8


def test_scalars_and_arrays_without_elements_have_checksums():
    one, other, empty = checksums(
        [jnp.float32(1), jnp.float32(2), jnp.zeros((0, 3), jnp.bfloat16)]
    )
    assert one != other
    assert empty == 0
    assert checksums([]) == []


@pytest.mark.parametrize("shape", [(8, 1), (4, 2), (2, 4), (1, 8)])
@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a"), (("a", "b"), None), ()])
def test_the_mesh_changes_nothing(shape, axes):
    array = jax.random.normal(jax.random.key(0), (16, 24))
    mesh = jax.make_mesh(shape, ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    placed = jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))
    assert checksums([placed]) == checksums([array])
