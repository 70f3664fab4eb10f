"""NVIDIA GPUs for tests: a simulated one, and one to compile for."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted import B, K, N
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from symjax.attention.core import devices
from symjax.attention.core.operands import Tokens
from symjax.estimate import targets


def on(capability, monkeypatch):
    device = SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(devices, "backend", lambda: "gpu")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def served(kernel, parameters=None, *, size=64, width=64, length=128, dtype=None):
    """Return whether a kernel takes arrays of these sizes, in bfloat16 by default."""
    heads = (N, size), (K, size), (K, width)
    like = [jax.ShapeDtypeStruct((B, length, *x), dtype or jnp.bfloat16) for x in heads]
    return kernel.refusal(Tokens(*like), parameters) is None


def compiled_for_an_h200(attend, *heads, dtypes=(), check_vma=True):
    """Compile the gradients of the sum of `attend` for an H200.

    Arrays are [1 300 heads size], in bfloat16 or the given dtypes. `check_vma` is that
    of `jax.shard_map`.
    """
    pytest.importorskip("jax_cuda13_plugin", reason="needs jax's CUDA plugin")
    mesh = Mesh(np.array(targets.find("h200-1").devices), ("x",))

    def loss(*given):
        return attend(*given).astype(jnp.float32).sum()

    def split(*given):
        call = jax.grad(loss, tuple(range(len(given))))
        specs = {"in_specs": P("x"), "out_specs": P("x"), "check_vma": check_vma}
        return jax.shard_map(call, mesh=mesh, **specs)(*given)

    sharding = NamedSharding(mesh, P("x"))
    given = [
        jax.ShapeDtypeStruct((1, 300, *x), dtype, sharding=sharding)
        for x, dtype in zip(heads, dtypes or [jnp.bfloat16] * len(heads), strict=True)
    ]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(split).trace(*given).lower().compile()
