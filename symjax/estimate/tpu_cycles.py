"""Estimated cycles of a program compiled for a TPU, by part of the step.

The TPU compiler writes "estimated_cycles" on every fusion, copy and convolution, from
its cost model. These numbers are close for matrix products (2048³ in bfloat16: 1.09
times the cycles at peak) and too high for operations that memory limits (2.5 times for
a reduction of 1 GiB). So there are two sums. The high sum adds the compiler's numbers.
In the low sum an operation other than a matrix product counts as its bytes at the
chip's bandwidth, if that is less.

The compiler writes nothing on collectives, which overlap with other operations, and
nothing on hand-written kernels. In both sums a kernel counts as the larger of its
declared FLOPs at peak and its declared bytes at the chip's bandwidth.
"""

import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from symjax.attention.core.meshes import RARE
from symjax.estimate.hlo import Instruction, buffers, parse, sum_over_run
from symjax.models.chips import Chip
from symjax.training.loss import SCOPE

PARTS = ("attention", "products with weights", "copies", "other")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_LABEL = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r'custom_call_target="([^"]*)"')
_DECLARED = re.compile(r'"cost_estimate":\{([^}]*)\}')
_NUMBER = re.compile(r'"(\w+)":"?(\d+)')
_COUNTED = ("fusion", "convolution", "sort", "custom-call")


class CycleEstimate(NamedTuple):
    """Cycles of one run on one chip.

    Attributes:
        cycles: the high sum by part; hand-written kernels count as attention.
        low: the low sum by part.
        kernels: number of runs of each hand-written kernel.
        unknown: number of operations without an estimate, by kind; custom calls by the
            name of their target.
    """

    cycles: Counter
    low: Counter
    kernels: Counter
    unknown: Counter


def estimate(text: str, chip: Chip) -> CycleEstimate:
    """Return the estimated cycles of a program compiled for a TPU.

    Args:
        text: `as_text()` of the compiled program.
    """
    flops, bandwidth = chip.per_cycle, chip.bandwidth / chip.clock
    program = parse(text)
    shapes = {x.name: x.shape for part in program.values() for x in part}

    def moved(x: Instruction) -> int:
        """Return the bytes that an instruction reads and writes in main memory."""
        operands = (shapes.get(y, "") for y in x.operands)
        arrays = buffers(" ".join((x.shape, *operands)))
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

    sums = sum_over_run(program, measure, choose_branch)

    def select(kind: str) -> Counter:
        return Counter({key[1]: n for key, n in sums.items() if key[0] == kind and n})

    return CycleEstimate(*map(select, ("cycles", "low", "kernel", "unknown")))


def choose_branch(condition: Instruction) -> Callable:
    """Return `min` or `max`, which picks the branch of a condition that counts.

    The cheaper branch counts if the condition is labelled `RARE`: the other branch is
    then for rare cases. Otherwise the more expensive branch counts, since other devices
    wait for it.
    """
    label = _LABEL.search(condition.rest)
    return min if label and RARE in label[1] else max


def part_of(x: Instruction, fused: list[Instruction]) -> str:
    """Return the part of the step (`PARTS`) that an instruction belongs to.

    Attention is everything inside a `shard_map`, except the losses.

    Args:
        fused: the instructions of a fusion; [x] for other instructions.
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
