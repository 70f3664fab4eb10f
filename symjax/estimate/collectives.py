"""What devices send each other in a compiled program."""

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

# Axes of a mesh, and those, or parts of them, that a group is made of.
_BY_AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\] *\{([^}]*)\}")


class Traffic(NamedTuple):
    """What one step sends, by kind of collective."""

    sent: Counter  # bytes that a device sends
    count: Counter  # times that it is run
    unknown_loops: int  # whose trip count is not in the text: counted as one trip


def traffic(text: str, devices: int) -> Traffic:
    """Bytes that a device sends in one run of a compiled program (`as_text()`).

    With n devices in a group and R the bytes of a result, a ring sends R(n−1)/n for an
    all-gather or an all-to-all, 2R(n−1)/n for an all-reduce, R(n−1) for a
    reduce-scatter, and a permutation sends R. Of the branches of a condition that
    counts which sends most.

    Args:
        devices: of the program: the size of a group where the text names none.
    """

    def measure(instruction: Instruction) -> Counter | None:
        kind = instruction.operation.removesuffix("-start")
        if kind not in KINDS:
            return None
        size = _sent(kind, instruction, devices)
        # a group of one device sends nothing
        return Counter({("sent", kind): size, ("count", kind): int(size > 0)})

    found = hlo.total(hlo.computations(text), measure)
    sent, count = (
        Counter({kind: found[what, kind] for kind in KINDS if found[what, kind]})
        for what in ("sent", "count")
    )
    return Traffic(sent, count, found[hlo.UNKNOWN_LOOPS])


def _sent(kind: str, instruction: Instruction, devices: int) -> int:
    group = _group(instruction.rest, devices)
    arrays = hlo.buffers(instruction.shape)
    if instruction.operation.endswith("-start") and kind != "all-reduce":
        # (operands, results, flags): of as many results as operands, the results
        arrays = [a for a in arrays if a.dimensions or a.dtype != "u32"]
        arrays = arrays[len(arrays) // 2 :]
    size = sum(array.bytes for array in arrays)
    if kind == "collective-permute":
        return size
    if kind == "reduce-scatter":
        return size * (group - 1)
    return size * (group - 1) * (2 if kind == "all-reduce" else 1) // group


def _group(rest: str, devices: int) -> int:
    """Devices that take part together, from each notation of XLA."""
    if found := _BY_AXES.search(rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[axis]) for axis, part in parts)
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=", rest):
        return int(found[1])
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return len(found[1].split(","))
    return devices
