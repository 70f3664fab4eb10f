"""Speed of prefill, training and decoding, against the same model with softmax.

The calls of both models are interleaved, so that other load affects both equally.
Weights are new ones: time does not depend on them. No figure goes into the JSON of a
checkpoint, which is the same bytes each time.
"""

import dataclasses
import time
from collections.abc import Callable
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
from symjax.training.step import batch_like, compile_program

LENGTHS = tuple(2**i for i in range(7, 12))
ROUNDS = 5
STEPS = 16  # tokens decoded in a round
PATIENCE = 60.0  # seconds for one length, after which no longer one is tried
MIB = 2**20


class Job(NamedTuple):
    """Something to time: calls of `run` do `tokens` tokens of work each."""

    run: Callable[[], Any]
    tokens: int
    memory: float  # MiB of arguments and workspace, as the compiler plans them


def speed(run: LoadedRun, options: Options) -> Result:
    """Tokens a second and memory by length: prefill, a training step, decoding.

    One row of tokens; decoding with a full context. Ratios to softmax are medians of
    those of rounds. An encoder is not decoded: it predicts no next token.
    """
    model = run.config.model
    text = [
        f"{named(model)} against softmax: one row of tokens, {ROUNDS} rounds that take "
        f"turns, on {jax.devices()[0].device_kind}"
    ]
    if model.patch:
        text.append("the tokens are patches, of images one patch high")
    if not config.is_causal(model):
        text.append("decoding: none, an encoder predicts no next token")
    cells: list[tuple[Any, ...]] = []
    for length in progress(LENGTHS, "speed"):
        start = time.monotonic()
        try:
            cells += compare(run.config, length)
        except ValueError as error:  # it does not fit into memory
            text.append(f"{length} tokens and more left out: {error}")
            break
        if length < LENGTHS[-1] and time.monotonic() - start > PATIENCE:
            taken = f"these took {PATIENCE:.0f} s"
            text.append(f"more than {length} tokens left out: {taken}")
            break
    measured = ("tokens/s", "÷ softmax", "MiB", "MiB ÷ softmax")
    tables = (Table("speed", ("work", "tokens", *measured), cells),)
    points = series((work, length, ratio) for work, length, _, ratio, *_ in cells)
    label = "tokens/s ÷ those of softmax"
    title = "Speed relative to softmax, by the tokens of a row"
    lines = Lines("speed", "tokens", label, points, log_x=True, title=title)
    return Result({}, text, tables, (lines,) if cells else ())


def mechanisms(model: config.Model) -> list[str]:
    return [config.mechanism_of(model, depth) for depth in range(model.depth)]


def named(model: config.Model) -> str:
    """A name for the model: its mechanisms, keys and maps."""
    chosen = model.attention
    parts = ["+".join(dict.fromkeys(mechanisms(model)))]
    if chosen.differential != "none":
        parts.append(f"differential {chosen.differential}")
    if chosen.symmetric != "none":
        parts.append(f"{chosen.symmetric} symmetric keys")
    return ", ".join(parts)


def compare(options: config.Config, length: int) -> list[tuple[Any, ...]]:
    """(work, length, tokens/s, ratio, MiB, ratio) of prefill, training and, unless it
    is an encoder, decoding.

    Raises:
        ValueError: a training step needs more memory than there is.
    """
    models = [sized(options.model, length), softmax(sized(options.model, length))]
    cells: list[tuple[Any, ...]] = []
    works = [prefill, training]
    if config.is_causal(options.model):
        works.append(decoding)
    for work in works:
        one, other = (
            work(dataclasses.replace(options, model=model), length) for model in models
        )
        seconds = interleaved(one.run, other.run)
        ratio = float(np.median(seconds[1] / seconds[0]))
        rate = one.tokens / float(np.median(seconds[0]))
        memory = one.memory / other.memory if other.memory else None
        cells.append((work.__name__, length, rate, ratio, one.memory, memory))
    return cells


def sized(model: config.Model, length: int) -> config.Model:
    """A model of so many tokens; of an image, of so many patches side by side."""
    image = model.image
    if model.patch:
        image = (model.patch, model.patch * length, image[2])
    return dataclasses.replace(model, length=length, image=image)


def softmax(model: config.Model) -> config.Model:
    """The same model with plain softmax attention in every block."""
    return dataclasses.replace(model, attention=config.Attention(), pattern=())


def interleaved(*jobs: Callable[[], Any]) -> np.ndarray:
    """Seconds [jobs, rounds], without a first round, which may compile."""
    seconds = np.zeros((len(jobs), ROUNDS + 1))
    for turn in range(ROUNDS + 1):
        for index, job in enumerate(jobs):
            start = time.perf_counter()
            jax.block_until_ready(job())
            seconds[index, turn] = time.perf_counter() - start
    return seconds[:, 1:]


def prefill(options: config.Config, length: int) -> Job:
    """The logits of a whole text."""
    graph, weights = _new(options)
    inputs, _ = _row(options.model, length)
    run = jax.jit(lambda weights, inputs: nnx.merge(graph, weights)(inputs))
    compiled = run.lower(weights, inputs).compile()
    return Job(partial(compiled, weights, inputs), length, _memory(compiled))


def training(options: config.Config, length: int) -> Job:
    """One step of the optimizer on one row."""
    optimizer = dataclasses.replace(options.optimizer, accumulate=1)
    options = dataclasses.replace(options, batch_size=1, optimizer=optimizer)
    program = compile_program(options, make_mesh(config.Mesh(data=1)))
    compiled = compiled_step(program, (1, length))
    row = list(map(np.asarray, _row(options.model, length)))
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
    """Tokens after a context that fills the cache up to its end."""
    graph, weights = _new(options)
    steps = min(STEPS, length)

    cache = nnx.merge(graph, weights).init_cache(1, length)
    cache = cache._replace(position=cache.position + length - steps)

    def write(weights: Any, cache: Any, tokens: jax.Array) -> Any:
        model = nnx.merge(graph, weights)

        def step(cache: Any, token: jax.Array) -> tuple[Any, jax.Array]:
            logits, cache = model.decode(token[None, None], cache)
            return cache, logits[0, 0]

        return jax.lax.scan(step, cache, tokens)[1]

    given = weights, cache, jnp.zeros(steps, jnp.int32)
    compiled = jax.jit(write).lower(*given).compile()
    return Job(partial(compiled, *given), steps, _memory(compiled))


def _new(options: config.Config) -> tuple[nnx.GraphDef, Any]:
    return nnx.split(build(options.model, rngs=nnx.Rngs(0)))


def _row(model: config.Model, length: int) -> list[jax.Array]:
    """Inputs and targets of one row: time does not depend on what they are."""
    return [jnp.zeros(x.shape, x.dtype) for x in batch_like(model, (1, length))]


def _memory(compiled: jax.stages.Compiled) -> float:
    planned = compiled.memory_analysis()
    if planned is None:
        return 0.0
    return (planned.argument_size_in_bytes + planned.temp_size_in_bytes) / MIB
