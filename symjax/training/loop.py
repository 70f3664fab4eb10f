"""A run from its configuration to its last checkpoint."""

import dataclasses
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from symjax import config
from symjax.data import batches
from symjax.data.corpus import Corpus, open_corpus
from symjax.models.generate import generate
from symjax.training.checkpoint import Checkpoints
from symjax.training.measure import mean_loss
from symjax.training.metrics import Metrics
from symjax.training.progress import Progress
from symjax.training.sharding import make_mesh
from symjax.training.step import Program, State, compile_program

SAMPLE_PROMPT, SAMPLE_LENGTH = 16, 120  # tokens


def run(options: config.Config, workdir: Path) -> None:
    """Train until `options.steps`, from the newest checkpoint of `workdir` if any.

    Raises:
        ValueError: bad input; the message is one line, and nothing of an earlier run
            has been changed.
        FloatingPointError: the loss or its gradient is not finite.
    """
    if options.steps < 1:
        raise ValueError(f"steps must be at least 1, got {options.steps}")
    use_compile_cache()
    mesh = make_mesh(options.mesh)
    with Checkpoints(workdir / "checkpoints", options.checkpoint.keep) as checkpoints:
        saved = checkpoints.read_meta() if checkpoints.steps() else None
        if saved is not None:
            refuse_differences(saved["config"], options, workdir)
        corpus = open_corpus(options.data, workdir / "data", replace=saved is None)
        if saved is not None:
            check_data(saved["data"], corpus, workdir)
        resolved = with_vocabulary(options, corpus)
        program = compile_program(resolved, mesh)
        corpus.check_length(options.model.length)
        Run(options, resolved, workdir, corpus, program, checkpoints).train()


class Run:
    """The moving parts of one run, so that each step of the loop reads as a line."""

    def __init__(
        self,
        options: config.Config,
        resolved: config.Config,
        workdir: Path,
        corpus: Corpus,
        program: Program,
        checkpoints: Checkpoints,
    ):
        self.options = options
        self.resolved = resolved
        self.corpus = corpus
        self.program = program
        self.checkpoints = checkpoints
        self.state, self.constants = self._start()
        self.start = int(self.state.step)
        self.heldout: float | None = None
        self.metrics = Metrics(workdir, self.start, options.log.tensorboard)
        self.progress = Progress(options.steps, self.start)
        self.clock = Clock(options.batch_size * options.model.length)

    def train(self) -> None:
        """Every step that is left, with what is due after each."""
        steps = self.options.steps
        if self.start >= steps:
            self.progress.line(
                f"complete at step {self.start}: a larger --config.steps goes on"
            )
            return
        key = jax.random.key(self.options.seed)
        waiting: dict[str, Any] = {}
        try:
            for done, rows in self._batches(steps):
                with jax.set_mesh(self.program.mesh):
                    self.state, metrics = self.program.train(
                        self.state, self.constants, *rows, key
                    )
                # The metrics of a step are read while the next one runs.
                if waiting:
                    self._report(done - 1, waiting)
                waiting = metrics
                if self._due(done):
                    self._report(done, waiting)
                    waiting = {}
                    self._pause(done)
        finally:
            self.progress.close()
            self.metrics.close()

    def _start(self) -> tuple[State, dict]:
        """Fresh weights, or those of the newest whole checkpoint."""
        if not self.checkpoints.steps():
            with jax.set_mesh(self.program.mesh):
                return self.program.initial(self.options.seed)
        abstract = self.program.state
        trees, meta = self.checkpoints.restore(
            {
                "params": abstract.params,
                "optimizer": abstract.optimizer,
                "constants": self.program.constants,
            }
        )
        step = jax.device_put(jnp.int32(meta["step"]), abstract.step.sharding)
        return State(step, trees["params"], trees["optimizer"]), trees["constants"]

    def _batches(self, steps: int) -> Iterator[tuple[int, list[jax.Array]]]:
        """(number of the step, its inputs and targets) for the steps that are left."""
        shape = (self.options.batch_size, self.options.model.length)
        for step in range(self.start, steps):
            yield (
                step + 1,
                self.program.place(
                    shape,
                    lambda start, stop, step=step: batches.batch(
                        self.corpus.train,
                        length=shape[1],
                        batch_size=shape[0],
                        seed=self.options.seed,
                        step=step,
                        start=start,
                        stop=stop,
                    ),
                ),
            )

    def _due(self, done: int) -> bool:
        """Whether an evaluation or a checkpoint follows this step."""
        periods = (self.options.evaluate.every, self.options.checkpoint.every)
        return done == self.options.steps or any(p and done % p == 0 for p in periods)

    def _report(self, done: int, metrics: dict[str, Any]) -> None:
        """Check the numbers of a step, and log them where it is time."""
        values = {name: float(value) for name, value in metrics.items()}
        for name in ("train/loss", "gradient_norm"):
            if not math.isfinite(values[name]):
                self.metrics.write(done, values)
                raise FloatingPointError(
                    f"{name} is {values[name]} at step {done}; {self._last_good()}"
                )
        self.clock.step()
        if done % self.options.log.every == 0 or done == self.options.steps:
            speed = self.clock.tokens_per_second()
            left = (self.options.steps - done) * self.clock.tokens / speed
            self.metrics.write(done, {**values, "tokens_per_second": speed})
            self.progress.update(done, values["train/loss"], speed, left)

    def _last_good(self) -> str:
        self.checkpoints.wait()
        steps = self.checkpoints.steps()
        if not steps:
            return "there is no checkpoint yet"
        return f"the last good checkpoint is {steps[-1]}"

    def _pause(self, done: int) -> None:
        """The evaluation and the checkpoint that are due; the clock stands still."""
        with self.clock.stopped():
            last = done == self.options.steps
            every = self.options.evaluate.every
            if every and (last or done % every == 0):
                self._evaluate(done)
            every = self.options.checkpoint.every
            if last or (every and done % every == 0):
                self._save(done)

    def _evaluate(self, done: int) -> None:
        chosen = batches.heldout_batches(
            self.corpus.heldout,
            length=self.options.model.length,
            batch_size=self.options.batch_size,
            count=self.options.evaluate.batches,
        )
        self.heldout = mean_loss(
            self.program, self.state.params, self.constants, chosen
        )
        self.metrics.write(done, {"heldout/loss": self.heldout})
        lines = ", ".join(f"{n} {v:.2f}" for n, v in self.corpus.ngrams.items())
        unit = "byte" if self.options.data.tokenizer == "byte" else "character"
        self.progress.line(
            f"step {done}: held-out loss {self.heldout:.4f} nats/{unit} ({lines})"
        )
        self.progress.line(f"step {done}: sample {self._sample()!r}")

    def _sample(self) -> str:
        """What the model writes after the first words of the held-out text."""
        count = min(SAMPLE_LENGTH, self.options.model.length - SAMPLE_PROMPT)
        if count < 1:
            return ""
        weights = jax.device_get((self.state.params, self.constants))
        model = nnx.merge(self.program.graph, *weights)
        prompt = jnp.asarray(self.corpus.heldout[None, :SAMPLE_PROMPT], jnp.int32)
        tokens = generate(model, prompt, count, jax.random.key(0), temperature=0.8)
        return self.corpus.tokenizer.decode(jnp.concatenate([prompt, tokens], 1)[0])

    def _save(self, done: int) -> None:
        self.checkpoints.save(
            done,
            {
                "params": self.state.params,
                "optimizer": self.state.optimizer,
                "constants": self.constants,
            },
            {
                "config": config.to_dict(self.options),
                "data": self.corpus.fingerprint,
                "heldout_loss": self.heldout,
            },
        )


class Clock:
    """Tokens a second since the last question, pauses left out."""

    def __init__(self, tokens: int):
        self.tokens = tokens  # a step
        self.steps = 0
        self.since = time.monotonic()

    def step(self) -> None:
        self.steps += 1

    def tokens_per_second(self) -> float:
        now = time.monotonic()
        speed = self.steps * self.tokens / max(now - self.since, 1e-9)
        self.steps, self.since = 0, now
        return speed

    def stopped(self):
        return _Stopped(self)


class _Stopped:
    def __init__(self, clock: Clock):
        self.clock = clock

    def __enter__(self) -> None:
        self.began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.clock.since += time.monotonic() - self.began


def refuse_differences(
    saved: dict[str, Any], options: config.Config, workdir: Path
) -> None:
    """Raises: ValueError: a checkpoint's configuration differs where it must not."""
    found = config.differences(saved, config.to_dict(options))
    if found:
        raise ValueError(
            f"{workdir} holds a run of another configuration ({', '.join(found)}): "
            "use its values, or another --workdir"
        )


def check_data(saved: dict[str, Any], corpus: Corpus, workdir: Path) -> None:
    """Raises: ValueError: the corpus is not the one that the checkpoint has seen."""
    if saved["sha256"] != corpus.fingerprint["sha256"]:
        raise ValueError(
            f"the text of {workdir / 'data'} is not the one of its checkpoints "
            f"(sha256 {corpus.fingerprint['sha256'][:12]}, then "
            f"{saved['sha256'][:12]})"
        )


def with_vocabulary(options: config.Config, corpus: Corpus) -> config.Config:
    """The configuration with the tokenizer's vocabulary where it says 0.

    Raises:
        ValueError: the model's vocabulary is smaller than the tokenizer's.
    """
    needed, given = corpus.tokenizer.vocabulary, options.model.vocabulary
    if given and given < needed:
        raise ValueError(
            f"model.vocabulary {given} is smaller than the {needed} tokens of "
            f"data.tokenizer {options.data.tokenizer!r}"
        )
    model = dataclasses.replace(options.model, vocabulary=given or needed)
    return dataclasses.replace(options, model=model)


def use_compile_cache() -> None:
    """Keep compiled programs in the user's cache folder, unless jax has one set."""
    if jax.config.jax_compilation_cache_dir is None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(home / "symjax" / "jax"))
