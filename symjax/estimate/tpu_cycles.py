"""Estimated cycles of a program compiled for a TPU, by the part of the step.

The TPU compiler writes "estimated_cycles" on every fusion, copy and convolution. It is
its cost model: close for products (2048³ in bfloat16: 1.09 of the peak's cycles), and
pessimistic where memory is the limit (2.5 times for a reduction of 1 GiB). It says
nothing about collectives, which overlap with the rest, and nothing about kernels: those
count by the FLOPs and bytes that they declare, at peak, whichever takes longer.

So there are two sums. The high one is the compiler's. In the low one an operation that
is no product counts by the bytes that it moves at the chip's bandwidth, where that is
less.
"""

import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from symjax.attention.core.meshes import RARE
from symjax.estimate.hlo import Instruction, buffers, computations, total
from symjax.models.chips import Chip
from symjax.training.loss import SCOPE

PARTS = ("attention", "products with weights", "copies", "other")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_LABEL = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r'custom_call_target="([^"]*)"')
_DECLARED = re.compile(r'"cost_estimate":\{([^}]*)\}')
_NUMBER = re.compile(r'"(\w+)":"?(\d+)')
_COUNTED = ("fusion", "convolution", "sort", "custom-call")


class Estimate(NamedTuple):
    """Of one run on one chip.

    Attributes:
        cycles: by part, the high sum; kernels are part of attention.
        low: the low sum, by part.
        kernels: how often each hand-written kernel runs.
        unknown: operations that carry no estimate, by kind or, of calls, by name.
    """

    cycles: Counter
    low: Counter
    kernels: Counter
    unknown: Counter


def estimate(text: str, chip: Chip) -> Estimate:
    """Of a compiled program, by its text (`as_text()`), on a TPU."""
    flops, bandwidth = chip.per_cycle, chip.bandwidth / chip.clock
    program = computations(text)
    shapes = {x.name: x.shape for part in program.values() for x in part}

    def moved(x: Instruction) -> int:
        """Bytes that an instruction reads and writes in the chip's main memory."""
        around = x.shape, *(shapes.get(y, "") for y in x.operands)
        arrays = buffers(" ".join(around))
        return sum(array.bytes for array in arrays if not array.on_chip)

    def measure(x: Instruction) -> Counter | None:
        if x.operation == "custom-call" and "tpu_custom_call" in x.rest:
            declared = _DECLARED.search(x.rest)
            cost = dict(_NUMBER.findall(declared[1])) if declared else {}
            times = (
                int(cost.get("flops", 0)) / flops,
                int(cost.get("bytes_accessed", 0)) / bandwidth,
            )
            return Counter(
                {
                    ("cycles", "attention"): max(times),
                    ("low", "attention"): max(times),
                    ("kernel", x.name.split(".")[0]): 1,
                    ("unknown", "kernel"): int(not cost),
                }
            )
        if cycles := _CYCLES.search(x.rest):
            fused = program.get(x.fusion, []) if x.fusion else [x]
            high = low = int(cycles[1])
            if not _multiplies(fused):
                low = min(high, moved(x) / bandwidth)
            part = part_of(x, fused)
            return Counter({("cycles", part): high, ("low", part): low})
        if x.operation in _COUNTED:
            called = _CALLED.search(x.rest)
            return Counter({("unknown", called[1] if called else x.operation): 1})
        return None

    found = total(program, measure, of_branches)

    def of(kind: str) -> Counter:
        return Counter({key[1]: n for key, n in found.items() if key[0] == kind and n})

    return Estimate(*map(of, ("cycles", "low", "kernel", "unknown")))


def of_branches(condition: Instruction) -> Callable:
    """The cheaper one where the other is for rare cases; else the one that takes
    longer, for which other devices wait."""
    label = _LABEL.search(condition.rest)
    return min if label and RARE in label[1] else max


def part_of(x: Instruction, fused: list[Instruction]) -> str:
    """Attention is what runs inside a `shard_map`, beside the losses.

    Args:
        fused: the instructions of a fusion; another one by itself.
    """
    label = _LABEL.search(x.rest)
    if label and "shard_map" in label[1] and SCOPE not in label[1]:
        return "attention"
    if _multiplies(fused):
        return "products with weights"
    moves = ("copy", "transpose", "reshape", "bitcast", "parameter", "slice", "tuple")
    if all(y.operation.startswith(moves) for y in fused):
        return "copies"
    return "other"


def _multiplies(fused: list[Instruction]) -> bool:
    return any(y.operation in ("convolution", "dot") for y in fused)
