"""Parser of compiled programs (HLO text), and sums over all that a run executes.

XLA prints a program as computations with one instruction per line. XLA's own
`cost_analysis` counts the body of a loop once. `sum_over_run` counts it as often as the
loop runs: it starts at the entry computation and follows calls, loops and conditions.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple


class Instruction(NamedTuple):
    """An instruction of a compiled program.

    Attributes:
        shape: shape of the result, an array or a tuple of arrays.
        rest: the line after the operation: operands and attributes.
    """

    name: str
    shape: str
    operation: str
    rest: str

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return _OPERAND.findall(self.rest.split(")", 1)[0])

    @property
    def fusion(self) -> str | None:
        """Name of the computation that a fusion runs; None if this is no fusion."""
        calls = _CALLS.search(self.rest)
        return calls and calls[1]


class Buffer(NamedTuple):
    """One array in the shape of an instruction."""

    dtype: str
    dimensions: str
    layout: str

    @property
    def bytes(self) -> int:
        """Size in bytes, without padding."""
        bits = BITS.get(self.dtype)
        if bits is None:
            bits = int(re.findall(r"\d+", self.dtype)[0])
        elements = math.prod(int(n) for n in self.dimensions.split(",") if n)
        return math.ceil(elements * bits / 8)

    @property
    def on_chip(self) -> bool:
        """Return whether the array is in a memory other than the main memory."""
        return bool(re.search(r"S\([1-9]", self.layout))


BITS = {"pred": 8, "s4": 4, "u4": 4, "token": 0}  # other names contain their bits
ENTRY = "ENTRY"
# Key of every sum: the number of loops whose length the text does not say.
UNKNOWN_LOOPS = "loops of unknown length"

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
    """Return the arrays of a shape."""
    return [Buffer(*match) for match in _BUFFER.findall(shape)]


def parse(text: str) -> Computations:
    """Return the instructions of a program (`as_text()`), by computation.

    The computation that runs first has its own name and the name `ENTRY`.
    """
    program: Computations = {}
    current = None
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = program.setdefault(head[2], [])
            if head[1]:
                program[ENTRY] = current
        elif line.startswith("}"):
            current = None
        elif current is not None and (parts := _LINE.match(line)):
            current.append(Instruction(*parts.groups()))
    return program


def sum_over_run(
    program: Computations,
    measure: Callable[[Instruction], Counter | None],
    choose_branch: Callable[[Instruction], Callable] = lambda condition: max,
) -> Counter:
    """Return the sum of a measure over all instructions that one run executes.

    The number of trips of a loop is its `known_trip_count`, or else the constant that
    its condition compares with, or else 1. One branch of a condition counts.

    Args:
        measure: instruction → numbers by key. If it returns None, the computations that
            the instruction calls are measured instead.
        choose_branch: condition → `max` or `min`, which picks the branch with the
            largest or the smallest sum of numbers.
    """

    @functools.cache
    def sum_of(name: str) -> Counter:
        """Return the sum over one computation and those that it calls."""
        sums: Counter = Counter()
        for instruction in program.get(name, []):
            numbers = measure(instruction)
            if numbers is not None:
                _add(sums, numbers, 1)
                continue
            trips: int | None = 1
            if instruction.operation == "while":
                trips = _trips(instruction, program)
                sums[UNKNOWN_LOOPS] += trips is None
            called = [*map(sum_of, _called(instruction))]
            if instruction.operation == "conditional" and called:
                called = [choose_branch(instruction)(called, key=Counter.total)]
            for part in called:
                _add(sums, part, 1 if trips is None else trips)
        return sums

    return sum_of(ENTRY)


def _add(sums: Counter, numbers: Counter, times: int) -> None:
    """Add numbers `times` times, except the number of loops of unknown length."""
    for key, number in numbers.items():
        sums[key] += number if key == UNKNOWN_LOOPS else times * number


def _trips(loop: Instruction, program: Computations) -> int | None:
    """Return how often a loop runs; None if the text does not say."""
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
    """Return the names of the computations that an instruction calls."""
    return _NAME.findall(" ".join(_CALLED.findall(instruction.rest)))
