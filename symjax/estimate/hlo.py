"""What a compiled program executes, read from its text.

XLA prints a program as computations of one instruction a line. An instruction in the
body of a loop runs as often as the loop does, and `cost_analysis` counts it once; so
the text is read here, loop by loop.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple


class Instruction(NamedTuple):
    name: str
    shape: str
    operation: str
    rest: str  # operands and attributes

    @property
    def operands(self) -> list[str]:
        """Their names."""
        return _OPERAND.findall(self.rest.split(")", 1)[0])

    @property
    def fusion(self) -> str | None:
        """The name of the computation that it runs as one operation."""
        calls = _CALLS.search(self.rest)
        return calls and calls[1]


class Buffer(NamedTuple):
    """One array of a shape, which is an array or a tuple of them."""

    dtype: str
    dimensions: str
    layout: str

    @property
    def bytes(self) -> int:
        bits = BITS.get(self.dtype)
        if bits is None:
            bits = int(re.findall(r"\d+", self.dtype)[0])
        elements = math.prod(int(n) for n in self.dimensions.split(",") if n)
        return math.ceil(elements * bits / 8)

    @property
    def on_chip(self) -> bool:
        """Whether it is in another memory than the chip's main one."""
        return bool(re.search(r"S\([1-9]", self.layout))


BITS = {"pred": 8, "s4": 4, "u4": 4, "token": 0}  # others end in their number of bits
ENTRY = "ENTRY"
UNKNOWN_LOOPS = "loops of unknown length"  # a key of every total: counted as one trip

_BUFFER = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\](\{[^}]*\})?")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-<>]+) .*\{$")
_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_CALLED = re.compile(
    r"\b(?:body|to_apply|calls|\w+_computations?)=(\{[^}]*\}|%?[\w.\-<>]+)"
)
_CALLS = re.compile(r"\bcalls=%?([\w.\-<>]+)")
_OPERAND = re.compile(r"%([\w.\-<>]+)")
_NAME = re.compile(r"[\w.\-<>]+")
_TRIPS = re.compile(r'known_trip_count\D*"?(\d+)')
_CONDITION = re.compile(r"condition=%?([\w.\-<>]+)")

Computations = dict[str, list[Instruction]]


def buffers(shape: str) -> list[Buffer]:
    return [Buffer(*found) for found in _BUFFER.findall(shape)]


def computations(text: str) -> Computations:
    """The instructions of a program (`as_text()`) by the name of their computation.

    Those of the computation that runs first are there as `ENTRY`, too.
    """
    found: Computations = {}
    current = None
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = found.setdefault(head[2], [])
            if head[1]:
                found[ENTRY] = current
        elif line.startswith("}"):
            current = None
        elif current is not None and (parts := _LINE.match(line)):
            current.append(Instruction(*parts.groups()))
    return found


def total(
    program: Computations,
    measure: Callable[[Instruction], Counter | None],
    choose: Callable[[Instruction], Callable] = lambda condition: max,
) -> Counter:
    """The sum of a measure over all that one run of a program executes.

    The body of a loop counts as often as its `known_trip_count` says, or as the
    constant that its condition compares with, and of the branches of a condition one.

    Args:
        measure: of one instruction, numbers by key; None for an instruction whose
            called computations are to be measured instead.
        choose: of a condition, max or min of its branches by the sum of their numbers.
    """

    @functools.cache
    def of(name: str) -> Counter:
        """The numbers of one computation and those it calls."""
        found: Counter = Counter()
        for instruction in program.get(name, []):
            own = measure(instruction)
            if own is not None:
                _add(found, own, 1)
                continue
            trips: int | None = 1
            if instruction.operation == "while":
                trips = _trips(instruction, program)
                found[UNKNOWN_LOOPS] += trips is None
            parts = [*map(of, _called(instruction))]
            if instruction.operation == "conditional" and parts:
                parts = [choose(instruction)(parts, key=Counter.total)]
            for part in parts:
                _add(found, part, 1 if trips is None else trips)
        return found

    return of(ENTRY)


def _add(found: Counter, more: Counter, times: int) -> None:
    for key, number in more.items():
        found[key] += number if key == UNKNOWN_LOOPS else times * number


def _trips(loop: Instruction, program: Computations) -> int | None:
    """How often a loop runs; None if the text does not say."""
    if known := _TRIPS.search(loop.rest):
        return int(known[1])
    condition = _CONDITION.search(loop.rest)
    limits = [
        int(limit[1])
        for x in program.get(condition[1] if condition else "", [])
        if x.operation == "constant" and (limit := re.match(r"(\d+)\)", x.rest))
    ]
    return max(limits, default=None)


def _called(instruction: Instruction) -> list[str]:
    """The computations that an instruction runs: what a reduction adds is none."""
    return _NAME.findall(" ".join(_CALLED.findall(instruction.rest)))
