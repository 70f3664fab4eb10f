"""Bytes that a program compiled for a GPU reads and writes, by the part of the step.

The compilers for GPUs estimate no time. Memory limits there what is no product, so that
its bytes at full speed are the least it can take; and they show what a change saves. An
array counts once for each operation that reads or writes it; where an operation reads
or replaces a slice, the slice does.
"""

from collections import Counter, defaultdict

from symjax.training.compiled import Instruction, buffers, computations, total
from symjax.training.cycles import PARTS, of_branches, part_of

_MOVING = ("fusion", "fusion-start", "custom-call", "copy", "sort")
_SLICES = ("dynamic-slice", "gather", "slice")
_UPDATE = "dynamic-update-slice"  # in place
# Custom calls by the beginning of their target, and the memory that they work in.
_CALLED = {
    "__cublas": "products with weights",
    "__cudnn": "attention",
    "mosaic_gpu": "attention",
    "__gpu$xla.gpu.triton": "attention",
}
_SCRATCH = ("s8", "u8")


def passes(text: str) -> Counter:
    """Bytes by part (`cycles.PARTS`) of one run on one GPU, from the text (`as_text()`)
    of a compiled program. Collectives are left out."""
    program = computations(text)
    shapes = {x.name: x.shape for part in program.values() for x in part}

    def measure(x: Instruction) -> Counter | None:
        if x.operation not in _MOVING:
            return None
        if x.fusion:
            fused = program[x.fusion]
            return Counter({part_of(x, fused): _of_fusion(fused)})
        around = x.shape, *(shapes.get(name, "") for name in x.operands)
        if x.operation == "custom-call":
            target = x.rest.partition('custom_call_target="')[2]
            parts = (_CALLED[name] for name in _CALLED if target.startswith(name))
            return Counter({next(parts, "other"): _bytes(*around, but=_SCRATCH)})
        return Counter({part_of(x, [x]): _bytes(*around)})

    found = total(program, measure, of_branches)
    return Counter({part: found[part] for part in PARTS})


def _of_fusion(fused: list[Instruction]) -> int:
    """Of a fused computation, whose last instruction is what it gives."""
    by_name, readers = {x.name: x for x in fused}, defaultdict(list)
    for x in fused:
        for place, name in enumerate(x.operands):
            readers[name].append((place, x))

    def read(given: Instruction) -> int:
        slices = 0
        for place, x in readers[given.name]:
            if place or x.operation not in (*_SLICES, _UPDATE):
                return _bytes(given.shape)
            slices += _bytes(x.shape) if x.operation in _SLICES else 0
        return min(slices, _bytes(given.shape))

    def written(name: str) -> int:
        x = by_name[name]
        return _bytes((by_name[x.operands[1]] if x.operation == _UPDATE else x).shape)

    last = fused[-1]
    given = [x for x in fused if x.operation == "parameter"]
    results = last.operands if last.operation == "tuple" else [last.name]
    return sum(map(read, given)) + sum(map(written, results))


def _bytes(*shapes: str, but: tuple[str, ...] = ()) -> int:
    arrays = (array for shape in shapes for array in buffers(shape))
    return sum(array.bytes for array in arrays if array.dtype not in but)
