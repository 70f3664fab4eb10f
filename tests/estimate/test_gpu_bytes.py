"""Bytes that a GPU program moves, compared with counts by hand."""

import pytest

from symjax.attention.core.meshes import RARE
from symjax.estimate.gpu_bytes import bytes_by_part

PROGRAM = """\
HloModule jit_train

%fused_product (p: bf16[6,5], q: bf16[5,7]) -> bf16[6,7] {
  %p = bf16[6,5]{1,0} parameter(0)
  %q = bf16[5,7]{1,0} parameter(1)
  ROOT %d = bf16[6,7]{1,0} dot(%p, %q), lhs_contracting_dims={1}
}

%fused_sums (p.1: bf16[6,7]) -> (f32[6], bf16[6,7]) {
  %p.1 = bf16[6,7]{1,0} parameter(0)
  %wide = f32[6,7]{1,0} convert(%p.1)
  %sums = f32[6]{0} reduce(%wide), dimensions={1}, to_apply=%add
  %twice = bf16[6,7]{1,0} add(%p.1, %p.1)
  ROOT %both = (f32[6]{0}, bf16[6,7]{1,0}) tuple(%sums, %twice)
}

%fused_slice (p.2: f32[3,11], i: s32[]) -> f32[1,11] {
  %p.2 = f32[3,11]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %s = f32[1,11]{1,0} dynamic-slice(%p.2, %i, %i)
}

%fused_update (p.3: f32[3,11], u: f32[1,11], i.1: s32[]) -> f32[3,11] {
  %p.3 = f32[3,11]{1,0} parameter(0)
  %u = f32[1,11]{1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  ROOT %w = f32[3,11]{1,0} dynamic-update-slice(%p.3, %u, %i.1, %i.1)
}

%body (state: (s32[], f32[3,11])) -> (s32[], f32[3,11]) {
  %state = (s32[], f32[3,11]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%state), index=0
  %stack = f32[3,11]{1,0} get-tuple-element(%state), index=1
  %row = ((f32[3,11], s32[]), f32[1,11], u32[]) fusion-start(%stack, %n), \
calls=%fused_slice
  %row.1 = f32[1,11]{1,0} fusion-done(%row)
  %stack.1 = f32[3,11]{1,0} fusion(%stack, %row.1, %n), calls=%fused_update
  ROOT %next = (s32[], f32[3,11]{1,0}) tuple(%n, %stack.1)
}

%limit (state.1: (s32[], f32[3,11])) -> pred[] {
  %state.1 = (s32[], f32[3,11]{1,0}) parameter(0)
  ROOT %less = pred[] compare(%state.1, %state.1), direction=LT
}

%rare (x.1: bf16[6,7]) -> (f32[6], bf16[6,7]) {
  %x.1 = bf16[6,7]{1,0} parameter(0)
  ROOT %again = (f32[6]{0}, bf16[6,7]{1,0}) fusion(%x.1), calls=%fused_sums
}

%common (x.2: bf16[6,7]) -> bf16[6,7] {
  ROOT %x.2 = bf16[6,7]{1,0} parameter(0)
}

ENTRY %main (a: bf16[6,5], b: bf16[5,7], c: (s32[], f32[3,11])) -> bf16[6,7] {
  %a = bf16[6,5]{1,0} parameter(0)
  %b = bf16[5,7]{1,0} parameter(1)
  %c = (s32[], f32[3,11]{1,0}) parameter(2)
  %one = bf16[6,7]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused_product
  %two = (bf16[6,7]{1,0}, s8[4096]{0}) custom-call(%a, %b), \
custom_call_target="__cublas$lt$matmul"
  %three = bf16[6,7]{1,0} get-tuple-element(%two), index=0
  %sums.1 = (f32[6]{0}, bf16[6,7]{1,0}) fusion(%one), calls=%fused_sums
  %w.1 = (s32[], f32[3,11]{1,0}) while(%c), condition=%limit, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %copy.1 = bf16[6,7]{0,1} copy(%three)
  %may = bf16[6,7]{1,0} conditional(%three, %three, %three), \
branch_computations={%common, %rare}, metadata={op_name="LABEL/cond"}
  ROOT %k = bf16[6,7]{1,0} custom-call(%copy.1), custom_call_target="mosaic_gpu_v2"
}
"""
FUSIONS = """\
HloModule jit_others

%renamed (p: f32[33], i: s32[]) -> f32[1,11] {
  %p = f32[33]{0} parameter(0)
  %i = s32[] parameter(1)
  %b = f32[3,11]{1,0} bitcast(%p)
  ROOT %s = f32[1,11]{1,0} dynamic-slice(%b, %i, %i)
}

%rows (p.1: f32[9,11], n: s32[2]) -> f32[2,11] {
  %p.1 = f32[9,11]{1,0} parameter(0)
  %n = s32[2]{0} parameter(1)
  ROOT %g = f32[2,11]{1,0} gather(%p.1, %n), slice_sizes={1,11}
}

%halves (p.2: f32[9,11]) -> f32[9,22] {
  %p.2 = f32[9,11]{1,0} parameter(0)
  %s.1 = f32[9,11]{1,0} slice(%p.2), slice={[0:9], [0:11]}
  %s.2 = f32[9,11]{1,0} slice(%p.2), slice={[0:9], [0:11]}
  ROOT %c = f32[9,22]{1,0} concatenate(%s.1, %s.2), dimensions={1}
}

%scattered (p.3: f32[9,11], n.1: s32[2], u: f32[2,11]) -> (f32[9,11]) {
  %p.3 = f32[9,11]{1,0} parameter(0)
  %n.1 = s32[2]{0} parameter(1)
  %u = f32[2,11]{1,0} parameter(2)
  %w = f32[9,11]{1,0} scatter(%p.3, %n.1, %u), to_apply=%add
  ROOT %t = (f32[9,11]{1,0}) tuple(%w)
}

%called (p.4: bf16[6,5], q: bf16[5,7]) -> (bf16[6,7], s8[4096]) {
  %p.4 = bf16[6,5]{1,0} parameter(0)
  %q = bf16[5,7]{1,0} parameter(1)
  ROOT %m = (bf16[6,7]{1,0}, s8[4096]{0}) custom-call(%p.4, %q), \
custom_call_target="__cublas$lt$matmul"
}

ENTRY %main (a: bf16[6,5], b: bf16[5,7], x: f32[9,11], y: f32[33], i: s32[]) -> f32[] {
  %a = bf16[6,5]{1,0} parameter(0)
  %b = bf16[5,7]{1,0} parameter(1)
  %x = f32[9,11]{1,0} parameter(2)
  %y = f32[33]{0} parameter(3)
  %i.1 = s32[] parameter(4)
  %n.2 = s32[2]{0} constant({1, 2})
  %u.1 = f32[2,11]{1,0} constant({...})
  %k = LINE
}
"""
MAP, SIDES, SUMS = 6 * 7 * 2, (6 * 5 + 5 * 7) * 2, 6 * 4
ROW, NUMBER = 11 * 4, 4


@pytest.mark.parametrize("label", ("visit", RARE))
def test_arrays_count_once_an_operation_and_slices_as_slices(label):
    """Three trips read a row and write it back; a rare branch does not count."""
    trip = (ROW + NUMBER + ROW) + (ROW + NUMBER + ROW)
    sums = MAP + SUMS + MAP
    assert bytes_by_part(PROGRAM.replace("LABEL", label)) == {
        "products with weights": 2 * (SIDES + MAP),  # without the workspace of cuBLAS
        "attention": 2 * MAP,
        "copies": 2 * MAP,
        "other": sums + 3 * trip + (0 if label == RARE else sums),
    }


TABLE = 9 * 11 * 4


@pytest.mark.parametrize(
    ("line", "part", "moved"),
    [
        ("f32[1,11] fusion(%y, %i.1), calls=%renamed", "other", 2 * ROW + NUMBER),
        ("f32[2,11] fusion(%x, %n.2), calls=%rows", "other", 4 * ROW + 2 * NUMBER),
        ("f32[9,22] fusion(%x), calls=%halves", "other", 3 * TABLE),
        (
            "(f32[9,11]) fusion(%x, %n.2, %u.1), calls=%scattered",
            "other",
            2 * ROW + 2 * NUMBER + 2 * ROW,
        ),
        (
            "(bf16[6,7], s8[4096]) fusion(%a, %b), kind=kCustom, calls=%called",
            "products with weights",
            SIDES + MAP,
        ),
        ("f32[9,11] sort(%x), to_apply=%less", "other", 2 * TABLE),
        ("c64[9,6] fft(%x), fft_type=RFFT", "other", TABLE + 9 * 6 * 8),
        *(
            (f'f32[9,11] custom-call(%x), custom_call_target="{x}"', part, 2 * TABLE)
            for x, part in (
                ("__cudnn$fmhaSoftmax", "attention"),
                ("__gpu$xla.gpu.triton", "attention"),
                ("__cudnn$convForward", "products with weights"),
                ("__cub$DeviceRadixSort", "other"),
            )
        ),
    ],
)
def test_other_operations(line, part, moved):
    """Two halves of an array count as much as the array."""
    found = bytes_by_part(FUSIONS.replace("LINE", line))
    assert {x: n for x, n in found.items() if n} == {part: moved}
