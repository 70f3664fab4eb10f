"""Speed of training steps and of decoding, for device.py."""

import time
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from device_jobs import in_turns, jax_job, memory
from device_peers import DOCUMENT
from device_rows import Sizes

from symjax import config
from symjax.data.documents import with_segment_ids
from symjax.evaluation.measures.speed import decoding
from symjax.models.chips import chip_of
from symjax.models.cost import train_flops
from symjax.training.sharding import make_mesh
from symjax.training.step import build_program

DECODED = "125m"  # the size of the models that are decoded


def models(size: str, sizes: Sizes) -> dict[str, config.Model]:
    """Return the models of a size by name, with about equally many parameters.

    The symmetric model has fewer, since it has no key projection. Differential models
    have half as many heads with values twice as wide, as in arXiv:2410.05258.
    """
    width, depth, heads = dict(sizes.models)[size]
    plain = config.Model(
        vocabulary=sizes.vocabulary,
        width=width,
        depth=depth,
        heads=heads,
        length=sizes.length,
        positions="rope",
        norm="rmsnorm",
        activation="gelu",
        bias=False,
        tie_embeddings=True,
        dtype="bfloat16",
        remat="none",
        # A scan would fill, write and read stacks of the residuals of all layers.
        scan_layers=False,
    )
    chosen = config.Attention
    both = chosen(symmetric="plain", differential="v1")
    performer = chosen(mechanism="performer", query_key_norm=True)
    gated = chosen(mechanism="decay", decay="gated", output_gate="silu")
    delta = chosen(
        mechanism="delta", decay="none", short_convolution=4, output_gate="silu"
    )
    halved = heads // 2
    return {
        "gpt": plain,
        "diff": replace(plain, heads=halved, attention=chosen(differential="v1")),
        "diff_sym": replace(plain, heads=halved, attention=both),
        "performer": replace(plain, attention=performer),
        "retention": replace(plain, attention=chosen(mechanism="decay")),
        "gla": replace(plain, attention=gated),
        "delta": replace(plain, attention=delta),
    }


def peak() -> float | None:
    """Return the published peak in bfloat16 operations per second, None if unknown."""
    chip = chip_of(jax.devices()[0].device_kind)
    return chip and chip.flops


def step_speed(name: str, documents: str, sizes: Sizes) -> dict[str, Any]:
    """Measure a training step: tokens per second, FLOP/s, MFU and times of compiling.

    Args:
        name: a model and its size, as in "gpt 125m".
        documents: empty for joined documents; any other text for separate ones.
    """
    kind, _, size = name.partition(" ")
    model, separate = models(size, sizes)[kind], bool(documents)
    options = config.Config(model=model, batch_size=sizes.batch)
    program = build_program(options, make_mesh(config.Mesh(data=1)), separate=separate)
    shape = (sizes.batch, model.length)
    random = np.random.default_rng(0)
    text = random.integers(0, model.vocabulary, shape, np.int32)
    lengths = random.geometric(1 / DOCUMENT, text.size)

    def rows(start: int, stop: int) -> tuple:
        joined = text[start:stop], text[start:stop]
        starts = np.arange(start, stop) * model.length
        if not separate:
            return joined
        return with_segment_ids(starts, *joined, np.cumsum(lengths), shared=False)

    batch, seen = program.place(shape, rows), model.length
    if separate:  # `seen` is the length of a joined row with as many pairs per token
        ids = rows(0, sizes.batch)[0].segment_ids
        counts = (np.unique(x, return_counts=True)[1] for x in ids)
        seen = round(sum((x**2).sum() for x in counts) / text.size)
    began = time.perf_counter()
    lowered = program.lower(shape)
    middle = time.perf_counter()
    compiled = lowered.compile()
    row: dict[str, Any] = {
        "trace_and_lower_s": round(middle - began, 2),
        "compile_s": round(time.perf_counter() - middle, 2),
        **memory(compiled),
    }
    ends = []
    with jax.set_mesh(program.mesh):
        began = time.perf_counter()
        state, constants = jax.block_until_ready(program.initial(0))
        row["initial_s"] = round(time.perf_counter() - began, 2)
        count = sum(x.size for x in jax.tree.leaves(state.params))
        before = None
        for _ in range(sizes.rounds + 3):
            state, metrics = compiled(state, constants, *batch, jax.random.key(0))
            # As in training, the next step runs while the metrics are read.
            if before is not None:
                loss = float(before["train/loss"])
                ends.append(time.perf_counter())
            before = metrics
    rate = text.size / float(np.median(np.diff(ends)[1:]))
    flops = rate * train_flops(replace(model, length=seen), count)
    figures = {"tokens_per_second": rate, "tflops": flops / 1e12}
    if (most := peak()) is not None:
        figures["mfu"] = flops / most
    row = figures | {"parameters": count, "loss": loss} | row
    return row if np.isfinite(loss) else row | {"fault": "the loss is not finite"}


def decode_speed(name: str, context: int, sizes: Sizes) -> dict[str, Any]:
    """Measure the tokens per second of decoding one sequence after a context."""
    model = replace(models(DECODED, sizes)[name], length=context)
    began = time.perf_counter()
    found = decoding(config.Config(model=model), context)
    ready = time.perf_counter() - began
    times = in_turns({"": jax_job(found.run)}, sizes.rounds, sizes.patience)[""]
    rate = found.tokens / float(np.median(times))
    return {
        "tokens_per_second": rate,
        "tokens": found.tokens,
        "mib": found.memory,
        "ready_s": round(ready, 2),
    }
