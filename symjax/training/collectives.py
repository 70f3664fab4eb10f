"""What devices send each other in a compiled program, read from its text.

XLA prints a program as computations of one instruction a line. A collective inside the
body of a loop runs as often as the loop does, and `cost_analysis` counts it once; so
the text is read here, loop by loop.
"""

import math
import re
from collections import Counter
from typing import NamedTuple

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
BITS = {"pred": 8, "s4": 4, "u4": 4, "token": 0}  # others end in their number of bits


class Traffic(NamedTuple):
    """What one step sends, by kind of collective."""

    sent: Counter  # bytes that a device sends
    count: Counter  # times that it is run
    unknown_loops: int  # whose trip count is not in the text: counted as one trip


class _Instruction(NamedTuple):
    name: str
    shape: str
    operation: str
    rest: str  # operands and attributes


_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(body|to_apply|calls|called_computations)=\{?%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TWO = re.compile(r"(?:true|false)_computation=%?([\w.\-]+)")


def traffic(text: str, devices: int) -> Traffic:
    """Bytes that a device sends in one run of a compiled program (`as_text()`).

    With n devices in a group and R the bytes of a result, a ring sends R(n−1)/n for an
    all-gather or an all-to-all, 2R(n−1)/n for an all-reduce, R(n−1) for a
    reduce-scatter, and a permutation sends R. The body of a loop counts as often as its
    `known_trip_count` says, and of the branches of a condition that which sends most.

    Args:
        devices: of the program: the size of a group where the text names none.
    """
    computations, entry = _computations(text)
    return _of(entry, computations, devices, {})


def _computations(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    """Instructions by the name of their computation, and the name of the first."""
    found: dict[str, list[_Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = found.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (parts := _LINE.match(line)):
            current.append(_Instruction(*parts.groups()))
    return found, entry


def _of(
    name: str,
    computations: dict[str, list[_Instruction]],
    devices: int,
    known: dict[str, Traffic],
) -> Traffic:
    """The traffic of one computation and those it calls."""
    if name in known:
        return known[name]
    sent, count, unknown = Counter(), Counter(), 0
    for instruction in computations.get(name, []):
        kind = instruction.operation.removesuffix("-start")
        if kind in KINDS:
            size = _sent(kind, instruction, devices)
            sent[kind] += size
            count[kind] += size > 0  # a group of one device sends nothing
            continue
        trips = 1
        if instruction.operation == "while":
            found = re.search(r'known_trip_count\D*"?(\d+)', instruction.rest)
            unknown += found is None
            trips = int(found[1]) if found else 1
        parts = [
            _of(called, computations, devices, known) for called in _called(instruction)
        ]
        if instruction.operation == "conditional":
            parts = sorted(parts, key=lambda part: part.sent.total())[-1:]
        for part in parts:
            for total, more in ((sent, part.sent), (count, part.count)):
                for each, number in more.items():
                    total[each] += trips * number
            unknown += part.unknown_loops
    known[name] = Traffic(sent, count, unknown)
    return known[name]


def _called(instruction: _Instruction) -> list[str]:
    """The computations that an instruction runs: what a reduction adds is none."""
    names = [name for _, name in _CALLED.findall(instruction.rest)]
    for group in _BRANCHES.findall(instruction.rest):
        names += [name.strip().lstrip("%") for name in group.split(",")]
    return names + _TWO.findall(instruction.rest)


def _sent(kind: str, instruction: _Instruction, devices: int) -> int:
    group = _group(instruction.rest, devices)
    arrays = _ARRAY.findall(instruction.shape)
    if instruction.operation.endswith("-start") and kind != "all-reduce":
        # (operands, results, flags): of as many results as operands, the results
        arrays = [a for a in arrays if a[1] or a[0] != "u32"]
        arrays = arrays[len(arrays) // 2 :]
    size = sum(map(_bytes, arrays))
    if kind == "collective-permute":
        return size
    if kind == "reduce-scatter":
        return size * (group - 1)
    return size * (group - 1) * (2 if kind == "all-reduce" else 1) // group


def _group(rest: str, devices: int) -> int:
    """Devices that take part together, from either notation of XLA."""
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=", rest):
        return int(found[1])
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return len(found[1].split(","))
    return devices


def _bytes(array: tuple[str, str]) -> int:
    kind, shape = array
    bits = BITS[kind] if kind in BITS else int(re.findall(r"\d+", kind)[0])
    elements = math.prod(int(n) for n in shape.split(",") if n)
    return math.ceil(elements * bits / 8)
