"""Bytes that a program compiled for a GPU reads and writes, by part of the step.

The compilers for GPUs estimate no time. Memory limits all operations except matrix
products, so the bytes of an operation at full speed give the least time that it can
take. The bytes before and after a change of the program show what the change saves. An
array counts once for each operation that reads or writes it. If an operation reads or
replaces a slice, only the slice counts.
"""

from collections import Counter, defaultdict

from symjax.estimate.hlo import Instruction, buffers, parse, sum_over_run
from symjax.estimate.tpu_cycles import PARTS, choose_branch, part_of

_MOVING = ("fusion", "fusion-start", "custom-call", "copy", "sort", "fft")
_SLICES = ("dynamic-slice", "gather", "slice")
# Operations in place, with the index of the operand that holds the new values.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
# Beginning of the target of a custom call → the part of the step that it belongs to.
_CALL_PARTS = {
    "__cublas": "products with weights",
    "__cudnn$conv": "products with weights",
    "__cudnn$fmha": "attention",
    "mosaic_gpu": "attention",
    "__gpu$xla.gpu.triton": "attention",
}
_SCRATCH = ("s8", "u8")  # element types of the workspace of custom calls


def bytes_by_part(text: str) -> Counter:
    """Return the bytes of one run on one GPU, by part (`tpu_cycles.PARTS`).

    On one device, the part "attention" has the attention kernels alone; on several
    devices it has everything inside `shard_map`. Collectives are left out, and loops of
    unknown length count as one trip.

    Args:
        text: `as_text()` of the compiled program.
    """
    program = parse(text)
    shapes = {x.name: x.shape for part in program.values() for x in part}

    def measure(x: Instruction) -> Counter | None:
        if x.operation not in _MOVING:
            return None
        if x.fusion is None:
            operands = (shapes.get(name, "") for name in x.operands)
            is_call = x.operation == "custom-call"
            part = _part_of_call(x) if is_call else part_of(x, [x])
            return Counter({part: _bytes(x.shape, *operands, scratch=is_call)})
        fused = program[x.fusion]
        call = next((y for y in fused if y.operation == "custom-call"), None)
        part = _part_of_call(call) if call else part_of(x, fused)
        return Counter({part: _fusion_bytes(fused, scratch=call is not None)})

    sums = sum_over_run(program, measure, choose_branch)
    return Counter({part: sums[part] for part in PARTS})


def _part_of_call(x: Instruction) -> str:
    target = x.rest.partition('custom_call_target="')[2]
    parts = (part for name, part in _CALL_PARTS.items() if target.startswith(name))
    return next(parts, "other")


def _fusion_bytes(fused: list[Instruction], *, scratch: bool) -> int:
    """Return the bytes that a fusion reads and writes.

    Args:
        fused: instructions of the fusion; the last one is its result.
        scratch: whether the results may contain workspace, which does not count.
    """
    by_name, readers = {}, defaultdict(list)
    for x in fused:
        if x.operation == "bitcast":  # another name of its operand
            by_name[x.name] = by_name[x.operands[0]]
            continue
        by_name[x.name] = x
        for index, name in enumerate(x.operands):
            readers[by_name[name].name].append((index, x))

    def read(parameter: Instruction) -> int:
        """Return the bytes read of a parameter: only slices, if only they are read."""
        slices = 0
        for index, x in readers[parameter.name]:
            if index or x.operation not in (*_SLICES, *_UPDATES):
                return _bytes(parameter.shape)
            slices += _bytes(x.shape) if x.operation in _SLICES else 0
        return min(slices, _bytes(parameter.shape))

    def written(name: str) -> int:
        """Return the bytes written of a result: only a slice, if one is replaced."""
        x = by_name[name]
        if x.operation in _UPDATES:
            x = by_name[x.operands[_UPDATES[x.operation]]]
        return _bytes(x.shape, scratch=scratch)

    last = fused[-1]
    parameters = [x for x in fused if x.operation == "parameter"]
    results = last.operands if last.operation == "tuple" else [last.name]
    return sum(map(read, parameters)) + sum(map(written, results))


def _bytes(*shapes: str, scratch: bool = False) -> int:
    """Return the bytes of all arrays of these shapes.

    Args:
        scratch: leave out the workspace of a custom call.
    """
    arrays = (array for shape in shapes for array in buffers(shape))
    return sum(x.bytes for x in arrays if not (scratch and x.dtype in _SCRATCH))
