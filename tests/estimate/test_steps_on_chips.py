"""Training steps of configurations, compiled for chips that are not here.

cycles.json has the estimated cycles of `:tiny` on four v5e. If a change of them is
wanted, or another version of jax compiles the steps, record them again and state the
reason in the commit:

    PYTHONPATH=. python benchmarks/compiled.py steps --target v5e-4 --only \
        gpt:tiny,diff_sym:tiny,diff_v2:tiny,performer:tiny,gla:tiny,delta:tiny \
        --json tests/estimate/cycles.json
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from runs import preset

from symjax import config
from symjax.attention.core.meshes import RARE
from symjax.estimate import plan, targets
from symjax.estimate.hlo import buffers, parse
from symjax.estimate.tpu_cycles import estimate
from symjax.models import chips
from symjax.training import loss, sharding
from symjax.training.loss import SCOPE
from symjax.training.step import build_program

PAIRS = ("gpt", "diff_sym", "diff_v2")  # on the kernel of score mechanisms
LINEAR = {"performer": "performer", "gla": "decay", "delta": "delta"}  # on its kernels
KERNELS = ("attention_forward", "attention_row_sums", "attention_backward")
HEADS = ("heads_turn", "heads_norm", "heads_norm_backward")
RECORDED = Path(__file__).with_name("cycles.json")
GROWTH = 1.05  # largest ratio of cycles to the recorded cycles
WATCHED = ("high", "low", "attention", "products with weights")


class Step(NamedTuple):
    """The compiled step of a configuration."""

    name: str
    options: config.Config
    machine: targets.Target
    program: Any


def compiled(options, machine, separate=False):
    """Compile the step over all chips of a machine, with sharded weights."""
    mesh = config.Mesh(data=1, fsdp=len(machine.devices))
    options = dataclasses.replace(options, mesh=mesh)
    shape = options.batch_size, options.model.length
    mesh = sharding.make_mesh(mesh, machine.devices)
    program = build_program(options, mesh, separate=separate)
    return program.lower(shape).compile()


def compiled_preset(name, size, target, separate=False):
    machine = targets.find(target)
    options = preset(name, size)
    if machine.name.startswith("h200"):  # cuDNN has no products of float32
        options = preset(name, size, {"dtype": "bfloat16"})
    return Step(name, options, machine, compiled(options, machine, separate))


def check(step):
    """Assert that the step fits and runs each attention kernel once per layer.

    On a GPU the kernels are those of cuDNN.
    """
    name, options, machine, program = step
    memory = program.memory_analysis()
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    assert needed < machine.chip.memory
    if machine.chip.per_cycle:
        found = estimate(program.as_text(), machine.chip)
        layers = options.model.depth * options.optimizer.accumulate
        wanted = {x: layers for x in KERNELS}
        if kernel := LINEAR.get(name):
            # The Performer does not save its states.
            again = name == "performer" and options.model.remat != "none"
            wanted = {f"{kernel}_forward": layers * (1 + again)}
            wanted[f"{kernel}_backward"] = layers
        kernels = {x: n for x, n in found.kernels.items() if x not in HEADS}
        assert kernels == wanted
        assert not found.unknown["kernel"] and found.cycles["products with weights"]
    else:
        for kernel in ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"):
            assert (f'"{kernel}"' in program.as_text()) == (name in PAIRS)


def with_cuda():
    pytest.importorskip("jax_cuda13_plugin", reason="needs jax's CUDA plugin")


def with_libtpu():
    pytest.importorskip("libtpu", reason="compiling for TPUs needs libtpu")


def test_weights_are_gathered_before_their_products():
    """They are not passed on in parts, each with a product that adds to the result."""
    with_libtpu()
    machine = targets.find("v5e-16")
    mesh = sharding.make_mesh(config.Mesh(data=1, fsdp=16), machine.devices)
    rows = NamedSharding(mesh, sharding.ROWS)
    tokens = jax.ShapeDtypeStruct((256, 2048, 1024), jnp.bfloat16, sharding=rows)
    split = NamedSharding(mesh, P("fsdp"))
    weight = jax.ShapeDtypeStruct((1024, 2816), jnp.bfloat16, sharding=split)
    cycles = []
    for options in ({}, sharding.compiler_options(mesh)):
        product = jax.jit(jnp.matmul, out_shardings=rows, compiler_options=options)
        text = product.lower(tokens, weight).compile().as_text()
        assert ("collective-permute" in text) == (not options)
        cycles.append(sum(estimate(text, machine.chip).cycles.values()))
    assert cycles[0] > 5 * cycles[1]


@pytest.mark.parametrize("name", (*PAIRS, *LINEAR))
def test_the_smallest_preset_compiles_and_takes_at_most_the_recorded_cycles(name):
    """Only the version of jax that recorded the cycles is compared with them."""
    with_libtpu()
    step = compiled_preset(name, "tiny", "v5e-4", separate=True)
    check(step)
    recorded = json.loads(RECORDED.read_text())
    if recorded["made by"]["jax"] == jax.__version__:
        found = estimate(step.program.as_text(), step.machine.chip)
        sums = {"high": found.cycles.total(), "low": found.low.total()}
        cycles = {**found.cycles, **sums}
        before = recorded[f"{name}:tiny"]
        ratios = {x: cycles[x] / 1e6 / before[f"Mcycles, {x}"] for x in WATCHED}
        assert max(ratios.values()) <= GROWTH, ratios


def test_a_step_that_does_not_fit_is_reported():
    """Weights and optimizer are not sharded; the report says what could shard them."""
    with_libtpu()
    options = preset("gpt", "tiny")
    report = plan.describe(dataclasses.replace(options, batch_size=2**18), "v5e-4")
    assert "memory of a chip    16 GB: it does NOT fit: mesh.fsdp splits" in report
    assert "memory a device     over" in report and "optimizer" in report
    assert report.splitlines()[-1].startswith("RESOURCE_EXHAUSTED")


def test_peak_is_that_of_the_chips_that_the_mesh_has():
    with_libtpu()
    options = dataclasses.replace(preset("gpt", "tiny"), mesh=config.Mesh(data=2))
    report = plan.describe(options, "v5e-4")
    assert "of v5e-4, by its compiler; 2 of its chips idle" in report
    flops = float(re.search(r"^FLOPs a step +(\S+)", report, re.M)[1])
    seconds = float(re.search(r"^FLOPs by formula at peak .* (\S+)", report, re.M)[1])
    assert seconds == pytest.approx(flops / 2 / 197e12, rel=1e-2)


@pytest.mark.parametrize(
    "kind, needed, answer",
    [
        ("TPU v5e", 15.9e9, "16 GB: it fits"),
        ("TPU v5e", 16.1e9, "16 GB: it just fits"),
        ("TPU v5e", None, "16 GB: it does NOT fit"),
        ("H200", 141.1e9, "141 GB: it does NOT fit"),
    ],
)
def test_what_a_compiler_for_tpus_accepts_fits(kind, needed, answer):
    (chip,) = (x for x in chips.CHIPS if x.name == kind)
    found = plan._chip_memory(targets.Target("", chip, []), needed)
    assert found.startswith(f"memory of a chip    {answer}")


def test_features_lie_along_the_lanes_of_a_tpu():
    """In each block its input, four products that remat may keep, and the hidden layer,
    and their gradients."""
    with_libtpu()
    machine = targets.find("v5e-4")
    mesh = config.Mesh(data=1, fsdp=len(machine.devices))
    options = dataclasses.replace(preset("gpt", "tiny"), mesh=mesh)
    program = build_program(options, sharding.make_mesh(mesh, machine.devices))
    text = program.lower((options.batch_size, options.model.length)).as_text()
    found = [line for line in text.splitlines() if "@LayoutConstraint" in line]
    assert len(found) == 2 * options.model.depth * 6, found


@pytest.mark.parametrize("name, turned", [("gpt", 2), ("diff_sym", 1)])
def test_whole_tiles_of_heads_are_turned_and_normalised_by_kernels(name, turned):
    """Forward and backward, per layer; keys that equal the queries are not turned."""
    with_libtpu()
    mesh = config.Mesh(data=1, fsdp=4)
    machine = targets.find("v5e-4")
    options = preset(name, "tiny", {"width": 256, "heads": 1, "head_size": 128})
    options = dataclasses.replace(options, mesh=mesh)
    program = build_program(options, sharding.make_mesh(mesh, machine.devices))
    text = program.lower((options.batch_size, options.model.length)).as_text()
    depth, normed = options.model.depth, int(name != "gpt")
    counts = 2 * turned * depth, normed * depth, normed * depth
    assert tuple(text.count(f'kernel_name = "{x}"') for x in HEADS) == counts


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5p-4", "v6e-4"])
@pytest.mark.parametrize("name", (*PAIRS, *LINEAR))
def test_the_smallest_preset_compiles_for_other_tpus(name, target):
    with_libtpu()
    check(compiled_preset(name, "tiny", target))


@pytest.mark.slow
@pytest.mark.parametrize("name", (*PAIRS, *LINEAR))
def test_the_smallest_preset_compiles_for_gpus(name):
    with_cuda()
    check(compiled_preset(name, "tiny", "h200-4"))


@pytest.mark.slow
def test_a_gpu_reads_no_array_twice_where_once_is_enough(monkeypatch):
    """Logits whose exponentials are summed in one pass.

    The output of the second map is read once for its part of all gradients, and once
    for the gradient of λ.
    """
    with_cuda()
    monkeypatch.setattr(loss, "LARGEST", 2**17)
    monkeypatch.setattr(loss, "ON_GPU", 2**17)
    change = {"width": 256, "depth": 1, "heads": 2, "dtype": "bfloat16"}
    options = preset("diff_sym", "tiny", change)
    step = compiled(options, targets.find("h200-1"))
    program = parse(step.as_text())
    lines = {x.name: x for part in program.values() for x in part}
    (branch,) = (x for x in lines.values() if x.operation == "conditional")
    assert SCOPE in branch.rest and RARE in branch.rest
    given = [z for x in branch.operands[1:] for z in lines[x].operands]
    read = buffers(" ".join(lines[x].shape for x in given))
    assert max(read, key=lambda array: array.bytes).dtype == "bf16"
    lines = lines.values()
    forward = next(x.name for x in lines if "mosaic_gpu" in x.rest)
    second = f"%{forward}), index=1"
    (output,) = (x.name for x in lines if x.rest.startswith(second))
    readers = [x for x in lines if output in x.operands]
    assert [x.operation for x in readers] == ["fusion"]


@pytest.mark.slow
@pytest.mark.parametrize("name", (*PAIRS, *LINEAR))
def test_a_billion_parameters_fit_64_chips(name):
    with_libtpu()
    check(compiled_preset(name, "1b", "v5e-64"))
