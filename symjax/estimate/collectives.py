"""Bytes that devices send each other in a run of a compiled program."""

import math
import re
from collections import Counter
from typing import NamedTuple

from symjax.estimate import hlo
from symjax.estimate.hlo import Instruction

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)

# Groups in mesh notation: all axes of the mesh with their sizes, then the axes that a
# group spans. `'axis':(i)n` means a part of that axis with n devices.
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\] *\{([^}]*)\}")


class Traffic(NamedTuple):
    """Traffic of one device in one step, by kind of collective.

    Attributes:
        sent: bytes that the device sends.
        count: number of times that the collective runs.
        unknown_loops: number of loops whose trip count the text does not say; they are
            counted as one trip.
    """

    sent: Counter
    count: Counter
    unknown_loops: int


def traffic(text: str, devices: int) -> Traffic:
    """Return what one device sends in one run of a compiled program.

    With n devices in a group and R bytes of the result, a ring sends R(n−1)/n for an
    all-gather or an all-to-all, 2R(n−1)/n for an all-reduce and R(n−1) for a
    reduce-scatter; a permutation sends R. Of the branches of a condition, the one that
    sends most counts.

    Args:
        text: `as_text()` of the program.
        devices: number of devices of the program, which is the size of a group if the
            text names no groups.
    """

    def measure(instruction: Instruction) -> Counter | None:
        kind = instruction.operation.removesuffix("-start")
        if kind not in KINDS:
            return None
        size = _sent_bytes(kind, instruction, devices)
        # a group of one device sends nothing
        return Counter({("sent", kind): size, ("count", kind): int(size > 0)})

    sums = hlo.sum_over_run(hlo.parse(text), measure)
    sent, count = (
        Counter({kind: sums[what, kind] for kind in KINDS if sums[what, kind]})
        for what in ("sent", "count")
    )
    return Traffic(sent, count, sums[hlo.UNKNOWN_LOOPS])


def _sent_bytes(kind: str, instruction: Instruction, devices: int) -> int:
    """Return the bytes that a device sends in one run of a collective."""
    group = _group_size(instruction.rest, devices)
    arrays = hlo.buffers(instruction.shape)
    if instruction.operation.endswith("-start") and kind != "all-reduce":
        # The shape is (operands, results, flags), with as many results as operands.
        arrays = [a for a in arrays if a.dimensions or a.dtype != "u32"]
        arrays = arrays[len(arrays) // 2 :]
    size = sum(array.bytes for array in arrays)
    if kind == "collective-permute":
        return size
    if kind == "reduce-scatter":
        return size * (group - 1)
    return size * (group - 1) * (2 if kind == "all-reduce" else 1) // group


def _group_size(rest: str, devices: int) -> int:
    """Return the number of devices of a group, in any of XLA's three notations."""
    if match := _MESH_GROUPS.search(rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", match[2])
        return math.prod(int(part or sizes[axis]) for axis, part in parts)
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]<=", rest):
        return int(match[1])
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return len(match[1].split(","))
    return devices
