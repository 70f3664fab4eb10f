"""Bytes that a program compiled for a GPU reads and writes, by the part of the step.

The compilers for GPUs estimate no time. Memory limits there what is no product, so that
its bytes at full speed are the least it can take; and they show what a change saves. An
array counts once for each operation that reads or writes it; where an operation reads
or replaces a slice, the slice does.
"""

from collections import Counter, defaultdict

from symjax.estimate.hlo import Instruction, buffers, computations, total
from symjax.estimate.tpu_cycles import PARTS, of_branches, part_of

_MOVING = ("fusion", "fusion-start", "custom-call", "copy", "sort", "fft")
_SLICES = ("dynamic-slice", "gather", "slice")
# In place, with the operand that is written: its number.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
# Custom calls by the beginning of their target, and types of what they work in.
_CALLED = {
    "__cublas": "products with weights",
    "__cudnn$conv": "products with weights",
    "__cudnn$fmha": "attention",
    "mosaic_gpu": "attention",
    "__gpu$xla.gpu.triton": "attention",
}
_SCRATCH = ("s8", "u8")


def passes(text: str) -> Counter:
    """Bytes by part (`cycles.PARTS`) of one run on one GPU, from the text (`as_text()`)
    of a compiled program. Collectives are left out, and loops of unknown length count
    as one trip. Attention is its kernels; on several devices all inside `shard_map`."""
    program = computations(text)
    shapes = {x.name: x.shape for part in program.values() for x in part}

    def measure(x: Instruction) -> Counter | None:
        if x.operation not in _MOVING:
            return None
        if x.fusion is None:
            around = x.shape, *(shapes.get(name, "") for name in x.operands)
            called = x.operation == "custom-call"
            part = _part_of_call(x) if called else part_of(x, [x])
            return Counter({part: _bytes(*around, scratch=called)})
        fused = program[x.fusion]
        call = next((y for y in fused if y.operation == "custom-call"), None)
        part = _part_of_call(call) if call else part_of(x, fused)
        return Counter({part: _of_fusion(fused, scratch=call is not None)})

    found = total(program, measure, of_branches)
    return Counter({part: found[part] for part in PARTS})


def _part_of_call(x: Instruction) -> str:
    target = x.rest.partition('custom_call_target="')[2]
    parts = (part for name, part in _CALLED.items() if target.startswith(name))
    return next(parts, "other")


def _of_fusion(fused: list[Instruction], *, scratch: bool) -> int:
    """Of a fused computation, whose last instruction is what it gives."""
    by_name, readers = {}, defaultdict(list)
    for x in fused:
        if x.operation == "bitcast":  # another name of its operand
            by_name[x.name] = by_name[x.operands[0]]
            continue
        by_name[x.name] = x
        for place, name in enumerate(x.operands):
            readers[by_name[name].name].append((place, x))

    def read(given: Instruction) -> int:
        slices = 0
        for place, x in readers[given.name]:
            if place or x.operation not in (*_SLICES, *_UPDATES):
                return _bytes(given.shape)
            slices += _bytes(x.shape) if x.operation in _SLICES else 0
        return min(slices, _bytes(given.shape))

    def written(name: str) -> int:
        x = by_name[name]
        if x.operation in _UPDATES:
            x = by_name[x.operands[_UPDATES[x.operation]]]
        return _bytes(x.shape, scratch=scratch)

    last = fused[-1]
    given = [x for x in fused if x.operation == "parameter"]
    results = last.operands if last.operation == "tuple" else [last.name]
    return sum(map(read, given)) + sum(map(written, results))


def _bytes(*shapes: str, scratch: bool = False) -> int:
    """scratch: whether memory that a custom call works in may be among them."""
    arrays = (array for shape in shapes for array in buffers(shape))
    return sum(x.bytes for x in arrays if not (scratch and x.dtype in _SCRATCH))
