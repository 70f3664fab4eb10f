"""Estimates of XLA's TPU and GPU compilers for causal attention and training steps.

    python benchmarks/compiled.py functions [--target v5e-4] [--only performer]
    python benchmarks/compiled.py functions --target h200-1
    python benchmarks/compiled.py steps --target v5e-64 [--only gpt:1b,diff_sym:1b]
    python benchmarks/compiled.py functions --json now.json --against before.json

Nothing runs, so no TPU or GPU is needed. TPU targets need the extra `tpu-compiler`, GPU
targets the CUDA plugin of jax. All figures are estimates. symjax/estimate/tpu_cycles.py
explains "low" and "high". A kernel counts with the FLOPs and bytes that it declares.
The cycles leave out collectives, which may overlap with the computation. For a training
step, their time at the full speed of the links is printed as well.

functions  Attention on one chip, in bfloat16, with 4 rows of 4,096 tokens. Mechanisms
           that score pairs have 16 heads of size 128 (differential ones two branches of
           64 or 128), mechanisms of linear time have 16 heads of size 64, and gau and
           flash have one head of size 128 with values of 2,048.
           TPU: cycles and temporary memory of forward, and of forward + backward.
           GPU: bytes that are read and written, by part; all heads have size 128.
steps      Training steps of configurations, sharded over all chips of the target by
           `mesh.fsdp`, with separate documents: cycles by part, their share of the
           chip's peak, memory, and the seconds that compiling took.
--against  prints each figure with its ratio to the same figure of an earlier --json.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")  # only tracing runs here

import jax.numpy as jnp  # noqa: E402
from arguments import output  # noqa: E402
from device_peers import Rival, ours  # noqa: E402

from symjax import attention, config, validation  # noqa: E402
from symjax.estimate import targets  # noqa: E402
from symjax.estimate.collectives import traffic  # noqa: E402
from symjax.estimate.gpu_bytes import bytes_by_part  # noqa: E402
from symjax.estimate.tpu_cycles import PARTS, estimate  # noqa: E402
from symjax.models.chips import Chip  # noqa: E402
from symjax.models.cost import train_flops  # noqa: E402
from symjax.programs.configuration_file import load_config  # noqa: E402
from symjax.training import sharding  # noqa: E402
from symjax.training.step import Program, build_program  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = "gpt:1b,diff:1b,diff_sym:1b,diff_v2:1b,performer:1b,gla:1b,delta:1b"
ROWS, LENGTH, HEADS, VOCABULARY = 4, 4096, 16, 256
SCORED, LINEAR = 128, 64  # head sizes
LEFT_OUT = (
    "estimates of the compiler, nothing ran; kernels count with declared FLOPs and "
    "bytes; without collectives, which may overlap with the computation"
)
BYTES = "bytes that the compiled program reads and writes; nothing ran"
ORIGIN = "made by"  # key of the JSON; all other keys are names of rows
Row = dict[str, Any]


def main(words: list[str]) -> int:
    sys.path.insert(0, str(ROOT))  # configs are not installed
    chosen = parse(words)
    before, target = chosen.against, chosen.target
    if chosen.what == "functions":
        rows = functions(target, chosen.only)
    else:
        rows = steps(target, chosen.programs)
    found: dict[str, Row] = {ORIGIN: {"target": target.name, "jax": jax.__version__}}
    print(LEFT_OUT if target.chip.per_cycle else BYTES, flush=True)
    if before and before.get(ORIGIN) != found[ORIGIN]:
        print(f"--against was made by {before.get(ORIGIN)}")
    for name, row in rows:
        found[name] = row
        old = before.get(name, {})
        new = " (not in --against)" if before and not old else ""
        print("\n".join(row_lines(name + new, row, old)), flush=True)
        if chosen.json:
            chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("functions", "steps"))
    parser.add_argument(
        "--target",
        help="v5e-64, v5p-8 … (default: v5e-4 for functions, v5e-64 for steps)",
    )
    parser.add_argument(
        "--only",
        default="",
        help="functions: part of a name; steps: configurations, between commas",
    )
    parser.add_argument("--json", type=output, help="write the figures here")
    parser.add_argument(
        "--against", type=read_rows, default={}, help="earlier --json to compare with"
    )
    chosen = parser.parse_args(words)
    if chosen.what == "steps":
        chosen.only = chosen.only or CONFIGS
    elif not any(chosen.only in name for name in rivals(LINEAR)):
        names = ", ".join(rivals(LINEAR))
        parser.error(f"--only {chosen.only!r} is in no name: {names}")
    name = chosen.target or ("v5e-64", "v5e-4")[chosen.what == "functions"]
    try:
        chosen.target = targets.find(name)
    except ValueError as error:
        parser.error(str(error))
    if chosen.what == "steps" and not chosen.target.chip.per_cycle:
        parser.error(f"--target {name}: the compiler for GPUs estimates no cycles")
    chosen.programs = {}  # all are checked before hours of compiling
    for configuration in chosen.only.split(",") if chosen.what == "steps" else ():
        try:
            chosen.programs[configuration] = program_of(configuration, chosen.target)
        except ValueError as error:
            parser.error(f"--only {configuration}: {error}")
    return chosen


def read_rows(path: str) -> dict[str, Row]:
    """Return the rows of an earlier --json file."""
    try:
        rows = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be read: {error}") from None
    if not isinstance(rows, dict) or not all(
        isinstance(row, dict)
        and (name == ORIGIN or all(isinstance(x, int | float) for x in row.values()))
        for name, row in rows.items()
    ):
        raise argparse.ArgumentTypeError(f"{path} has no rows of figures by name")
    return rows


def row_lines(name: str, row: Row, before: Row) -> list[str]:
    """Return a row as lines, each figure with its ratio to the earlier figure."""
    lines = [name]
    for key, number in row.items():
        text = f"{number:,.3g}" if abs(number) < 100 else f"{number:,.0f}"
        if before.get(key):
            text += f"  ({number / before[key]:.2f} of {before[key]:,.4g})"
        lines.append(f"  {key:<52}{text}")
    return lines


# Functions


def functions(target: targets.Target, only: str) -> Iterator[tuple[str, Row]]:
    """Compile each function whose name contains `only`; yield its name and figures."""
    size = LINEAR if target.chip.per_cycle else SCORED
    for name, rival in rivals(size).items():
        if only not in name:
            continue
        row: Row = {}
        for backward in (False, True):
            kind = "forward + backward" if backward else "forward"
            start = time.perf_counter()
            compiled = compile_for(target, rival, backward)
            row |= {f"{kind}: {x}": y for x, y in figures(compiled, target.chip)}
            row[f"{kind}: compiler, s"] = time.perf_counter() - start
        yield name, row


def rivals(size: int) -> dict[str, Rival]:
    """Return the functions that are compiled, by name.

    They are the functions of device.py, and sparsemax, entmax-1.5, gau and flash.

    Args:
        size: head size of the mechanisms of linear time.
    """
    pairs, linear = (ours(ROWS, LENGTH, HEADS, x) for x in (SCORED, size))
    scored = ("softmax", "symmetric", "differential")  # beginnings of their names
    found = {x: pairs[x] if x.startswith(scored) else linear[x] for x in linear}
    alone = (ROWS, LENGTH, 1, SCORED), (ROWS, LENGTH, 1, HEADS * SCORED)
    gau = partial(attention.gau, divisor=LENGTH, is_causal=True)
    for name, attend, shapes in (
        ("sparsemax", partial(attention.sparsemax, is_causal=True), None),
        ("entmax-1.5", partial(attention.entmax15, is_causal=True), None),
        ("gau, one head", gau, (alone[0], *alone)),
        ("flash, one head", attention.flash_causal, (*[alone[0]] * 4, alone[1])),
    ):
        shapes = shapes or pairs["softmax"].shapes
        found[name] = pairs["softmax"]._replace(attend=attend, shapes=shapes)
    return found


def compile_for(
    target: targets.Target, rival: Rival, backward: bool
) -> jax.stages.Compiled:
    """Compile the function, with `backward` together with all its gradients."""

    def output_and_gradients(cotangent, *arrays):
        output, pull = jax.vjp(rival.attend, *arrays)
        return output, pull(cotangent)

    place = target.one_device()
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)
        for shape in rival.shapes
    ]
    output = jax.eval_shape(rival.attend, *arrays)
    cotangent = jax.ShapeDtypeStruct(output.shape, output.dtype, sharding=place)
    with jax.set_mesh(place.mesh):
        if backward:
            return jax.jit(output_and_gradients).lower(cotangent, *arrays).compile()
        return jax.jit(rival.attend).lower(*arrays).compile()


def figures(compiled: jax.stages.Compiled, chip: Chip) -> Iterator[tuple[str, float]]:
    """Yield the name and value of each figure of a compiled function."""
    text = compiled.as_text() or ""
    if chip.per_cycle:
        found = estimate(text, chip)
        yield "Mcycles, high", found.cycles.total() / 1e6
        yield "Mcycles, low", found.low.total() / 1e6
        if found.unknown:
            yield "operations without an estimate", found.unknown.total()
    else:
        moved = bytes_by_part(text)
        yield "GB", moved.total() / 1e9
        yield from ((f"GB, {x}", moved[x] / 1e9) for x in PARTS if moved[x])
    if (memory := compiled.memory_analysis()) is not None:
        yield "temporaries, MiB", memory.temp_size_in_bytes / 2**20


# Training steps


def steps(
    target: targets.Target, programs: dict[str, tuple[config.Config, Program]]
) -> Iterator[tuple[str, Row]]:
    """Compile each training step; yield its name and figures."""
    for name, (options, program) in programs.items():
        start = time.perf_counter()
        shape = (options.batch_size, options.model.length)
        step = program.lower(shape).compile()
        seconds = time.perf_counter() - start
        weights = jax.tree.leaves(program.state.params)
        count = sum(weight.size for weight in weights)
        flops = shape[0] * shape[1] * train_flops(options.model, count)
        yield name, {"compiler, s": seconds} | step_figures(step, target, flops)


def program_of(name: str, target: targets.Target) -> tuple[config.Config, Program]:
    """Return a configuration and its training program, sharded over all chips.

    Args:
        name: file and preset, as in gpt:1b.
    Raises:
        ValueError: there is no such configuration, or the chips cannot divide it.
    """
    file, _, preset = name.partition(":")
    tree = load_config(ROOT / "configs" / f"{file}.py", preset).to_dict()
    tree["model"]["vocabulary"] = tree["model"]["vocabulary"] or VOCABULARY
    tree["mesh"] |= {"data": 1, "fsdp": len(target.devices)}
    options = validation.from_dict(tree)
    mesh = sharding.make_mesh(options.mesh, target.devices)
    separate = config.is_causal(options.model)  # encoders read documents joined
    return options, build_program(options, mesh, separate=separate)


def step_figures(
    step: jax.stages.Compiled, target: targets.Target, flops: float
) -> Row:
    """Return the figures of a compiled training step.

    Args:
        flops: of the step on all chips together.
    """
    chip, text = target.chip, step.as_text() or ""
    found = estimate(text, chip)
    least = flops / len(target.devices) / chip.per_cycle
    high, low = found.cycles.total(), found.low.total()
    row = {f"Mcycles, {part}": found.cycles[part] / 1e6 for part in PARTS}
    row |= {"Mcycles, high": high / 1e6, "Mcycles, low": low / 1e6}
    row |= {"% of peak, high": 100 * least / high, "% of peak, low": 100 * least / low}
    row["seconds, high"] = high / chip.clock
    sent = traffic(text, len(target.devices)).sent.total()
    row["seconds of the links"] = sent / chip.link
    if (memory := step.memory_analysis()) is not None:
        row["arguments, MiB"] = memory.argument_size_in_bytes / 2**20
        row["temporaries, MiB"] = memory.temp_size_in_bytes / 2**20
    return row


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
