"""Text of a dry run: the weights of a model, their sharding, its cost and its time.

The package docstring says which compiler is used and what the estimates rest on.
"""

import math
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, cast

import jax

from symjax import config
from symjax.data.examples import open_examples
from symjax.distributed.exit_codes import OUT_OF_MEMORY
from symjax.estimate import targets
from symjax.estimate.collectives import KINDS, Traffic, traffic
from symjax.estimate.gpu_bytes import bytes_by_part
from symjax.estimate.tpu_cycles import PARTS, estimate
from symjax.models import cost
from symjax.models.chips import CHIPS
from symjax.tables import aligned
from symjax.training import sharding, transfer
from symjax.training.compile import compiled_step, use_compile_cache
from symjax.training.preflight import with_vocabulary
from symjax.training.sharding import shard_bytes
from symjax.training.step import Program, build_program

MIB = 2**20
CONTEXTS = (512, 2048, 8192, 32768)  # tokens of a text that the model continues


def describe(options: config.Config, target: str | None = None) -> str:
    """Return the text of a dry run: weights, sizes, memory, traffic and time of a step.

    The training step is compiled and not run. If the mesh has more devices than this
    machine, they are simulated on the CPU. Steps for simulated devices, or for a
    target, are not refused for their memory.

    Args:
        target: a machine to compile for by its own compiler, such as v5e-64; see
            `targets.py`. None compiles for the devices of this machine.
    Raises:
        ValueError: a run of this configuration would be refused; or the target is
            unknown, or its compiler is not installed.
    """
    transfer.check(options)
    machine = None if target is None else targets.find(target)
    if machine is None:  # programs for another machine cannot be read back here
        use_compile_cache()
    simulated = machine is None and sharding.simulate(options.mesh)
    mesh = sharding.make_mesh(options.mesh, machine and machine.devices)
    idle = 0
    if machine is not None:  # a mesh may leave some devices out
        idle = len(machine.devices) - mesh.size
        machine = machine._replace(devices=[*mesh.devices.flat])
    with tempfile.TemporaryDirectory() as folder:
        examples = open_examples(options, Path(folder))
        examples.check_length(options.model.length)
        options = with_vocabulary(options, examples)
    program = build_program(options, mesh, separate=examples.separate)
    lines = [
        *_weights_table(program.state.params),
        "",
        *_run_lines(options, program, examples.size),
        f"mesh                {dict(mesh.shape)}"
        + (" of simulated CPU devices" if simulated else "")
        + (f" of {machine.name}, by its compiler" if machine else "")
        + (f"; {idle} of its chips idle" if idle else ""),
    ]
    try:
        step = compiled_step(
            program,
            (options.batch_size, options.model.length),
            refuse=not (simulated or machine),
            machine=machine.name if machine else "",
        )
    except jax.errors.JaxRuntimeError as error:
        if machine is None or not OUT_OF_MEMORY.search(str(error)):
            raise
        lines += [_memory(program, None), _chip_memory(machine, None), str(error)]
    else:
        lines += _step_lines(options, program, step, machine)
    return "\n".join(lines)


def _run_lines(options: config.Config, program: Program, examples: str) -> list[str]:
    """Return the lines on parameters, examples, tokens and FLOPs."""
    parameters = _parameters(program)
    tokens = options.batch_size * options.model.length
    whole = options.steps * tokens
    return [
        f"parameters          {parameters:,}",
        f"examples            {examples}",
        f"tokens a step       {tokens:,}",
        f"tokens of the run   {whole:,} in {options.steps:,} steps, "
        f"{whole / parameters:.3g} a parameter",
        f"FLOPs a step        {_step_flops(options, program):.3g} "
        "(multiply-adds as two, by formula)",
        *_decoding_lines(options.model),
    ]


def _decoding_lines(model: config.Model) -> list[str]:
    """Return the line on the memory that one text needs while the model writes it.

    Learned positions end at model.length, so that texts cannot be longer.
    """
    if not config.is_causal(model):
        return []
    lengths = CONTEXTS
    if model.positions == "learned":
        lengths = (*(x for x in CONTEXTS if x < model.length), model.length)
    sizes = [cost.decoding_bytes(model, length) / MIB for length in lengths]
    if len({*sizes}) == 1 < len(sizes):
        return [f"to decode a text     {sizes[0]:.3g} MiB of state at any length"]
    shown = ", ".join(
        f"{size:,.3g} at {length:,}"
        for size, length in zip(sizes, lengths, strict=True)
    )
    return [f"to decode a text    MiB by number of tokens: {shown}"]


def _step_lines(
    options: config.Config,
    program: Program,
    step: jax.stages.Compiled,
    machine: targets.Target | None,
) -> list[str]:
    """Return the lines on memory, traffic and time, from the compiled step."""
    text, memory = step.as_text() or "", cast(Any, step.memory_analysis())
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    flops, mesh = _step_flops(options, program), program.mesh
    sent = traffic(text, mesh.size)
    lines = [_memory(program, memory)]
    if machine is None:
        lines += _traffic_lines(sent, mesh.devices.flat[0].platform)
        return lines + _times_on_chips(options, mesh.size, sent, needed, flops)
    lines.append(_chip_memory(machine, needed))
    lines += _traffic_lines(sent, machine.name)
    times = _times_by_cycles if machine.chip.per_cycle else _times_by_bytes
    return lines + times(text, machine, sent, flops, options.steps)


def _parameters(program: Program) -> int:
    return sum(weight.size for weight in jax.tree.leaves(program.state.params))


def _step_flops(options: config.Config, program: Program) -> float:
    """Return the FLOPs of one training step over all devices, by formula."""
    tokens = options.batch_size * options.model.length
    return tokens * cost.train_flops(options.model, _parameters(program))


def _weights_table(weights: Any) -> list[str]:
    """Return one line for each weight; equal weights of several layers share a line."""
    count: Counter = Counter()
    for path, weight in jax.tree_util.tree_flatten_with_path(weights)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        parts = ["*" if part.isdecimal() else part for part in name.split("/")]
        axes = ", ".join(str(axis or "-") for axis in weight.sharding.spec)
        count["/".join(parts), weight.shape, axes] += 1
    rows = [("weight", "shape", "layers", "parameters", "mesh axes")]
    for (name, shape, axes), layers in count.items():
        size = layers * math.prod(shape)
        rows.append((name, str(shape), str(layers), f"{size:,}", axes))
    return aligned(rows)


def _memory(program: Program, memory: Any | None) -> str:
    """Return the line on the memory that the step needs on each device.

    Args:
        memory: the compiler's plan. None means that the step does not fit: only the
            weights and the optimizer's state are known, and the step needs more.
    """
    weights = shard_bytes((program.state.params, program.constants))
    optimizer = shard_bytes(program.state.optimizer)
    parts = {"weights": weights, "optimizer": optimizer}
    if memory is not None:
        parts["batch"] = memory.argument_size_in_bytes - weights - optimizer
        parts["working"] = memory.temp_size_in_bytes
    total = f"{sum(parts.values()) / MIB:,.1f} MiB"
    shown = ", ".join(f"{name} {size / MIB:,.1f}" for name, size in parts.items())
    return f"memory a device     {'over ' * (memory is None)}{total}: {shown}"


def _chip_memory(machine: targets.Target, needed: int | None) -> str:
    """Return the line that says whether the step fits into the memory of a chip.

    The compiler for TPUs may accept a step that needs a little more memory than the
    maker states.

    Args:
        needed: bytes on each device; None if the compiler refused the program.
    """
    size = machine.chip.memory
    if needed is not None and needed <= size:
        answer = "it fits"
    elif needed is not None and machine.chip.per_cycle:
        answer = "it just fits: the compiler assumes a little more memory"
    else:
        answer = (
            "it does NOT fit: mesh.fsdp splits weights and optimizer, "
            "model.remat=full and optimizer.accumulate keep less"
        )
    return f"memory of a chip    {size / 1e9:.0f} GB: {answer}"


def _times_on_chips(
    options: config.Config, devices: int, traffic: Traffic, needed: int, flops: float
) -> list[str]:
    """Return a table of the least time of a step on the chips of `models/chips.py`.

    Args:
        needed: bytes of memory on each device. The table assumes that each byte is read
            and written once.
    """
    if options.model.remat == "full":  # one more forward pass: a third more FLOPs
        flops *= 4 / 3
    head = "chips, memory, fits, compute, memory traffic, network, step, run"
    rows: list[tuple[str, ...]] = [tuple(head.split(", "))]
    sent = traffic.sent.total()
    for chip in CHIPS:
        parts = chip.seconds(devices, flops=flops, touched=2 * needed, sent=sent)
        rows.append(
            (
                f"{devices} × {chip.name}",
                f"{chip.memory / 1e9:.0f} GB",
                "yes" if needed <= chip.memory else "no",
                *(f"{part:.3g} s" for part in parts),
                f"{max(parts):.3g} to {sum(parts):.3g} s",
                _hours(options.steps, max(parts), sum(parts)),
            )
        )
    return [
        "",
        "the least time of a step at the full speed that the makers state, with each",
        "byte of memory written and read once, if all parts overlap and if none does:",
        *aligned(rows),
    ]


def _times_by_bytes(
    text: str, machine: targets.Target, traffic: Traffic, flops: float, steps: int
) -> list[str]:
    """Return the lines on the time of a step on GPUs, from the bytes that it moves."""
    chip, moved = machine.chip, bytes_by_part(text)
    rows = [("part of a step", "GB", "seconds at full speed")]
    for part, size in (*moved.items(), ("sum", moved.total())):
        rows.append((part, f"{size / 1e9:,.1f}", f"{size / chip.bandwidth:.3g}"))
    computing, moving, sending = chip.seconds(
        len(machine.devices),
        flops=flops,
        touched=moved.total(),
        sent=traffic.sent.total(),
    )
    rows.append(("FLOPs by formula at peak", "", f"{computing:.3g}"))
    products = moved["products with weights"] / chip.bandwidth
    most = max(computing, products) + moving - products + sending
    return [
        "",
        *aligned(rows),
        f"collectives         {sending:.3g} s at the full speed of the links",
        "the run             "
        + _hours(steps, max(computing, moving, sending), most)
        + f" for {steps:,} steps: the longest of FLOPs, bytes and collectives, to "
        "their sum, in which products take the longer of their FLOPs and their bytes",
        "The compiler for GPUs estimates no time: these are the bytes of its program, "
        "each array counted once per operation. Real speeds are lower.",
    ]


def _times_by_cycles(
    text: str, machine: targets.Target, traffic: Traffic, flops: float, steps: int
) -> list[str]:
    """Return the lines on the time of a step on TPUs, from the compiler's cycles."""
    chip, devices = machine.chip, len(machine.devices)
    cycles, clock = estimate(text, chip), chip.clock
    total, least = cycles.cycles.total(), flops / devices / chip.per_cycle
    low = cycles.low.total()
    rows = [("part of a step", "Mcycles", "seconds", "share", "low, Mcycles")]
    for part in PARTS:
        count = cycles.cycles[part]
        share = f"{count / max(total, 1):.0%}"
        rows.append((part, *_cycles(count, clock), share, _millions(cycles.low[part])))
    rows.append(("sum", *_cycles(total, clock), "100%", _millions(low)))
    rows.append(("FLOPs by formula at peak", *_cycles(least, clock), "", ""))
    sending = traffic.sent.total() / chip.speed(devices)
    return [
        "",
        *aligned(rows),
        f"share of peak       {least / max(total, 1):.1%} by the compiler's estimate, "
        f"{least / max(low, 1):.1%} by the low one",
        f"collectives         {sending:.3g} s at the full speed of the links, not in "
        "the sum: they may overlap with it",
        "the run             "
        + _hours(steps, max(low / clock, sending), total / clock + sending)
        + f" for {steps:,} steps: the low sum, to the sum and the collectives",
        "The cycles are the compiler's estimate: close for products, too high where "
        "memory is the limit. Low: all but products move their bytes at full speed.",
        *_counts_line(
            "kernels, by the FLOPs that they declare, at peak", cycles.kernels
        ),
        *_counts_line("without an estimate, counted as nothing", cycles.unknown),
    ]


def _counts_line(label: str, counts: Counter) -> list[str]:
    runs = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    return [f"{label}: {runs}"] if counts else []


def _hours(steps: int, least: float, most: float) -> str:
    """Return the hours of a run from the least and most seconds of a step."""
    return f"{steps * least / 3600:.3g} to {steps * most / 3600:.3g} h"


def _cycles(count: float, clock: float) -> tuple[str, str]:
    """Return a number of cycles in millions, and their seconds."""
    return _millions(count), f"{count / clock:.3g}"


def _millions(count: float) -> str:
    return f"{count / 1e6:,.1f}"


def _traffic_lines(traffic: Traffic, platform: str) -> list[str]:
    """Return a line for each kind of collective."""
    lines = [
        f"sent by a device    as partitioned for {platform}, loops counted in full"
    ]
    lines += [
        f"  {kind:<18} {traffic.sent[kind] / MIB:,.1f} MiB in {traffic.count[kind]:,}"
        for kind in KINDS
        if traffic.count[kind]
    ]
    if platform == "cpu":
        lines.append(
            "  chips send about half of it in bfloat16, and half of an all-reduce of "
            "gradients as a reduce-scatter"
        )
    if not traffic.count.total():
        lines = ["sent by a device    nothing"]
    if traffic.unknown_loops:
        lines.append(
            f"  {traffic.unknown_loops} loops of unknown length were counted once"
        )
    return lines
