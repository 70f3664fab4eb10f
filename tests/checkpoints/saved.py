"""Small checkpoints for tests: trees, and how to save, read and damage them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from symjax.checkpoints.checkpoint import Checkpoints

ITEMS = ("params", "constants", "optimizer")


def mesh(rows, columns):
    devices = jax.devices()[: rows * columns]
    axis_types = (AxisType.Auto,) * 2
    return jax.make_mesh((rows, columns), ("a", "b"), axis_types, devices=devices)


def sharding(shape, leaf):
    """Shard over all devices along the first axis whose length is a multiple of 8."""
    axes = []
    for size in leaf.shape:
        axes.append(("a", "b") if size and size % 8 == 0 and not any(axes) else None)
    return NamedSharding(mesh(*shape), PartitionSpec(*axes))


def abstract(trees, shape=(4, 2)):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding(shape, leaf)
        ),
        trees,
    )


def make(step, shape=(4, 2)):
    """Return trees that differ at every step, with every kind of leaf."""
    key = jax.random.key(step)
    params = {
        "embed": {"embedding": jax.random.normal(key, (40, 24))},
        "blocks": {
            0: {"kernel": jax.random.normal(key, (24, 16)), "lambda_1": jnp.ones(5)},
            1: {"kernel": jax.random.normal(key, (7, 3)), "empty": jnp.zeros((0, 8))},
        },
    }
    constants = {
        "half": jax.random.normal(key, (8, 2), jnp.bfloat16),
        "count": jnp.int32(step),
        "mask": jnp.arange(9) % (step + 2) == 0,
        "bits": jax.random.bits(key, (3, 8)),
    }
    transform = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            optax.linear_schedule(1.0, 0.0, 9), mask={"embed": True, "blocks": False}
        ),
    )
    moments = transform.init(params)
    trees = {"params": params, "constants": constants, "optimizer": moments}
    moved = jax.tree.map(lambda leaf: leaf + leaf.dtype.type(step), trees["optimizer"])
    trees = {**trees, "optimizer": moved}
    return jax.tree.map(lambda x: jax.device_put(x, sharding(shape, x)), trees)


def assert_bitwise(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def save(directory, *steps, keep=9):
    with Checkpoints(directory, keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, make(step), {"config": {"seed": step}})


def restore(directory, items=ITEMS, step=None):
    """Restore a checkpoint that is opened for reading: (trees, meta, warnings)."""
    lines: list[str] = []
    wanted = {item: tree for item, tree in abstract(make(1)).items() if item in items}
    trees, meta = Checkpoints(directory).restore(wanted, step, warn=lines.append)
    return trees, meta, lines


def flip(path, place=0.5):
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 16
    path.write_bytes(content)


def few(step):
    """Return one small tree per item, so that restoring takes no time."""
    key = jax.random.key(step)
    return {
        "params": {"kernel": jax.random.normal(key, (40, 30)), "bias": jnp.ones(3)},
        "constants": {"projection": jax.random.normal(key, (4, 4))},
        "optimizer": {"count": jnp.int32(step)},
    }
