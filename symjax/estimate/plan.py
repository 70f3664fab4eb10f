"""Plan of a run: its weights, their places, its cost, memory and time."""

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
from symjax.estimate.gpu_bytes import passes
from symjax.estimate.tpu_cycles import PARTS, estimate
from symjax.models import cost
from symjax.models.chips import CHIPS
from symjax.tables import aligned
from symjax.training import sharding
from symjax.training.compile import compiled_step, use_compile_cache
from symjax.training.preflight import with_vocabulary
from symjax.training.sharding import shard_bytes
from symjax.training.step import Program, compile_program

MIB = 2**20


def describe(options: config.Config, target: str | None = None) -> str:
    """A table of weights, and the cost of a step; compiles it, but trains nothing.

    Where the mesh has more devices than there are, CPU devices stand in for them:
    nothing is refused for its size, and nothing is allocated.

    Args:
        target: a machine that is not here, such as v5e-64, to compile for with its own
            compiler: see `targets.py`.
    Raises:
        ValueError: whatever else a run of this configuration would refuse; a target
            that is unknown or whose compiler is not installed.
    """
    machine = None if target is None else targets.find(target)
    if machine is None:  # programs for another machine cannot be read back here
        use_compile_cache()
    simulated = machine is None and sharding.simulate(options.mesh)
    mesh = sharding.make_mesh(options.mesh, machine and machine.devices)
    idle = 0
    if machine is not None:  # from here on those of the mesh
        idle = len(machine.devices) - mesh.size
        machine = machine._replace(devices=[*mesh.devices.flat])
    with tempfile.TemporaryDirectory() as folder:
        corpus = open_examples(options, Path(folder))
        corpus.check_length(options.model.length)
        options = with_vocabulary(options, corpus)
    program = compile_program(options, mesh, separate=corpus.separate)
    shape = (options.batch_size, options.model.length)
    weights = program.state.params
    parameters = sum(weight.size for weight in jax.tree.leaves(weights))
    tokens = options.batch_size * options.model.length
    whole = options.steps * tokens
    flops = tokens * cost.train_flops(options.model, parameters)
    lines = [
        *_table(weights),
        "",
        f"parameters          {parameters:,}",
        f"examples            {corpus.size}",
        f"tokens a step       {tokens:,}",
        f"tokens of the run   {whole:,} in {options.steps:,} steps, "
        f"{whole / parameters:.3g} a parameter",
        f"FLOPs a step        {flops:.3g} (multiply-adds as two, by formula)",
        f"mesh                {dict(mesh.shape)}"
        + (" of simulated CPU devices" if simulated else "")
        + (f" of {machine.name}, by its compiler" if machine else "")
        + (f"; {idle} of its chips idle" if idle else ""),
    ]
    try:
        step = compiled_step(
            program,
            shape,
            refuse=not (simulated or machine),
            machine=machine.name if machine else "",
        )
    except jax.errors.JaxRuntimeError as error:
        if machine is None or not OUT_OF_MEMORY.search(str(error)):
            raise
        lines += [_memory(program, None), _chip_memory(machine, None), str(error)]
        return "\n".join(lines)
    text, memory = step.as_text() or "", cast(Any, step.memory_analysis())
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    found = traffic(text, mesh.size)
    lines.append(_memory(program, memory))
    if machine is None:
        lines += _sent(found, mesh.devices.flat[0].platform)
        lines += _prospect(options, mesh.size, found, needed, flops)
    else:
        lines.append(_chip_memory(machine, needed))
        lines += _sent(found, machine.name)
        estimated = _cycles_of if machine.chip.per_cycle else _bytes_of
        lines += estimated(text, machine, found, flops, options.steps)
    return "\n".join(lines)


def _table(weights: Any) -> list[str]:
    """One line for each weight; those of equal layers share one."""
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
    """Bytes of the compiled training step on each device, as the compiler plans it;
    None: it plans none, and the step needs more than this."""
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
    """Whether so many bytes fit; None: more than the compiler accepts, which for TPUs
    knows better than their maker's figure."""
    size = machine.chip.memory
    if needed is not None and needed <= size:
        answer = "it fits"
    elif needed is not None and machine.chip.per_cycle:
        answer = "it just fits: the compiler counts on a little more"
    else:
        answer = (
            "it does NOT fit: mesh.fsdp splits weights and optimizer, "
            "model.remat=full and optimizer.accumulate keep less"
        )
    return f"memory of a chip    {size / 1e9:.0f} GB: {answer}"


def _prospect(
    options: config.Config, devices: int, found: Traffic, needed: int, flops: float
) -> list[str]:
    """What a step would take on known chips."""
    if options.model.remat == "full":  # one more forward pass, a third of the rest
        flops *= 4 / 3
    head = "if on, memory, fits, compute, memory traffic, network, step, run"
    rows: list[tuple[str, ...]] = [tuple(head.split(", "))]
    sent = found.sent.total()
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
        "the least a step could take, at the full speed that the makers state, with",
        "bytes of memory written and read once and all parts overlapping or none:",
        *aligned(rows),
    ]


def _bytes_of(
    text: str, machine: targets.Target, found: Traffic, flops: float, steps: int
) -> list[str]:
    """The passes over memory of a step on a GPU."""
    chip, moved = machine.chip, passes(text)
    rows = [("part of a step", "GB", "seconds at full speed")]
    for part, size in (*moved.items(), ("sum", moved.total())):
        rows.append((part, f"{size / 1e9:,.1f}", f"{size / chip.bandwidth:.3g}"))
    computing, moving, sending = chip.seconds(
        len(machine.devices),
        flops=flops,
        touched=moved.total(),
        sent=found.sent.total(),
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
        "their sum, with the FLOPs or the bytes of products",
        "The compiler for GPUs estimates no time: these are the bytes of what it made, "
        "each array once an operation. Real speeds are lower.",
    ]


def _cycles_of(
    text: str, machine: targets.Target, found: Traffic, flops: float, steps: int
) -> list[str]:
    """The cycles that the machine's own compiler plans."""
    chip, devices = machine.chip, len(machine.devices)
    cycles, clock = estimate(text, chip), chip.clock
    total, least = cycles.cycles.total(), flops / devices / chip.per_cycle
    low = cycles.low.total()
    rows = [("part of a step", "Mcycles", "seconds", "share", "low, Mcycles")]
    for part in PARTS:
        n, share = cycles.cycles[part], cycles.cycles[part] / max(total, 1)
        least_of = _millions(cycles.low[part])
        rows.append((part, *_cycles(n, clock), f"{share:.0%}", least_of))
    rows.append(("sum", *_cycles(total, clock), "100%", _millions(low)))
    rows.append(("FLOPs by formula at peak", *_cycles(least, clock), "", ""))
    sending = found.sent.total() / chip.speed(devices)
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
        "memory is the limit. Low: what is no product moves its bytes at full speed.",
        *_listed("kernels, by the FLOPs that they declare, at peak", cycles.kernels),
        *_listed("without an estimate, counted as nothing", cycles.unknown),
    ]


def _listed(what: str, found: Counter) -> list[str]:
    runs = ", ".join(f"{name} {count:,}" for name, count in found.items())
    return [f"{what}: {runs}"] if found else []


def _hours(steps: int, least: float, most: float) -> str:
    """Of a run, from the seconds of its steps."""
    return f"{steps * least / 3600:.3g} to {steps * most / 3600:.3g} h"


def _cycles(count: float, clock: float) -> tuple[str, str]:
    return _millions(count), f"{count / clock:.3g}"


def _millions(count: float) -> str:
    return f"{count / 1e6:,.1f}"


def _sent(found: Traffic, platform: str) -> list[str]:
    """One line a kind of collective."""
    lines = [
        f"sent by a device    as partitioned for {platform}, loops counted in full"
    ]
    lines += [
        f"  {kind:<18} {found.sent[kind] / MIB:,.1f} MiB in {found.count[kind]:,}"
        for kind in KINDS
        if found.count[kind]
    ]
    if platform == "cpu":
        lines.append(
            "  chips send about half of it in bfloat16, and half of an all-reduce of "
            "gradients as a reduce-scatter"
        )
    if not found.count.total():
        lines = ["sent by a device    nothing"]
    if found.unknown_loops:
        lines.append(
            f"  {found.unknown_loops} loops of unknown length were counted once"
        )
    return lines
