"""Models on a mesh that are called directly, without a training step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from symjax import config
from symjax.models.build import build
from symjax.training.sharding import make_mesh

MODEL = {"vocabulary": 11, "width": 16, "depth": 1, "heads": 4, "length": 8}


def called(mesh, batch, *, jit=True, **changes):
    count = mesh.data * mesh.fsdp * mesh.tensor * mesh.sequence
    model = build(config.Model(**MODEL | changes), rngs=nnx.Rngs(0))
    tokens = jnp.zeros((batch, 8), jnp.int32)
    call = nnx.jit(lambda model, tokens: model(tokens)) if jit else type(model).__call__
    with jax.set_mesh(make_mesh(mesh, jax.devices()[:count])):
        return call(model, tokens)


@pytest.mark.parametrize(
    ("mesh", "batch", "changes", "said"),
    [
        ({"fsdp": 2}, 3, {}, "3 examples do not divide over mesh data 1 × fsdp 2"),
        (
            {"fsdp": 2},
            3,
            {"attention": config.Attention(mechanism="gau")},
            "3 examples do not divide over mesh data 1 × fsdp 2",
        ),
        (
            {"tensor": 4},
            4,
            {"kv_heads": 2},
            r"key \(4, 8, 2, 4\): 2 key/value heads do not divide over mesh tensor 4",
        ),
        (
            {"tensor": 4},
            4,
            {"kv_heads": 2, "attention": config.Attention(mechanism="delta")},
            "2 key/value heads do not divide over mesh tensor 4",
        ),
        ({"tensor": 3}, 3, {}, "4 heads do not divide over mesh tensor 3"),
    ],
    ids=str,
)
def test_examples_and_heads_that_do_not_divide_are_named(mesh, batch, changes, said):
    with pytest.raises(ValueError, match=said):
        called(config.Mesh(**{"data": 1} | mesh), batch, **changes)


def test_one_example_or_head_is_on_all_devices():
    alone = np.asarray(called(config.Mesh(data=1), 1))
    shared = called(config.Mesh(data=1, fsdp=2), 1)
    np.testing.assert_allclose(shared, alone, atol=1e-6)


def test_an_array_of_one_device_is_refused_outside_jit_by_a_mesh_of_several():
    with pytest.raises(ValueError, match="mesh data 1 × fsdp 2 .* inside jax.jit"):
        called(config.Mesh(data=1, fsdp=2), 2, jit=False)
    assert called(config.Mesh(data=1), 2, jit=False).shape == (2, 8, 11)
