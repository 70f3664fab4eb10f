"""Estimated cycles of given programs, and of programs of the TPU compiler."""

import dataclasses
import importlib.util
from collections import Counter

import pytest

from symjax import config
from symjax.attention.core.meshes import RARE
from symjax.estimate import targets
from symjax.estimate.tpu_cycles import PARTS, estimate
from symjax.models.chips import Chip
from symjax.training import sharding
from symjax.training.loss import SCOPE
from symjax.training.step import build_program

PROGRAM = """\
HloModule jit_train

%fused_product (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %c = f32[8,8]{1,0} convolution(%p, %p), dim_labels=bf_io->bf
}

%fused_move (p.1: f32[8,8]) -> f32[8,8] {
  %p.1 = f32[8,8]{1,0} parameter(0)
  ROOT %t = f32[8,8]{1,0} transpose(%p.1), dimensions={1,0}
}

%body (s: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %s = (s32[], f32[8,8]) parameter(0)
  %a = f32[8,8]{1,0} fusion(%s), kind=kLoop, calls=%fused_product, \
metadata={op_name="jit(train)/shard_map/dot"}, backend_config={"estimated_cycles":"7"}
  %k.1 = f32[8,8]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", \
backend_config={"cost_estimate":{"flops":"600","bytes_accessed":"50"}}
  ROOT %r = (s32[], f32[8,8]) tuple(%s, %k.1)
}

%limit (s.1: (s32[], f32[8,8])) -> pred[] {
  %s.1 = (s32[], f32[8,8]) parameter(0)
  %n = s32[]{:T(128)} constant(5)
  ROOT %less = pred[] compare(%s.1, %n), direction=LT
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %w = (s32[], f32[8,8]) while(%x), condition=%limit, body=%body
  %b = f32[8,8]{1,0} fusion(%x), kind=kOutput, calls=%fused_product, \
metadata={op_name="jit(train)/dot"}, backend_config={"estimated_cycles":"100"}
  %m = f32[8,8]{1,0} fusion(%b), kind=kLoop, calls=%fused_move, \
backend_config={"estimated_cycles":"11"}
  %copy.1 = f32[8,8]{1,0} copy(%m), backend_config={"estimated_cycles":"2"}
  %g = f32[8,8]{1,0} custom-call(%m), custom_call_target="AsyncCollectiveStart"
  ROOT %u = f32[8,8]{1,0} fusion(%m), kind=kLoop, calls=%fused_move
}
"""


def chip(*, flops: int, bandwidth: float) -> Chip:
    """Return a chip with so many operations and bytes per cycle, one cycle per
    second."""
    return Chip("", flops, 0, bandwidth, 0, 1, 0, flops)


def test_a_loop_counts_as_often_as_it_runs_and_every_part_is_named():
    found = estimate(PROGRAM, chip(flops=10, bandwidth=1))
    assert found.cycles == Counter(
        {
            "attention": 5 * (7 + 60),  # the kernel is limited by its FLOPs
            "products with weights": 100,
            "copies": 11 + 2,
        }
    )
    assert found.kernels == {"k": 5}


def test_the_low_sum_counts_bytes_where_nothing_is_multiplied():
    """A copy moves 2 · 8 · 8 floats of 4 bytes: 512 bytes take 8 cycles at 64 a
    cycle."""
    found = estimate(PROGRAM, chip(flops=10, bandwidth=64))
    assert found.low["products with weights"] == found.cycles["products with weights"]
    assert found.low["copies"] == 8 + 2  # one copy is estimated at less than its bytes
    on_chip = PROGRAM.replace(
        "f32[8,8]{1,0} fusion(%b)", "f32[8,8]{1,0:S(1)} fusion(%b)"
    )
    assert estimate(on_chip, chip(flops=10, bandwidth=64)).low["copies"] == 4 + 2


@pytest.mark.parametrize(("label", "cycles"), [("visit", 100), (RARE, 11)])
def test_the_dearer_branch_counts_but_where_it_is_for_rare_cases(label, cycles):
    """A device of a ring that skips keys waits for one that does not."""
    branches = """
%dear (p.2: f32[8,8]) -> f32[8,8] {
  %p.2 = f32[8,8]{1,0} parameter(0)
  ROOT %b = f32[8,8]{1,0} fusion(%p.2), kind=kOutput, calls=%fused_product, \
backend_config={"estimated_cycles":"100"}
}

%cheap (p.3: f32[8,8]) -> f32[8,8] {
  %p.3 = f32[8,8]{1,0} parameter(0)
  ROOT %m = f32[8,8]{1,0} fusion(%p.3), kind=kLoop, calls=%fused_move, \
backend_config={"estimated_cycles":"11"}
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  ROOT %c = f32[8,8]{1,0} conditional(%x, %x, %x), \
branch_computations={%cheap, %dear}, metadata={op_name="jit(train)/LABEL/cond"}
}
"""
    text = PROGRAM[: PROGRAM.index("ENTRY")] + branches.replace("LABEL", label)
    assert estimate(text, chip(flops=10, bandwidth=1)).cycles.total() == cycles


def test_what_has_no_estimate_is_named():
    found = estimate(PROGRAM, chip(flops=10, bandwidth=1))
    assert found.unknown == {"fusion": 1, "AsyncCollectiveStart": 1}


def test_a_kernel_that_moves_more_than_it_computes_counts_by_its_bytes():
    found = estimate(PROGRAM, chip(flops=1000, bandwidth=0.5))
    assert found.cycles["attention"] == 5 * (7 + 100)


@pytest.mark.parametrize("name", ["v5e-5", "v5e", "v5e-", "v9-4", "h200-3"])
def test_an_unknown_machine_is_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match=f"--target '{name}' is unknown.*v5e-N"):
        targets.find(name)


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is not None, reason="the compiler is installed"
)
def test_a_missing_compiler_is_one_line_that_says_what_to_install():
    with pytest.raises(ValueError, match="pip install 'jax.tpu.'") as error:
        targets.find("v5e-4")
    assert "\n" not in str(error.value)


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the wheel libtpu"
)
def test_a_training_step_compiles_for_a_tpu_with_cycles_in_every_part():
    machine = targets.find("v5e-4")
    model = config.Model(vocabulary=50, width=128, depth=2, heads=2, length=128)
    options = config.Config(
        model=model, batch_size=4, mesh=dataclasses.replace(config.Mesh(), fsdp=4)
    )
    mesh = sharding.make_mesh(options.mesh, machine.devices)
    step = build_program(options, mesh).lower((4, 128)).compile()
    found = estimate(step.as_text(), machine.chip)
    assert all(found.cycles[part] >= found.low[part] > 0 for part in PARTS)
    assert step.memory_analysis().temp_size_in_bytes > 0


def test_losses_in_a_shard_map_are_no_attention():
    text = PROGRAM.replace("shard_map/dot", f"shard_map/{SCOPE}/dot")
    found = estimate(text, chip(flops=10, bandwidth=1))
    assert found.cycles["attention"] == 5 * 60
    assert found.cycles["products with weights"] == 100 + 5 * 7
