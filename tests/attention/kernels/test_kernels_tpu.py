"""The TPU kernels compile with libtpu, which needs no TPU."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from symjax import attention, config
from symjax.estimate import targets
from symjax.estimate.collectives import traffic
from symjax.estimate.tpu_cycles import estimate
from symjax.layers.block import POLICIES
from symjax.training import sharding
from symjax.training.step import build_program

pytest.importorskip("libtpu", reason="compiling for TPUs needs libtpu")

ONCE = {"attention_forward": 1, "attention_row_sums": 1, "attention_backward": 1}
OF_PERFORMER = {"performer_forward": 1, "performer_backward": 1}
OF_DECAY = {"decay_forward": 1, "decay_backward": 1}
OF_DELTA = {"delta_forward": 1, "delta_backward": 1}
OF_LINEAR = {"linear_forward": 1, "linear_backward": 1}
KERNELS = {"performer": OF_PERFORMER, "linear": OF_LINEAR, "decay": OF_DECAY}
KERNELS |= {"decay_by_head": OF_DECAY, "delta_by_head": OF_DELTA}
KERNELS |= {"delta": OF_DELTA, "kda": OF_DELTA}
# Outputs of linear attention, log-decays, and the inverses of the delta rule, 128
# numbers of a token, are float32.
MORE = {"linear": 8, "decay": 10, "delta": 12, "kda": 14}


class Case(NamedTuple):
    """A call that is compiled for four chips, with one example and `heads` heads
    each."""

    kind: str
    length: int
    head_size: int
    value_size: int
    heads: int = 2
    kv_heads: int = 2
    keys: int | None = None
    dtype: type = jnp.bfloat16
    options: tuple = ("is_causal",)
    chip: str = "v5e-4"
    bands: int = 1  # of rows, whose gradients fit in VMEM


WITH_ALL = ("is_causal", "mask", "segment_ids", "mask_self", "length_base")
QUICK = {
    "softmax_64": Case("softmax", 1024, 64, 64),
    "softmax_128": Case("softmax", 4096, 128, 128),
    "softmax_256": Case("softmax", 1024, 256, 256),
    "v1_64": Case("v1", 4096, 64, 128),
    "v1_128": Case("v1", 4096, 128, 256),
    "v2_128": Case("v2", 4096, 128, 128),
    "performer_64": Case("performer", 4096, 64, 64),
    "performer_odd_with_all": Case(
        "performer", 1000, 80, 96, kv_heads=1, options=("mask", "segment_ids")
    ),
    "linear_64": Case("linear", 4096, 64, 64),
    "decay_64": Case("decay", 4096, 64, 64),
    "delta_64": Case("delta", 4096, 64, 64),
    "kda_odd_with_all": Case(
        "kda", 1000, 80, 96, kv_heads=1, options=("mask", "segment_ids")
    ),
    "decay_by_head_64": Case("decay_by_head", 4096, 64, 64),
    "delta_by_head_odd_with_all": Case(
        "delta_by_head", 1000, 80, 96, kv_heads=1, options=("mask", "segment_ids")
    ),
    "decay_odd_with_all": Case(
        "decay", 1000, 80, 96, kv_heads=1, options=("mask", "segment_ids")
    ),
    "v1_with_all": Case("v1", 1000, 64, 128, kv_heads=1, options=WITH_ALL),
}
SLOW = {
    "softmax_32k": Case("softmax", 32768, 128, 128),
    "softmax_16k_grouped": Case(
        "softmax", 16384, 128, 128, heads=8, kv_heads=1, bands=2
    ),
    "softmax_float32": Case("softmax", 4096, 128, 128, dtype=jnp.float32),
    "softmax_both_ways": Case("softmax", 300, 40, 40, keys=500, options=()),
    "softmax_odd_with_all": Case("softmax", 1000, 80, 96, options=WITH_ALL),
    "v1_32k": Case("v1", 32768, 128, 256),
    "v1_float32": Case("v1", 2048, 64, 128, dtype=jnp.float32),
    # So wide that fewer rows and keys fit in VMEM.
    "v1_wide_float32": Case("v1", 8192, 256, 256, dtype=jnp.float32),
    "v1_widest": Case("v1", 8192, 512, 512),
    "v1_widest_float32_on_v6e": Case(
        "v1", 8192, 512, 512, dtype=jnp.float32, chip="v6e-4"
    ),
    "softmax_widest_group": Case(
        "softmax", 1024, 256, 256, heads=64, kv_heads=1, bands=2
    ),
    "v2_16k": Case("v2", 16384, 128, 128, kv_heads=1),
    "performer_32k": Case("performer", 32768, 128, 128),
    "performer_float32": Case("performer", 4096, 64, 64, dtype=jnp.float32),
    "performer_on_v5p": Case("performer", 4096, 128, 128, chip="v5p-4"),
    "performer_on_v6e": Case("performer", 4096, 64, 64, chip="v6e-4"),
    "linear_odd_with_all": Case(
        "linear", 1000, 80, 96, kv_heads=1, options=("mask", "segment_ids")
    ),
    "linear_float32": Case("linear", 4096, 64, 64, dtype=jnp.float32),
    "linear_on_v5p": Case("linear", 4096, 128, 128, chip="v5p-4"),
    "linear_on_v6e": Case("linear", 4096, 32, 32, 4, 4, chip="v6e-4"),
    "decay_32k": Case("decay", 32768, 128, 256),
    "decay_float32": Case("decay", 4096, 64, 64, dtype=jnp.float32),
    "decay_grouped": Case("decay", 4096, 128, 128, heads=8, kv_heads=1),
    "decay_by_head_32k": Case("decay_by_head", 32768, 128, 256),
    "decay_by_head_float32": Case("decay_by_head", 4096, 64, 64, dtype=jnp.float32),
    "decay_by_head_on_v5p": Case("decay_by_head", 4096, 32, 32, 4, 4, chip="v5p-4"),
    "delta_by_head_float32": Case("delta_by_head", 4096, 64, 64, dtype=jnp.float32),
    "delta_by_head_on_v6e": Case("delta_by_head", 4096, 128, 128, chip="v6e-4"),
    "delta_grouped": Case("delta", 4096, 128, 128, heads=8, kv_heads=2),
    "kda_16k": Case("kda", 16384, 128, 256),
    "kda_float32": Case("kda", 4096, 64, 64, dtype=jnp.float32),
    "kda_on_v5p": Case("kda", 4096, 128, 128, chip="v5p-4"),
    "delta_on_v6e": Case("delta", 4096, 64, 64, chip="v6e-4"),
    "decay_on_v5p": Case("decay", 4096, 128, 128, chip="v5p-4"),
    "decay_on_v6e": Case("decay", 4096, 64, 64, chip="v6e-4"),
    "softmax_on_v5p": Case("softmax", 4096, 128, 128, chip="v5p-4"),
    "softmax_on_v6e": Case("softmax", 4096, 128, 128, chip="v6e-4"),
    "v1_on_v5p": Case("v1", 4096, 128, 256, chip="v5p-4"),
    "v1_on_v6e": Case("v1", 4096, 128, 256, chip="v6e-4"),
}


def form(case):
    """Return the mechanism and the shapes of its arrays for four devices."""
    length, keys, batch = case.length, case.keys or case.length, 4
    maps, key_maps = 1 + (case.kind in ("v1", "v2")), 1 + (case.kind == "v1")
    shapes = [
        (batch, length, case.heads * maps, case.head_size),
        (batch, keys, case.kv_heads * key_maps, case.head_size),
        (batch, keys, case.kv_heads, case.value_size),
    ]
    attend = attention.softmax
    if case.kind == "v1":
        attend = partial(attention.differential, lam=0.3)
    if case.kind == "v2":
        attend = attention.differential_v2
        shapes.append((batch, length, case.heads))
    by_channel, by_head = shapes[1], shapes[1][:3]
    decays = {"decay": by_channel, "kda": by_channel, "delta": None}
    decay = decays.get(case.kind, by_head)
    if case.kind in ("decay", "decay_by_head"):
        return attention.decay_causal, [*shapes, decay]
    if case.kind in ("delta", "kda", "delta_by_head"):
        given = [*shapes, by_head] if decay is None else [*shapes, by_head, decay]
        return attention.delta_causal, given
    if case.kind == "linear":
        return attention.linear_causal, shapes
    if case.kind == "performer":
        rows = np.ones((256, case.head_size), np.float32)
        return partial(attention.performer_causal, projection=rows), shapes
    values = {"is_causal": True, "mask_self": True, "length_base": 512.0}
    options = {name: values[name] for name in case.options if name in values}
    return partial(attend, **options), shapes


def compiled(case, policy=None):
    """Compile the gradient, one example per chip; return it and its argument bytes."""
    machine = targets.find(case.chip)
    mesh = Mesh(np.array(machine.devices), ("data",))
    attend, shapes = form(case)
    places = NamedSharding(mesh, P("data"))
    given = [jax.ShapeDtypeStruct(x, case.dtype, sharding=places) for x in shapes]
    keys = shapes[1][:2]
    extra = {
        "mask": jax.ShapeDtypeStruct((keys[0], 1, 1, keys[1]), bool, sharding=places),
        "segment_ids": jax.ShapeDtypeStruct(keys, jnp.int32, sharding=places),
    }
    extra = {name: x for name, x in extra.items() if name in case.options}

    def loss(arrays, extra):
        def on_device(arrays, extra):
            return attend(*arrays, **extra)

        if policy is not None:
            on_device = jax.checkpoint(on_device, policy=policy)
        on_devices = jax.shard_map(on_device, in_specs=P("data"), out_specs=P("data"))
        output = on_devices(arrays, extra).astype(jnp.float32)
        return (output * output).sum()

    with jax.set_mesh(mesh):
        program = jax.jit(jax.grad(loss)).lower(given, extra).compile()
    found = estimate(program.as_text(), machine.chip)
    size = sum(x.size * x.dtype.itemsize for x in given) / len(machine.devices)
    return program, found, size


def check(case):
    """Assert that kernels declare their cost, and that memory is a few such arrays."""
    program, found, size = compiled(case)
    expected = KERNELS.get(case.kind, ONCE | {"attention_backward": case.bands})
    assert found.kernels == expected
    assert not found.unknown["kernel"]
    most = MORE.get(case.kind, 6) * size + 2**21
    assert program.memory_analysis().temp_size_in_bytes < most


@pytest.mark.parametrize("case", QUICK.values(), ids=QUICK)
def test_the_kernels_compile(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW.values(), ids=SLOW)
def test_the_kernels_compile_for_long_rows_and_other_chips(case):
    check(case)


@pytest.mark.parametrize("kind", ["softmax", "v1", "decay", "delta"])
def test_what_remat_keeps_saves_the_second_run_of_the_forward_kernel(kind):
    case, once = Case(kind, 512, 64, 128), KERNELS.get(kind, ONCE)
    for policy in POLICIES.values():
        assert compiled(case, policy)[1].kernels == once
    nothing = jax.checkpoint_policies.nothing_saveable
    twice = compiled(case, nothing)[1].kernels
    forward = next(name for name in once if name.endswith("forward"))
    assert twice == once | {forward: 2}


def test_a_training_step_runs_each_kernel_once_a_layer():
    machine = targets.find("v5e-4")
    model = config.Model(
        vocabulary=50,
        width=256,
        depth=3,
        heads=2,
        length=256,
        remat="full",
        scan_layers=True,
        attention=config.Attention(differential="v1", symmetric="plain"),
    )
    mesh = replace(config.Mesh(), data=1, fsdp=2, tensor=2)
    options = config.Config(model=model, batch_size=4, mesh=mesh)
    mesh = sharding.make_mesh(options.mesh, machine.devices)
    step = build_program(options, mesh).lower((4, 256)).compile()
    found = estimate(step.as_text(), machine.chip)
    assert found.kernels == {name: 3 for name in ONCE}


@pytest.mark.parametrize("maps", [1, 2])
def test_the_ring_compiles_for_four_chips(maps):
    """Keys, values and gradients are passed around, and nothing is gathered."""
    machine = targets.find("v5e-4")
    mesh = Mesh(np.array(machine.devices), ("time",))
    shape, places = (1, 4 * 1024, 2 * maps, 64), NamedSharding(mesh, P(None, "time"))
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=places)] * 2
    given.append(
        jax.ShapeDtypeStruct((*shape[:2], 2, 64 * maps), jnp.bfloat16, sharding=places)
    )
    attend = partial(attention.softmax, is_causal=True, implementation="ring")
    if maps == 2:
        attend = partial(
            attention.differential, lam=0.3, is_causal=True, implementation="ring"
        )

    def loss(arrays):
        def on_device(arrays):
            return attend(*arrays, axis_name="time")

        split = jax.shard_map(
            on_device, in_specs=P(None, "time"), out_specs=P(None, "time")
        )
        return jnp.square(split(arrays).astype(jnp.float32)).sum()

    with jax.set_mesh(mesh):
        program = jax.jit(jax.grad(loss)).lower(given).compile().as_text()
    assert "collective-permute" in program and "all-gather" not in program
    sent = traffic(program, 4).sent["collective-permute"]
    own = 1024 * 2 * (maps * 64 + 64 * maps)  # numbers of a device's keys and values
    # By docs/scaling.md, keys and values twice and their gradients once; XLA spares
    # what nobody reads.
    assert 0 < sent <= 2 * 3 * own * 2 + 4 * own * 4
