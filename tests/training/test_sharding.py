"""The sharding table: every weight has a rule, and all meshes train the same."""

import functools
import itertools
import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from symjax import config
from symjax.training import step
from symjax.training.sharding import make_mesh, weight_shardings
from symjax.training.step import Program, State, build_program

MODEL = config.Model(
    vocabulary=21,
    width=32,
    heads=8,
    depth=1,
    length=24,
    dropout=0.1,
    attention=config.Attention(symmetric="plain", differential="v1"),
)
DEEP = replace(MODEL, depth=2, dropout=0.0)
# eps 1e-6: Adam does not turn rounding noise of zero gradients into a whole step
OPTIMIZER = config.Optimizer(eps=1e-6, learning_rate=1e-3, warmup=0.0)
OPTIONS = config.Config(steps=3, batch_size=8, model=MODEL, optimizer=OPTIMIZER)
FEATURES = {"feature_count": 16, "chunk_size": 8}


def of(*pattern, **attention):
    """Return the model with one block of each mechanism."""
    chosen = config.Attention(**attention)
    return replace(MODEL, depth=len(pattern), pattern=pattern, attention=chosen)


MODELS = {
    "differential": MODEL,
    "performer": of("performer", differential="v1", **FEATURES),
    "mixed": of("performer", "softmax", **FEATURES),
    "ring": replace(
        MODEL,
        attention=replace(MODEL.attention, implementation="ring", forget="fox"),
    ),
    "decay": of(
        *("decay", "linear"),
        differential="v2",
        decay="gated",
        output_gate="silu",
        features="hedgehog",
        chunk_size=8,
    ),
    "grouped": of("softmax", "linear", differential="v1", signals=2, chunk_size=8),
    "shared": of(
        *("softmax", "entmax15"),
        symmetric="qkv",
        position_term=4,
        output_gate="sigmoid",
    ),
    "sparse": of("sparsemax", "entmax15", mask_self=True, forget="fox", sink=True),
    "flash": of("flash", "gau", chunk_size=3),
    "universal": replace(
        *(MODEL,),
        kind="universal",
        depth=2,
        positions="alibi",
        attention=config.Attention(length_base=16),
    ),
}


@functools.cache
def program_of(options: config.Config) -> Program:
    return build_program(options, make_mesh(options.mesh))


def train(options: config.Config, seed: int = 0) -> tuple[State, list[float]]:
    program, steps = program_of(options), options.steps
    tokens = np.random.default_rng(0).integers(0, 21, (steps, 8, 25), dtype=np.int32)
    losses = []
    with jax.set_mesh(program.mesh):
        state, constants = program.initial(seed)
        for rows in tokens:
            arrays = program.place(
                (8, 24), lambda a, b, x=rows: (x[a:b, :-1], x[a:b, 1:])
            )
            key = jax.random.key(seed)
            state, metrics = program.train(state, constants, *arrays, key)
            losses.append(float(metrics["train/loss"]))
    return jax.device_get(state), losses


@functools.cache
def alone(model: str) -> tuple[State, list[float]]:
    """Train on one device."""
    mesh = config.Mesh(data=1)
    return train(replace(OPTIONS, model=MODELS[model], mesh=mesh))


def mesh_of(shape: str) -> config.Mesh:
    """Return a mesh of data × fsdp × tensor × sequence devices."""
    return config.Mesh(*map(int, shape.split("x")))


def heard(capfd) -> list[str]:
    """Return warnings of XLA about arrays that it can only reshard by gathering
    them."""
    lines = capfd.readouterr().err.splitlines()
    return [line for line in lines if "nvoluntary full remat" in line]


DEFAULT = [("differential", "1x2x2x2"), ("mixed", "2x1x1x4"), ("decay", "1x1x2x3")]
DEFAULT += [("shared", "1x2x2x2")]


def slow(*models: str, shapes: list[str]) -> list:
    return [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product(models, shapes)
        if case not in DEFAULT
    ]


SHAPES = [
    "x".join(map(str, sizes))
    for sizes in itertools.product((1, 2, 4, 8), repeat=4)
    if math.prod(sizes) == 8
]
OTHERS = ["ring", "decay", "shared", "sparse", "flash", "universal"]


@pytest.mark.parametrize(
    ("model", "shape"),
    [pytest.param(*DEFAULT[0], marks=pytest.mark.always), *DEFAULT[1:]]
    + slow("differential", "performer", "mixed", shapes=SHAPES)
    + slow("grouped", shapes=["1x2x2x2"])
    + slow(*OTHERS, shapes=["2x2x2x1", "1x2x1x4", "1x1x2x4"]),
)
def test_every_mesh_trains_like_one_device(model, shape, capfd):
    options = replace(OPTIONS, model=MODELS[model], mesh=mesh_of(shape))
    state, losses = train(options)
    assert not heard(capfd)
    expected, expected_losses = alone(model)
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=5e-6)
    for one, other in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)


def test_muon_over_a_mesh_trains_like_one_device():
    muon = replace(OPTIONS.optimizer, name="muon")
    options = replace(OPTIONS, model=MODELS["differential"], optimizer=muon)
    state, losses = train(replace(options, mesh=mesh_of("1x2x2x2")))
    expected, expected_losses = train(replace(options, mesh=config.Mesh(data=1)))
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=5e-6)
    for one, other in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)


def test_a_warning_of_xla_would_be_heard(capfd):
    mesh = make_mesh(config.Mesh(data=2, sequence=4))

    def moved(x):
        for axes in (("data", None, "sequence"), (None, ("sequence", "data"), None)):
            x = jax.lax.with_sharding_constraint(
                jnp.sin(x), NamedSharding(mesh, P(*axes))
            )
        return x

    jax.jit(moved).lower(jnp.zeros((8, 24, 4))).compile()
    assert heard(capfd)


@functools.cache
def memory(fsdp: int) -> tuple[int, int]:
    """Return bytes per device: inputs of a training step, and all that it needs."""
    model = replace(MODEL, vocabulary=256, width=128, dropout=0.0)
    options = replace(OPTIONS, model=model, mesh=config.Mesh(data=1, fsdp=fsdp))
    program = build_program(options, make_mesh(options.mesh))
    batch = [jax.ShapeDtypeStruct((8, 24), jnp.int32)] * 2
    key = jax.eval_shape(lambda: jax.random.key(0))
    with jax.set_mesh(program.mesh):
        step = program.train.lower(program.state, program.constants, *batch, key)
    found = step.compile().memory_analysis()
    given = found.argument_size_in_bytes
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return given, given + results + found.temp_size_in_bytes


@pytest.mark.parametrize(
    "fsdp", [8, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))]
)
def test_fsdp_splits_memory(fsdp):
    """Weights and moments except norms and biases, and two thirds of all memory."""
    (given, total), (one_given, one_total) = memory(fsdp), memory(1)
    print(f"fsdp {fsdp}: {given} of {one_given}, {total} of {one_total} bytes")
    assert given < 1.1 * one_given / fsdp
    assert total < (1 + 2 / fsdp) / 3 * one_total


def test_accumulation_gives_the_gradient_of_the_whole_batch():
    options = replace(OPTIONS, model=replace(MODEL, dropout=0.0))
    whole, losses = train(options)
    parts = replace(
        options,
        mesh=config.Mesh(data=2),
        optimizer=replace(OPTIMIZER, accumulate=4),
    )
    split, split_losses = train(parts)
    np.testing.assert_allclose(split_losses, losses, rtol=0, atol=5e-6)
    for one, other in zip(
        jax.tree.leaves(split.params), jax.tree.leaves(whole.params), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)


def test_a_loop_over_layers_trains_like_the_list_over_a_mesh_and_in_parts():
    model = replace(DEEP, remat="dots", scan_layers=True)
    looped = replace(
        OPTIONS,
        model=model,
        mesh=config.Mesh(data=2, fsdp=2, tensor=2),
        optimizer=replace(OPTIMIZER, accumulate=2),
    )
    state, losses = train(looped)
    listed = replace(model, remat="none", scan_layers=False)
    expected, expected_losses = train(replace(OPTIONS, model=listed))
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=5e-6)
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for one, other in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "scan_layers", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_bfloat16_computes_and_float32_remembers(scan_layers):
    # ln 21 = 3.04 nats: 2⁻⁸ of rounding in every layer moves the mean loss by < 1 %
    narrow = replace(DEEP, dtype="bfloat16", scan_layers=scan_layers)
    state, losses = train(replace(OPTIONS, model=narrow))
    _, expected = train(replace(OPTIONS, model=DEEP))
    for leaf in jax.tree.leaves((state.params, state.optimizer)):
        assert leaf.dtype in (jnp.float32, jnp.int32)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=0.03)


@pytest.mark.always
def test_weights_and_moments_are_split_over_the_mesh():
    mesh = make_mesh(config.Mesh(data=1, fsdp=4, tensor=2))
    program = build_program(OPTIONS, mesh)
    with jax.set_mesh(mesh):
        state, _ = program.initial(0)
    kernel = state.params["blocks"][0]["attention"]["query"]["kernel"]
    assert kernel.sharding.spec == P("fsdp", "tensor")
    assert kernel.addressable_shards[0].data.shape == (8, 16)
    moments = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.optimizer)
        if "query" in jax.tree_util.keystr(path) and leaf.ndim == 2
    ]
    assert len(moments) == 2
    assert all(leaf.sharding.spec == P("fsdp", "tensor") for leaf in moments)


def test_the_dropout_of_a_step_depends_on_the_seed_and_the_step():
    alone = replace(OPTIONS, mesh=config.Mesh(data=1))
    first, again, other = (train(alone, seed)[1] for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_a_weight_without_a_rule_is_refused():
    mesh = make_mesh(config.Mesh())
    weight = {"blocks": {0: {"attention": {"gate": jnp.zeros(4)}}}}
    words = "no sharding rule matches weight 'blocks/0/attention/gate' (4,)"
    with pytest.raises(ValueError, match=re.escape(words)):
        weight_shardings(weight, mesh)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 6}, "batch_size 6 does not divide over mesh data 8 × fsdp 1"),
        ({"mesh": config.Mesh(data=3, fsdp=3)}, "needs 9 devices, there are 8"),
        ({"mesh": config.Mesh(data=-1, fsdp=-1)}, "one may be -1"),
        ({"mesh": config.Mesh(data=0)}, "sizes are positive"),
        ({"mesh": config.Mesh(fsdp=3)}, "8 devices are not a multiple of 3"),
        ({"mesh": config.Mesh(data=1, tensor=3)}, "8 key/value heads do not divide"),
        ({"mesh": config.Mesh(data=1, sequence=5)}, "model.length 24 does not divide"),
        (
            {"model": replace(MODEL, feedforward=33), "mesh": config.Mesh(tensor=2)},
            "feedforward/down/kernel' (33, 32) does not divide over mesh axis tensor",
        ),
        (
            {"optimizer": replace(OPTIMIZER, accumulate=3)},
            "mesh data 8 × fsdp 1 × optimizer.accumulate 3",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_does_not_divide_over_the_mesh_is_refused_by_name(changes, words):
    options = replace(OPTIONS, **changes)
    with pytest.raises(ValueError, match=re.escape(words)):
        build_program(options, make_mesh(options.mesh))


def test_one_device_draws_by_a_kernel_which_is_a_matter_of_its_call_alone():
    name, seen = "jax_threefry_gpu_kernel_lowering", []

    def initial(seed):
        seen.append(getattr(jax.config, name))
        raise ValueError("no weights")

    with pytest.raises(ValueError, match="no weights"):
        step._with_threefry_kernel(initial)(0)
    assert seen == [True] and not getattr(jax.config, name)
    options = config.Config(model=MODEL, batch_size=8)
    for mesh, split in ((config.Mesh(data=1), False), (config.Mesh(data=2), True)):
        program = build_program(options, make_mesh(mesh, jax.devices()[: mesh.data]))
        compiled_itself = hasattr(program.initial, "lower")
        assert compiled_itself == split
