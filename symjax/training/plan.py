"""What a run would be: its weights, their places, its cost and memory."""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import jax

from symjax import config
from symjax.data.corpus import open_corpus
from symjax.models import cost
from symjax.training.sharding import make_mesh
from symjax.training.starting import compiled_step, use_compile_cache, with_vocabulary
from symjax.training.step import compile_program

MIB = 2**20


def describe(options: config.Config) -> str:
    """A table of weights, and the cost of a step; compiles it, but trains nothing.

    Raises:
        ValueError: whatever a run of this configuration would refuse.
    """
    use_compile_cache()
    mesh = make_mesh(options.mesh)
    with tempfile.TemporaryDirectory() as folder:
        corpus = open_corpus(options.data, Path(folder))
        corpus.check_length(options.model.length)
        options = with_vocabulary(options, corpus)
        data = corpus.fingerprint
    program = compile_program(options, mesh)
    step = compiled_step(program, (options.batch_size, options.model.length))
    weights = program.state.params
    parameters = sum(weight.size for weight in jax.tree.leaves(weights))
    tokens = options.batch_size * options.model.length
    flops = tokens * cost.train_flops(options.model, parameters)
    lines = [
        *_table(weights),
        "",
        f"parameters          {parameters:,}",
        f"training tokens     {data['train']['tokens']:,}"
        f" ({options.steps * tokens / data['train']['tokens']:.1f} passes)",
        f"tokens a step       {tokens:,}",
        f"FLOPs a step        {flops:.3g} (multiply-adds as two, by formula)",
        f"mesh                {dict(program.mesh.shape)}",
        _memory(step),
    ]
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
        size = layers
        for length in shape:
            size *= length
        rows.append((name, str(shape), str(layers), f"{size:,}", axes))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _memory(step: jax.stages.Compiled) -> str:
    """Bytes of the compiled training step on each device, as the compiler plans it."""
    memory = step.memory_analysis()
    if memory is None:
        return "memory a device     not known to this compiler"
    state = memory.argument_size_in_bytes / MIB
    working = memory.temp_size_in_bytes / MIB
    return (
        f"memory a device     {state + working:,.1f} MiB: weights, optimizer and batch "
        f"{state:,.1f}, working {working:,.1f}"
    )
