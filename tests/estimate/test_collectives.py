"""Bytes that devices send, counted in programs whose answer is known."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from symjax.estimate.collectives import traffic
from symjax.models.chips import CHIPS

NUMBERS = 3 * 5 * 4  # bytes of a device's part


def text_of(function, **axes) -> str:
    axes = axes or {"x": 4}
    shape, types = tuple(axes.values()), (AxisType.Auto,) * len(axes)
    devices = jax.devices()[: math.prod(shape)]
    mesh = jax.make_mesh(shape, tuple(axes), axis_types=types, devices=devices)
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False
    )
    return jax.jit(mapped).lower(jnp.zeros((12, 5))).compile().as_text() or ""


def test_a_loop_counts_as_often_as_it_runs():
    def inner(x, _):
        return jax.lax.psum(x, "x") * 0.5, None

    def outer(x, _):
        x, _ = jax.lax.scan(inner, x, None, length=3)
        return jax.lax.ppermute(x, "x", [(0, 1), (1, 2)]), None

    found = traffic(text_of(lambda x: jax.lax.scan(outer, x, None, length=7)[0]), 4)
    assert found.count == {"all-reduce": 21, "collective-permute": 7}
    # a ring: three quarters out and three quarters back
    assert found.sent["all-reduce"] == 21 * NUMBERS * 3 // 4 * 2
    assert found.sent["collective-permute"] == 7 * NUMBERS
    assert found.unknown_loops == 0


def test_every_kind_of_collective_is_counted_once():
    def all_kinds(x):
        four = jnp.tile(x, (4, 1))
        return (
            jax.lax.all_gather(x, "x"),
            jax.lax.psum_scatter(four, "x", tiled=True),
            jax.lax.all_to_all(four, "x", 0, 0, tiled=True),
        )

    found = traffic(text_of(all_kinds), 4)
    for kind in ("all-gather", "reduce-scatter", "all-to-all"):
        assert (found.count[kind], found.sent[kind]) == (1, 3 * NUMBERS), kind


def test_of_two_axes_of_a_mesh_the_one_that_takes_part_counts():
    """Two of eight devices take part, in either order of the axes."""

    def both(x):
        return jax.lax.psum(x, "x"), jax.lax.all_gather(x, "x")

    for axes in ({"x": 2, "y": 4}, {"y": 4, "x": 2}):
        found = traffic(text_of(both, **axes), 8)
        part = 2 * NUMBERS  # 12 rows over two devices
        assert found.sent == {"all-reduce": part, "all-gather": part}


@pytest.mark.parametrize(
    ("group", "size"),
    [
        ("[32,2]<=[64]", 2),
        ("{{0,32},{1,33}}", 2),
        ("mesh['fsdp'=32,'tensor'=2] {'tensor'}", 2),
        ("mesh['fsdp'=32,'tensor'=2] {'fsdp','tensor'}", 64),
        ("mesh['fsdp'=32,'tensor'=2] {'fsdp':(2)4,'tensor'}", 8),
        ("{}", 64),
    ],
)
def test_a_group_of_devices_is_read_in_every_notation(group, size):
    text = (
        "ENTRY %main (p: f32[256]) -> f32[256] {\n"
        f"  ROOT %r = f32[256]{{0}} all-reduce(%p), replica_groups={group}, "
        "to_apply=%add\n}"
    )
    assert traffic(text, 64).sent["all-reduce"] == 2 * 1024 * (size - 1) // size


WRITTEN = """
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(f32[] %a, f32[] %b)
}

%small (p: bf16[8,4]) -> bf16[8,4] {
  ROOT %r.1 = bf16[8,4]{1,0} all-reduce(%p), replica_groups=[4,2]<=[8], to_apply=%add
}

%large (p: bf16[8,4]) -> bf16[8,4] {
  %g = (bf16[8,4]{1,0}, bf16[16,4]{1,0:T(8,128)}) all-gather-start(%p), PAIRS
  %d = bf16[16,4]{1,0} all-gather-done(%g)
  ROOT %r.2 = bf16[8,4]{1,0} all-reduce(%p), replica_groups={}, to_apply=%add
}

%body (t: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %c = bf16[8,4]{1,0} conditional(%i, %x, %x), branch_computations={%small, %large}
}

%test (t: (s32[], bf16[8,4])) -> pred[] {
  ROOT %l = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: bf16[8,4]) -> bf16[8,4] {
  %w = (s32[], bf16[8,4]{1,0}) while(%t), condition=%test, body=%body TRIPS
}
"""


@pytest.mark.parametrize(
    ("trips", "times", "unknown"),
    [(', backend_config={"known_trip_count":{"n":"5"}}', 5, 0), ("", 1, 1)],
)
def test_the_larger_branch_counts_and_a_loop_of_unknown_length_is_told(
    trips, times, unknown
):
    pairs = "replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}"
    found = traffic(WRITTEN.replace("TRIPS", trips).replace("PAIRS", pairs), 8)
    assert found.sent["all-gather"] == times * 16 * 4 * 2 // 2
    assert found.sent["all-reduce"] == times * 2 * 8 * 4 * 2 * 7 // 8
    assert found.count == {"all-gather": times, "all-reduce": times}
    assert found.unknown_loops == unknown


def test_more_chips_than_a_group_has_send_over_the_network():
    chip = next(chip for chip in CHIPS if chip.name == "H100")
    inside, across = (
        chip.seconds(devices, flops=8e15, touched=3.35e12, sent=9e11)
        for devices in (8, 16)
    )
    compute = 1e15 / 989e12
    assert inside == pytest.approx((compute, 1.0, 2.0))
    assert across == pytest.approx((compute / 2, 1.0, 18.0))
