"""Estimated cycles of a program compiled for a TPU, by the part of the step.

The TPU compiler writes "estimated_cycles" on every fusion, copy and convolution. It is
its cost model: close for products (2048³ in bfloat16: 1.09 of the peak's cycles), and
pessimistic where memory is the limit (2.5 times for a reduction of 1 GiB). It says
nothing about collectives, which overlap with the rest, and nothing about kernels: those
count by the FLOPs and bytes that they declare, at peak, whichever takes longer.
"""

import re
from collections import Counter
from typing import NamedTuple

from symjax.training.compiled import Computations, Instruction, total

PARTS = ("attention", "products with weights", "copies", "other")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_LABEL = re.compile(r'op_name="([^"]*)"')
_CALLS = re.compile(r"\bcalls=%?([\w.\-<>]+)")
_DECLARED = re.compile(r'"cost_estimate":\{([^}]*)\}')
_NUMBER = re.compile(r'"(\w+)":"?(\d+)')
_COUNTED = ("fusion", "convolution", "sort", "custom-call")


class Estimate(NamedTuple):
    """Of one run on one chip.

    Attributes:
        cycles: by part; kernels are part of attention.
        kernels: how often each hand-written kernel runs.
        unknown: operations that carry no estimate, by kind.
    """

    cycles: Counter
    kernels: Counter
    unknown: Counter


def estimate(text: str, *, flops: float, bandwidth: float) -> Estimate:
    """
    Args:
        text: of the compiled program (`as_text()`).
        flops, bandwidth: of the chip, in operations and bytes a cycle.
    """

    def measure(x: Instruction, computations: Computations) -> Counter | None:
        if x.operation == "custom-call" and "tpu_custom_call" in x.rest:
            cost = dict(_NUMBER.findall(found[1])) if (found := _declared(x)) else {}
            times = (
                int(cost.get("flops", 0)) / flops,
                int(cost.get("bytes_accessed", 0)) / bandwidth,
            )
            return Counter(
                {
                    ("cycles", "attention"): max(times),
                    ("kernel", re.sub(r"\.\d+$", "", x.name)): 1,
                    ("unknown", "kernel"): int(not cost),
                }
            )
        if cycles := _CYCLES.search(x.rest):
            return Counter({("cycles", _part(x, computations)): int(cycles[1])})
        if x.operation in _COUNTED:
            return Counter({("unknown", x.operation): 1})
        return None

    found = total(text, measure, choose=min)  # a branch for rare cases does not count

    def of(kind: str) -> Counter:
        return Counter(
            {
                key[1]: number
                for key, number in found.items()
                if key[0] == kind and number
            }
        )

    return Estimate(of("cycles"), of("kernel"), of("unknown"))


def _declared(kernel: Instruction) -> re.Match | None:
    return _DECLARED.search(kernel.rest)


def _part(x: Instruction, computations: Computations) -> str:
    """Attention is what runs inside a `shard_map`: nothing else of a model does."""
    label = _LABEL.search(x.rest)
    if label and "shard_map" in label[1]:
        return "attention"
    inside = _CALLS.search(x.rest)
    fused = computations.get(inside[1], []) if inside else [x]
    if any(y.operation in ("convolution", "dot") for y in fused):
        return "products with weights"
    moves = ("copy", "transpose", "reshape", "bitcast", "parameter", "slice", "tuple")
    if all(y.operation.startswith(moves) for y in fused):
        return "copies"
    return "other"
