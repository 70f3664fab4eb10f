"""TPU kernels that rotate and normalise heads, interpreted on a CPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from interpreted import STRICT
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from symjax import attention
from symjax.attention.kernels.dispatch import run_heads
from symjax.attention.kernels.tpu import heads
from symjax.attention.scores import rotation
from symjax.layers import norms

B, T, N = 2, 384, 2  # three blocks of tokens
EXACT = {jnp.float32: 3e-6, jnp.bfloat16: 2.0**-7}


@pytest.fixture
def on_kernels(monkeypatch):
    """Run the kernels where a TPU would run them."""

    def run(name, static, fallback, x, *arrays):
        return getattr(heads, name)(static, STRICT, x, *arrays)

    for module in (rotation, norms):
        monkeypatch.setattr(module, "run_heads", run)


def drawn(size, dtype, count):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(B, T, N, size)), dtype) for _ in range(count)]


def close(found, wanted, dtype):
    scale = np.abs(np.asarray(wanted, np.float64)).max()
    found = np.asarray(found, np.float64)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=EXACT[dtype] * scale)


@pytest.mark.parametrize(
    "size, interleaved, dtype",
    [(256, False, jnp.float32), (128, True, jnp.bfloat16)],
)
def test_heads_turn_by_their_positions_and_gradients_turn_back(
    size, interleaved, dtype, on_kernels
):
    x, change = drawn(size, dtype, 2)
    # Small ones, since angles are float32.
    places = np.stack([np.arange(T) % 40, np.arange(T) * 7 % 31])
    turn = partial(attention.rotate, positions=places, interleaved=interleaved)
    output, pull = jax.vjp(jax.jit(turn), x)
    order = np.arange(size).reshape(-1, 2).T.ravel()  # firsts of pairs, then seconds
    order = order if interleaved else np.arange(size)
    back = np.argsort(order)
    for found, given, sign in ((output, x, 1), (pull(change)[0], change, -1)):
        assert found.dtype == dtype
        exact = np.asarray(given, np.float64)[..., order]
        close(found, oracles.rotate(exact, sign * places)[..., back], dtype)


@pytest.mark.parametrize("rows", [1, B])
def test_frequencies_have_the_gradient_of_the_form_without_a_kernel(rows, request):
    x, change = drawn(128, jnp.float32, 2)
    rates = jnp.asarray(np.random.default_rng(1).random((rows, T, 64)), jnp.float32)

    def loss(x, rates):
        turned = attention.rotate(x, np.arange(T)[None], frequencies=rates)
        return (turned * change).sum()

    wanted = jax.grad(loss, (0, 1))(x, rates)
    request.getfixturevalue("on_kernels")
    found = jax.jit(jax.grad(loss, (0, 1)))(x, rates)
    for one, other in zip(found, wanted, strict=True):
        close(one, other, jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_heads_are_normalised_and_have_the_gradients_of_the_definition(
    dtype, on_kernels
):
    size, factor = 256, 0.3
    x, change = drawn(size, dtype, 2)
    scale = jnp.asarray(np.random.default_rng(2).normal(size=size), jnp.float32)

    def ours(x, scale):
        norm = norms.HeadNorm(size, epsilon=1e-2, dtype=dtype, rngs=norms.nnx.Rngs(0))
        norm.scale[...] = scale
        return norm(x, factor)

    def exact(x, scale):
        scale = scale.astype(dtype).astype(x.dtype)
        deviation = jnp.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-2)
        return x / deviation * (scale * factor)[None, None, None]

    output, pull = jax.vjp(jax.jit(ours), x, scale)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(y, np.float64)) for y in (x, scale, change)]
        wanted, exact_pull = jax.vjp(exact, *wide[:2])
        gradients = exact_pull(wide[2])
    close(output, wanted, dtype)
    for found, other in zip(pull(change), gradients, strict=True):
        close(found, other, dtype)


def test_a_shard_map_sums_gradients_of_arrays_that_its_devices_share():
    """Lowered for TPUs that are not here, in a `jax.shard_map` with check_vma=True."""
    device = AbstractDevice("TPU v5 lite", 1, "tpu")
    kinds = (AxisType.Auto,)
    mesh = AbstractMesh((2,), ("x",), axis_types=kinds, abstract_device=device)

    def normed(x, scale):
        return run_heads("norm", 1e-5, lambda x, scale: x, x, scale)

    def turned(x, rates):
        return attention.rotate(x, np.arange(T)[None], frequencies=rates)

    def loss(call, *arrays):
        call = jax.shard_map(call, in_specs=(P("x"), P()), out_specs=P("x"))
        return call(*arrays).sum()

    x = jax.ShapeDtypeStruct((B, T, N, 128), jnp.float32)
    with jax.sharding.use_abstract_mesh(mesh):
        for call, size, kernel in ((normed, 128, "norm"), (turned, 64, "turn")):
            shared = jax.ShapeDtypeStruct((size,), jnp.float32)
            change = jax.jit(jax.grad(partial(loss, call), (0, 1)))
            text = change.trace(x, shared).lower(lowering_platforms=("tpu",)).as_text()
            assert f"heads_{kernel}" in text and "all_reduce" in text
