"""Differential attention on the kernel for Hopper GPUs.

Interpreted it equals float64. Other tests: what it refuses, when it is chosen, and that
it compiles.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from symjax import attention
from symjax.attention.kernels import dispatch
from symjax.attention.kernels.gpu import differential
from symjax.attention.kernels.gpu.cudnn import CudnnSoftmax
from symjax.estimate import targets

needs_jax = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="Mosaic GPU of jax 0.11"
)
NAME = "gpu_differential"
H, V = differential.HEAD, differential.VALUE
CALLS = {  # examples, heads, value heads, queries, keys, window, lengths of segments
    "causal": (2, 2, 1, 257, 257, (None, 0), None),
    "all": (1, 2, 2, 173, 97, (None, None), None),
    "more keys": (1, 1, 1, 150, 214, (None, 0), None),
    "few": (1, 3, 1, 33, 33, (None, 0), None),
    # Blocks that all rows see lie between others; the last keys are seen by no row.
    "segments": (2, 1, 1, 380, 380, (None, 0), [(40, 300, 40), (1, 30, 33, 316)]),
    "segments, both ways": (1, 2, 1, 380, 380, (None, None), [(40, 300, 40)]),
    "window": (1, 2, 1, 300, 900, (300, 70), None),
}


def drawn(batch, heads, shared, length, keys, scale=1.0):
    """Draw query, key, value, λ of each row, and the gradient of the output."""
    rng = np.random.default_rng(length)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape) * scale, jnp.bfloat16)

    lam = jnp.asarray(rng.normal(size=(batch, length, heads)), jnp.float32)
    return (
        draw(batch, length, 2 * heads, H),
        draw(batch, keys, 2 * shared, H),
        draw(batch, keys, shared, V),
        lam,
        draw(batch, length, heads, V),
    )


def visible(length, keys, window, segments):
    """Return which keys each row sees, by example."""
    rows, (left, right) = np.arange(keys - length, keys)[:, None], window
    distance = rows - np.arange(keys)
    seen = np.ones((1, length, keys), bool)
    if left is not None:
        seen &= distance <= left
    if right is not None:
        seen &= distance >= -right
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None])
    return seen


def definition(query, key, value, lam, *, seen):
    """Compute the two whole maps of each head."""
    group = lam.shape[2] // value.shape[2]

    def output(branch):
        asked = jnp.repeat(key[:, :, branch::2], group, axis=2)
        scores = jnp.einsum("btnh,bsnh->bnts", query[:, :, branch::2], asked)
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        weights = jax.nn.softmax(scores / math.sqrt(H), axis=-1)
        return jnp.einsum("bnts,bsnv->btnv", weights, jnp.repeat(value, group, axis=2))

    return output(0) - lam[..., None] * output(1)


@needs_jax
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_output_and_gradients_are_those_of_the_definition(call, monkeypatch):
    """Errors are those of bfloat16 weights and of a rounded output."""
    from mosaic import INTERPRET, complete

    complete(monkeypatch)
    interpreted = partial(differential.GpuDifferential, interpret=INTERPRET)
    monkeypatch.setitem(dispatch.NAMED, NAME, interpreted)
    monkeypatch.setattr(differential, "on_hopper", lambda: True)
    *sizes, window, segments = call
    *given, change = drawn(*sizes)
    options = {"window": window, "implementation": NAME}
    if segments is not None:
        segments = np.array([np.repeat(range(len(x)), x) for x in segments])
        options["segment_ids"] = jnp.asarray(segments)

    def attend(query, key, value, lam):
        return attention.softmax(query, key, value, lam=lam, **options)

    output, pull = jax.vjp(attend, *given)
    found = output, *pull(change)
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in (*given, change)]
        seen = visible(*sizes[3:], window, segments)
        output, pull = jax.vjp(partial(definition, seen=seen), *exact[:4])
        wanted = output, *pull(exact[4])
        wanted = [np.asarray(x) for x in wanted]
    for x, y in zip(found, wanted, strict=True):
        x = np.asarray(x, np.float64)
        assert np.linalg.norm(x - y) < 5e-3 * np.linalg.norm(y)


def shapes(length=256, keys=None, maps=4, size=H, width=V, dtype=jnp.bfloat16):
    keys = length if keys is None else keys
    given = (2, length, maps, size), (2, keys, maps, size), (2, keys, maps // 2, width)
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in given]


REFUSED = {
    "bias": ({}, {"bias": jnp.ones((1, 2, 256, 256))}, "no bias"),
    "alibi": ({}, {"alibi": jnp.ones(2)}, "no alibi"),
    "sink": ({}, {"sink": jnp.ones(2)}, "no log_decay and no sink"),
    "mask": ({}, {"mask": jnp.ones((2, 1, 1, 256), bool)}, "no mask"),
    "mask_self": ({}, {"mask_self": True}, "no mask_self"),
    "scale": ({}, {"scale": jnp.ones(())}, "one number for all rows"),
    "negative scale": ({}, {"scale": -1.0}, "one number for all rows"),
    "length_base": ({}, {"length_base": 5.0}, "one number for all rows"),
    "float32": ({"dtype": jnp.float32}, {}, "got float32"),
    "heads": ({"size": 32}, {}, "got key 32 and value 128"),
    "values": ({"width": 64}, {}, "got key 64 and value 64"),
    "small scale": ({}, {"scale": 1e-30}, "one number for all rows, from"),
    "fewer keys": ({"keys": 128}, {"window": (None, 0)}, "got 256 and 128"),
    "window of fewer keys": ({"keys": 128}, {"window": 5}, "got 256 and 128"),
    "positions": (
        {},
        {"is_causal": True, "positions": jnp.arange(256)[None]},
        "no positions",
    ),
}


@pytest.mark.parametrize("given, options, words", REFUSED.values(), ids=REFUSED)
def test_what_it_does_not_serve_is_said(given, options, words, monkeypatch):
    monkeypatch.setattr(differential, "on_hopper", lambda: True)
    call = partial(attention.differential, lam=0.5, **options)
    with pytest.raises(
        ValueError, match=f"'gpu_differential' does not support this call.*{words}"
    ):
        jax.eval_shape(partial(call, implementation=NAME), *shapes(**given))


def test_one_map_and_another_machine_are_refused(monkeypatch):
    call = partial(attention.softmax, implementation=NAME)
    arrays = shapes(maps=2, width=V)[:2]
    with pytest.raises(ValueError, match="it needs a Hopper GPU"):
        jax.eval_shape(call, *arrays, arrays[1])
    monkeypatch.setattr(differential, "on_hopper", lambda: True)
    with pytest.raises(ValueError, match="it computes two maps: it needs lam"):
        jax.eval_shape(call, *arrays, arrays[1])
    # V2 has one key head for both branches.
    query, _, value = shapes(maps=2)
    key = shapes(maps=1)[1]
    lam = jax.ShapeDtypeStruct((2, 256, 1), jnp.float32)
    call = partial(attention.differential_v2, implementation=NAME)
    with pytest.raises(ValueError, match="two key heads for each value head"):
        jax.eval_shape(call, query, key, value, lam)


def loss(query, key, value, lam, **options):
    output = attention.differential(query, key, value, lam, is_causal=True, **options)
    return output.astype(jnp.float32).sum()


@needs_jax
@pytest.mark.parametrize(
    "kind, wide, chosen",
    [
        ("NVIDIA H100 80GB HBM3", False, True),
        ("NVIDIA H200", True, False),
        ("NVIDIA A100", False, False),
    ],
)
def test_it_is_what_a_hopper_gpu_runs(kind, wide, chosen, monkeypatch):
    """Its program has two kernels, one forward and one backward."""
    monkeypatch.setattr(CudnnSoftmax, "refusal", lambda *_: "not installed here")
    device = AbstractDevice(kind, 132, "gpu")
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)
    lam = jax.ShapeDtypeStruct((2,), jnp.float32)
    with jax.sharding.use_abstract_mesh(mesh), jax.enable_x64(wide):
        traced = jax.jit(jax.grad(loss, (0, 1, 2, 3))).trace(*shapes(), lam)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2(") == (2 if chosen else 0)


@needs_jax
@pytest.mark.slow
@pytest.mark.parametrize("devices", (1, 8))
@pytest.mark.parametrize(
    "length, shared, segments",
    [(2048, 4, False), (2048, 2, True), (1999, 4, False), (1999, 4, True)],
)
def test_it_compiles_for_an_h200(devices, length, shared, segments):
    """Forward and backward, also on a mesh of several devices."""
    pytest.importorskip("jax_cuda13_plugin", reason="needs jax's CUDA plugin")
    mesh = Mesh(np.array(targets.find(f"h200-{devices}").devices), ("x",))

    def split(*arrays):
        def call(query, key, value, ids=None):
            attend = partial(loss, segment_ids=ids)
            return jax.grad(attend, (0, 1, 2))(query, key, value, jnp.full(4, 0.5))

        specs = {"in_specs": P("x"), "out_specs": P("x")}
        return jax.shard_map(call, mesh=mesh, **specs)(*arrays)

    def given(*shape, dtype=jnp.bfloat16):
        sharding = NamedSharding(mesh, P("x"))
        return jax.ShapeDtypeStruct((8, length, *shape), dtype, sharding=sharding)

    arrays = given(8, H), given(2 * shared, H), given(shared, V)
    arrays += (given(dtype=jnp.int32),) * segments
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program = jax.jit(split).trace(*arrays).lower().compile()
    text = program.as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 2
    scores = 8 // devices * 8 * length**2 * 4
    assert program.memory_analysis().temp_size_in_bytes < scores / 4
