"""Score mechanisms on cuDNN: which calls are made, and that they compile for a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from laws import SEGMENTS, B, H, K, N, S, T
from score_laws import DEFINITIONS, every_close, graded, single

from symjax import attention
from symjax.attention.kernels.gpu import cudnn
from symjax.estimate import targets

NAMES = "softmax", "differential", "differential_v2"
CALLS = {
    "all": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": (5, None), "scale": 0.6},
    "segments": {"is_causal": True, "segment_ids": SEGMENTS},
    "segments, all": {"segment_ids": SEGMENTS},
}


@pytest.fixture
def its_semantics(monkeypatch):
    """jax.nn computes what cuDNN does with an XLA form that runs anywhere."""
    monkeypatch.setattr(cudnn, "LIBRARY", "xla")
    monkeypatch.setattr(cudnn, "DTYPES", ("float32", "bfloat16"))


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_asked_of_it_is_what_rows_give(
    name, options, its_semantics, monkeypatch
):
    """Gradients, too, for wide values (in one and in two calls) and for more keys."""
    scored = DEFINITIONS[name]
    keys = S if scored.crosses and not options else T
    query, key, value, *lam = single(scored.arrays(T, keys))
    rng = np.random.default_rng(5)
    for width, tile in ((H, 2 * H), (2 * H, 2 * H), (2 * H, H)):
        monkeypatch.setattr(cudnn, "KERNEL_WIDTH", tile)
        jax.clear_caches()
        value = rng.normal(size=(*value.shape[:3], width)).astype(np.float32)
        given = query, key, value, *lam
        found, wanted = (
            graded(partial(scored.attend, implementation=x), *given, **options)
            for x in ("cudnn", "rows")
        )
        every_close(jax.tree.leaves(found), jax.tree.leaves(wanted), 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_segments_of_many_pairs_run_in_groups(name, its_semantics, monkeypatch):
    """Five examples in two groups give what rows give, gradients too."""
    monkeypatch.setattr(cudnn, "MOST_PAIRS", 4 * T * T)
    monkeypatch.setattr(cudnn, "xla_keeps_arrays_whole", lambda: True)  # one device
    jax.clear_caches()
    scored = DEFINITIONS[name]
    query, key, value, *lam = single(scored.arrays(T, T))
    value = np.random.default_rng(5).normal(size=(*value.shape[:3], H))
    given = query, key, value.astype(np.float32), *lam
    given = [x if x.ndim == 1 else np.concatenate([x, -x, x / 2])[:5] for x in given]
    ids = np.concatenate([SEGMENTS, SEGMENTS + 1, SEGMENTS])[:5]
    options = {"is_causal": True, "segment_ids": ids}
    found, wanted = (
        graded(partial(scored.attend, implementation=x), *given, **options)
        for x in ("cudnn", "rows")
    )
    every_close(jax.tree.leaves(found), jax.tree.leaves(wanted), 1e-5)
    attend = partial(scored.attend, implementation="cudnn", **options)
    assert "scan" in str(jax.make_jaxpr(attend)(*given))


def test_groups_that_xla_would_split_are_refused(its_semantics, monkeypatch):
    monkeypatch.setattr(cudnn, "MOST_PAIRS", T * T)
    mesh = jax.make_mesh((2,), ("x",))
    call = partial(attention.softmax, implementation="cudnn", is_causal=True)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"use jax\.shard_map"):
        jax.eval_shape(partial(call, segment_ids=SEGMENTS), *shapes())


def shapes(length=T, keys=T, size=H, value_size=H, dtype=jnp.float32):
    given = (B, length, N, size), (B, keys, K, size), (B, keys, K, value_size)
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in given]


REFUSED = {
    "bias": ({}, {"bias": jnp.ones((1, N, T, T))}, "no bias"),
    "alibi": ({}, {"alibi": jnp.ones(N)}, "no alibi"),
    "sink": ({}, {"sink": jnp.ones(N)}, "no log_decay and no sink"),
    "mask": ({}, {"mask": jnp.ones((B, 1, 1, T), bool)}, "no mask"),
    "mask_self": ({}, {"mask_self": True}, "no mask_self"),
    "scale": ({}, {"scale": jnp.ones(())}, "one number for all rows"),
    "length_base": ({}, {"length_base": 5.0}, "one number for all rows"),
    "float16": ({"dtype": jnp.float16}, {}, "got float16"),
    "values": ({"value_size": H + 1}, {}, f"got key {H} and value {H + 1}"),
    "window": ({}, {"window": (3, 1)}, r"got \(3, 1\)"),
    "keys": ({"keys": S}, {"is_causal": True}, rf"as keys, got .* {T} and {S}"),
    "positions": ({}, {"is_causal": True, "positions": jnp.arange(T)[None]}, "windows"),
    "pairs": (
        {"length": 2**16, "keys": 2**16},
        {"is_causal": True},
        "at most 1,073,741,824 pairs, got 4,294,967,296",
    ),
}


@pytest.mark.parametrize("given, options, words", REFUSED.values(), ids=REFUSED)
def test_what_it_does_not_serve_is_said(given, options, words, its_semantics):
    arrays = shapes(**given)
    if arrays[0].shape[1] == 2**16:
        options = {**options, "segment_ids": jnp.zeros((B, 2**16), jnp.int32)}
    with pytest.raises(
        ValueError, match=f"'cudnn' does not support this call.*{words}"
    ):
        call = partial(attention.softmax, **options, implementation="cudnn")
        jax.eval_shape(call, *arrays)


REFUSALS = [
    NotImplementedError("The head dim must be <= 128"),
    RuntimeError("cuDNN is not detected."),
]


@pytest.mark.parametrize("error", REFUSALS, ids=str)
def test_what_the_library_refuses_is_said_in_its_words(error, monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", raising(error))
    call = partial(attention.softmax, implementation="cudnn")
    with pytest.raises(ValueError, match=f"this call: {error}"):
        jax.eval_shape(call, *shapes(dtype=jnp.bfloat16))


def test_another_error_of_the_library_is_no_refusal(monkeypatch):
    error = RuntimeError("INTERNAL: no devices")
    monkeypatch.setattr(jax.nn, "dot_product_attention", raising(error))
    call = partial(attention.softmax, implementation="cudnn")
    with pytest.raises(RuntimeError, match="INTERNAL: no devices"):
        jax.eval_shape(call, *shapes(dtype=jnp.bfloat16))


def raising(error):
    def call(*arrays, **options):
        raise error

    return call


BRANCHES = {
    "softmax": (1, 1, 1, attention.softmax),
    "differential": (2, 2, 2, partial(attention.differential, lam=0.5)),
    "segments": (1, 1, 1, attention.softmax),
}


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [None, "cudnn"])
@pytest.mark.parametrize("name", BRANCHES)
def test_it_compiles_for_an_h200_forward_and_backward(name, implementation):
    """Scores are not stored: temporaries are smaller than scores of half an example."""
    pytest.importorskip("jax_cuda13_plugin", reason="needs jax's CUDA plugin")
    queries, keys, wide, attend = BRANCHES[name]
    length, size = 2048, 32
    mesh = Mesh(np.array(targets.find("h200-8").devices), ("x",))

    def loss(query, key, value, ids):
        options = {"segment_ids": ids} if name == "segments" else {}
        options |= {"is_causal": True, "implementation": implementation}
        return attend(query, key, value, **options).astype(jnp.float32).sum()

    def split(*arrays):
        call = jax.value_and_grad(loss, (0, 1, 2))
        return jax.shard_map(
            lambda *x: call(*x)[1], mesh=mesh, in_specs=P("x"), out_specs=P("x")
        )(*arrays)

    sharding = NamedSharding(mesh, P("x"))
    given = (queries, size), (keys, size), (1, wide * size)
    arrays = [
        jax.ShapeDtypeStruct((8, length, 4 * n, h), jnp.bfloat16, sharding=sharding)
        for n, h in given
    ]
    ids = jax.ShapeDtypeStruct((8, length), jnp.int32, sharding=sharding)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program = jax.jit(split).trace(*arrays, ids).lower().compile()
    text = program.as_text()
    assert "__cudnn$fmha" in text and "Backward" in text
    scores = 4 * queries * length**2 * 4
    assert program.memory_analysis().temp_size_in_bytes < scores / 2


@pytest.mark.slow
def test_a_group_runs_once_forward_on_an_h200(monkeypatch):
    """The gradient keeps cuDNN's outputs; temporaries have the mask of one group."""
    pytest.importorskip("jax_cuda13_plugin", reason="needs jax's CUDA plugin")
    batch, length = 8, 2048
    monkeypatch.setattr(cudnn, "MOST_PAIRS", length**2)
    jax.clear_caches()
    mesh = Mesh(np.array(targets.find("h200-1").devices), ("x",))
    sharding = NamedSharding(mesh, P())
    x = jax.ShapeDtypeStruct((batch, length, 2, 64), jnp.bfloat16, sharding=sharding)
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32, sharding=sharding)

    def loss(query, key, value, ids):
        options = {"is_causal": True, "segment_ids": ids}
        found = attention.softmax(query, key, value, **options, implementation="cudnn")
        return jnp.square(found.astype(jnp.float32)).sum()

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
        program = gradient.trace(x, x, x, ids).lower().compile()
    text = program.as_text()
    assert text.count('custom_call_target="__cudnn$fmhaScaleBiasSoftmax"') == 1
    assert text.count('custom_call_target="__cudnn$fmhaScaleBiasSoftmaxBackward"') == 1
    assert program.memory_analysis().temp_size_in_bytes < batch * length**2 * 2
