"""Speed and memory of prefill, training and decoding, against softmax attention.

The reference is the same model with plain softmax attention in every block. The batch
is one row of 128, 256, … 2048 tokens, or of `--lengths` tokens. "tokens/s" are the
tokens of one call divided by the median time of 5 rounds. "÷ softmax" is the median
over rounds of (time of softmax) / (time of the model): above 1 the model is faster.
"MiB" is the memory of arguments and workspace of the compiled program. "MiB ÷ softmax"
above 1 means more memory than softmax. A second table has the crossover: the length
from which the model is at least as fast.

Rounds of both models alternate, so that other load on the machine affects both equally.
Weights are random, not those of the checkpoint, since time does not depend on them.
Times are not in the JSON, which has the same bytes for the same checkpoint.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from symjax import config
from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.results import Options, Result, Table, progress, series
from symjax.figures import Lines
from symjax.models.build import build
from symjax.training.compile import compiled_step
from symjax.training.sharding import make_mesh
from symjax.training.step import batch_like, build_program

LENGTHS = tuple(2**i for i in range(7, 12))  # tokens of a row, without --lengths
ROUNDS = 5
STEPS = 16  # tokens decoded in a round
PATIENCE = 60.0  # if a length takes more seconds, longer ones of LENGTHS are left out
MIB = 2**20


class Job(NamedTuple):
    """A compiled program to time.

    Attributes:
        run: calls the program once.
        tokens: number of tokens that one call processes.
        memory: MiB of arguments and workspace, as the compiler plans them.
    """

    run: Callable[[], Any]
    tokens: int
    memory: float


def speed(run: LoadedRun, options: Options) -> Result:
    """Measure tokens per second and memory by length, against softmax.

    Three kinds of work are timed: a prefill of the row, a training step on the row, and
    for decoders the decoding of the last 16 tokens of the row. The lengths of
    `Options.lengths` are measured however long they take.
    """
    lengths = options.lengths or LENGTHS
    model = run.config.model
    text = [
        f"{name_of(model)} against softmax: one row of tokens, {ROUNDS} alternating "
        f"rounds, on {jax.devices()[0].device_kind}"
    ]
    if model.patch:
        text.append("the tokens are patches, of images one patch high")
    if not config.is_causal(model):
        text.append("decoding: none, an encoder predicts no next token")
    cells: list[tuple[Any, ...]] = []
    for length in progress(lengths, "speed"):
        start = time.monotonic()
        try:
            cells += compare_with_softmax(run.config, length)
        except ValueError as error:  # it does not fit into memory
            text.append(f"{length} tokens and more left out: {error}")
            break
        hurried = not options.lengths and length < LENGTHS[-1]
        if hurried and time.monotonic() - start > PATIENCE:
            reason = f"these took more than {PATIENCE:.0f} s"
            text.append(f"more than {length} tokens left out: {reason}")
            break
    measured = ("tokens/s", "÷ softmax", "MiB", "MiB ÷ softmax")
    tables = [Table("speed", ("work", "tokens", *measured), cells)]
    points = series((work, length, ratio) for work, length, _, ratio, *_ in cells)
    if cells and with_softmax(model) != model:
        rows = [(work, crossover(*curve)) for work, curve in points.items()]
        tables.append(Table("speed_crossover", ("work", "faster from tokens"), rows))
    label = "tokens/s ÷ those of softmax"
    title = "Speed relative to softmax, by the tokens of a row"
    lines = Lines("speed", "tokens", label, points, log_x=True, title=title)
    return Result({}, text, tuple(tables), (lines,) if cells else ())


def crossover(lengths: Sequence[float], ratios: Sequence[float]) -> str:
    """Return the length from which on the ratios are 1 or more.

    Between two measured lengths the ratio is interpolated as a power of the length. For
    lengths from 128 to 2048, the result is "≤ 128" if the ratio is 1 or more at all of
    them, and "> 2048" if the ratio at 2048 is below 1.
    """
    slower = [i for i, ratio in enumerate(ratios) if ratio < 1]
    if not slower:
        return f"≤ {lengths[0]:.0f}"
    last = slower[-1]
    if last + 1 == len(ratios):
        return f"> {lengths[last]:.0f}"
    below, above = math.log(ratios[last]), math.log(ratios[last + 1])
    growth = math.log(lengths[last + 1] / lengths[last])
    return f"{lengths[last] * math.exp(growth * -below / (above - below)):.0f}"


def mechanisms(model: config.Model) -> list[str]:
    """Return the mechanism of every block."""
    return [config.mechanism_of(model, depth) for depth in range(model.depth)]


def name_of(model: config.Model) -> str:
    """Return a name for the model: its mechanisms, differential form and keys."""
    chosen = model.attention
    parts = ["+".join(dict.fromkeys(mechanisms(model)))]
    if chosen.differential != "none":
        parts.append(f"differential {chosen.differential}")
    if chosen.symmetric != "none":
        parts.append(f"{chosen.symmetric} symmetric keys")
    return ", ".join(parts)


def compare_with_softmax(options: config.Config, length: int) -> list[tuple[Any, ...]]:
    """Return a row (work, length, tokens/s, ÷ softmax, MiB, MiB ÷ softmax) per work.

    Raises:
        ValueError: a training step needs more memory than there is.
    """
    model = with_length(options.model, length)
    models = [model, with_softmax(model)]
    cells: list[tuple[Any, ...]] = []
    works = [prefill, training]
    if config.is_causal(options.model):
        works.append(decoding)
    for work in works:
        job, reference = (
            work(dataclasses.replace(options, model=model), length) for model in models
        )
        seconds = time_in_turns(job.run, reference.run)
        ratio = float(np.median(seconds[1] / seconds[0]))
        rate = job.tokens / float(np.median(seconds[0]))
        memory = job.memory / reference.memory if reference.memory else None
        cells.append((work.__name__, length, rate, ratio, job.memory, memory))
    return cells


def with_length(model: config.Model, length: int) -> config.Model:
    """Return the model for rows of `length` tokens, or images of `length` patches.

    These images are one patch high.
    """
    image = model.image
    if model.patch:
        image = (model.patch, model.patch * length, image[2])
    return dataclasses.replace(model, length=length, image=image)


def with_softmax(model: config.Model) -> config.Model:
    """Return the same model with plain softmax attention in every block."""
    return dataclasses.replace(model, attention=config.Attention(), pattern=())


def time_in_turns(*jobs: Callable[[], Any]) -> np.ndarray:
    """Return seconds [jobs, rounds], without a first round, which may compile."""
    seconds = np.zeros((len(jobs), ROUNDS + 1))
    for turn in range(ROUNDS + 1):
        for index, job in enumerate(jobs):
            start = time.perf_counter()
            jax.block_until_ready(job())
            seconds[index, turn] = time.perf_counter() - start
    return seconds[:, 1:]


def prefill(options: config.Config, length: int) -> Job:
    """Return a job that computes the logits of a whole row."""
    graph, weights = _split_model(options)
    inputs, _ = _row_of_zeros(options.model, length)
    run = jax.jit(lambda weights, inputs: nnx.merge(graph, weights)(inputs))
    compiled = run.lower(weights, inputs).compile()
    return Job(partial(compiled, weights, inputs), length, _memory(compiled))


def training(options: config.Config, length: int) -> Job:
    """Return a job that runs one training step on one row."""
    optimizer = dataclasses.replace(options.optimizer, accumulate=1)
    options = dataclasses.replace(options, batch_size=1, optimizer=optimizer)
    program = build_program(options, make_mesh(config.Mesh(data=1)))
    compiled = compiled_step(program, (1, length))
    row = list(map(np.asarray, _row_of_zeros(options.model, length)))
    rows = program.place((1, length), lambda *_: row)
    key = jax.random.key(0)
    with jax.set_mesh(program.mesh):
        state, constants = program.initial(0)

    def run() -> Any:
        nonlocal state
        with jax.set_mesh(program.mesh):
            state, metrics = compiled(state, constants, *rows, key)
        return metrics

    return Job(run, length, _memory(compiled))


def decoding(options: config.Config, length: int) -> Job:
    """Return a job that decodes the last 16 tokens of a row.

    The cache has room for the whole row. Decoding begins after the other tokens.
    """
    graph, weights = _split_model(options)
    steps = min(STEPS, length)

    cache = nnx.merge(graph, weights).init_cache(1, length)
    cache = cache._replace(position=cache.position + length - steps)

    def write(weights: Any, cache: Any, tokens: jax.Array) -> Any:
        model = nnx.merge(graph, weights)

        def step(cache: Any, token: jax.Array) -> tuple[Any, jax.Array]:
            logits, cache = model.decode(token[None, None], cache)
            return cache, logits[0, 0]

        return jax.lax.scan(step, cache, tokens)[1]

    arguments = weights, cache, jnp.zeros(steps, jnp.int32)
    compiled = jax.jit(write).lower(*arguments).compile()
    return Job(partial(compiled, *arguments), steps, _memory(compiled))


def _split_model(options: config.Config) -> tuple[nnx.GraphDef, Any]:
    return nnx.split(build(options.model, rngs=nnx.Rngs(0)))


def _row_of_zeros(model: config.Model, length: int) -> list[jax.Array]:
    """Return inputs and targets of one row; time does not depend on their values."""
    return [jnp.zeros(x.shape, x.dtype) for x in batch_like(model, (1, length))]


def _memory(compiled: jax.stages.Compiled) -> float:
    """Return MiB of arguments and workspace; 0 if the compiler does not say."""
    planned = compiled.memory_analysis()
    if planned is None:
        return 0.0
    return (planned.argument_size_in_bytes + planned.temp_size_in_bytes) / MIB
