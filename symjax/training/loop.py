"""A run from its configuration to its last checkpoint."""

import contextlib
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from symjax import config, validation
from symjax.attention.projections import KINDS
from symjax.data.corpus import Corpus
from symjax.data.examples import Examples, open_examples
from symjax.data.folder import source_change
from symjax.models.convert import carried
from symjax.models.generate import generate
from symjax.training import processes, starting
from symjax.training.checkpoint import Checkpoints
from symjax.training.exit_codes import Interrupted
from symjax.training.initial import weights_of
from symjax.training.interrupt import Interrupts
from symjax.training.launch import is_first
from symjax.training.measure import Means, means
from symjax.training.metrics import Metrics
from symjax.training.optimizer import schedule_change
from symjax.training.progress import Clock, Progress
from symjax.training.sharding import make_mesh
from symjax.training.step import Program, State, compile_program

MOST_SKIPPED = 20  # steps in a row, then a run ends
SAMPLE_PROMPT, SAMPLE_LENGTH = 16, 120  # tokens


def run(options: config.Config, workdir: Path) -> None:
    """Train until `options.steps`, from the newest checkpoint of `workdir` if any.

    Raises:
        ValueError: bad input; the message is one line, and the workdir is as it was.
        FloatingPointError: the loss or its gradient is not finite, or a spike.
        Interrupted: a signal came; after a step, a checkpoint has been saved.
    """
    starting.use_compile_cache()
    processes.check_same(workdir=str(workdir), **validation.to_dict(options))
    mesh = processes.together(lambda: make_mesh(options.mesh))
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        owned = starting.owned(workdir)
        # In turn: who makes the folder is who removes it, after the lock in it.
        processes.in_turn(lambda: stack.enter_context(owned))
        with starting.undone_if_refused(workdir):
            steps = Checkpoints(workdir / "checkpoints").steps()
            processes.check_same(checkpoints=steps)
            saved = (
                processes.together(lambda: _saved(options, workdir)) if steps else None
            )
            corpus = processes.in_turn(
                lambda: _corpus(options, workdir, saved, interrupts)
            )
            interrupts.check()
            program = processes.together(
                lambda: compile_program(starting.with_vocabulary(options, corpus), mesh)
            )
            checkpoints = processes.together(
                lambda: Checkpoints(
                    workdir / "checkpoints",
                    options.checkpoint.keep,
                    best=options.checkpoint.best,
                )
            )
            stack.enter_context(checkpoints)
            whole = Run(options, workdir, corpus, program, checkpoints)
            interrupts.check()
        stack.enter_context(contextlib.closing(whole))
        whole.train(interrupts)


def _saved(options: config.Config, workdir: Path) -> dict[str, Any]:
    """The meta of the newest checkpoint.

    Raises:
        ValueError: it is damaged, or of a run of another configuration.
    """
    saved = Checkpoints(workdir / "checkpoints").read_meta()
    found = starting.saved_options(saved, workdir)
    starting.refuse_differences(found, options, workdir)
    return saved


def _corpus(
    options: config.Config,
    workdir: Path,
    saved: dict[str, Any] | None,
    interrupts: Interrupts,
) -> Examples:
    """The text of the run: the first process packs it, the others find it there.

    Raises:
        ValueError: it is damaged, too short or not that of the checkpoints.
        Interrupted: a signal came, here or before.
    """
    if not is_first():
        starting.check_shared(workdir)
    elif saved is None:
        starting.refuse_other_files(workdir)
    replace = saved is None and is_first()
    with interrupts.anywhere():
        corpus = open_examples(options, workdir / "data", replace=replace)
    if saved is not None:
        starting.check_data(saved, corpus, workdir)
    corpus.check_length(options.model.length)
    return corpus


class Run:
    """The moving parts of one run, so that each step of the loop reads as a line.

    Raises:
        ValueError: the model does not fit the memory or the checkpoint, or the files
            of the run cannot be written.
    """

    def __init__(
        self,
        options: config.Config,
        workdir: Path,
        corpus: Examples,
        program: Program,
        checkpoints: Checkpoints,
    ):
        self.options = options
        self.workdir = workdir
        self.corpus = corpus
        self.program = program
        self.checkpoints = checkpoints
        self.shape = (options.batch_size, options.model.length)
        self.saved = options  # of the checkpoint, once one is restored
        together = processes.together
        self.step = together(lambda: starting.compiled_step(program, self.shape))
        self.state, self.constants = together(self._restored)
        self.first = int(self.state.step)
        self.heldout: float | None = None
        self.skipped = int(self.state.optimizer.skipped)
        self.skipped_in_a_row = 0
        board, writes = options.log.tensorboard, is_first()
        self.metrics = together(
            lambda: Metrics(workdir, self.first, board, writes=writes)
        )
        self.progress = Progress(options.steps, self.first, shown=writes)

    def close(self) -> None:
        self.progress.close()
        self.metrics.close()

    def train(self, interrupts: Interrupts) -> None:
        """Every step that is left, with what is due after each.

        Raises:
            FloatingPointError, Interrupted: as `run` says.
        """
        options = self.options
        if self.first >= options.steps:
            self.progress.line(
                f"complete at step {self.first}: a larger --config.steps goes on"
            )
            return
        self._introduce()
        key = jax.random.key(options.seed)
        self.clock = Clock(self.shape[0] * self.shape[1])
        waiting: dict[str, Any] = {}
        interrupts.begin_steps()
        for done in range(self.first + 1, options.steps + 1):
            rows = self._rows(done - 1)
            with jax.set_mesh(self.program.mesh):
                self.state, metrics = self.step(self.state, self.constants, *rows, key)
            self.clock.step()
            # The metrics of a step are read while the next one runs.
            if waiting:
                self._report(done - 1, waiting)
            waiting = metrics
            judge = self._due(options.evaluate.every, done)
            stop = interrupts.due()
            save = self._due(options.checkpoint.every, done) or stop
            if judge or save:
                self._report(done, waiting)
                waiting = {}
                with self.clock.stopped():
                    if judge:
                        loss = self._evaluate(done)
                        save = save or self.checkpoints.improves(loss)
                    if save:
                        self._save(done, judged=judge)
            if stop and done < options.steps:
                raise Interrupted(stop, self._stopped_at(done))
        self.checkpoints.wait()  # a signal does not end the last save
        self.progress.line(
            f"complete at step {done}: python eval.py --workdir {self.workdir}"
        )

    def _restored(self) -> tuple[State, dict]:
        """Those of the newest whole checkpoint, or fresh ones."""
        if not self.checkpoints.steps():
            return self._fresh()
        abstract = self.program.state
        trees, meta = self.checkpoints.restore(
            {
                "params": abstract.params,
                "optimizer": abstract.optimizer,
                "constants": self.program.constants,
            }
        )
        self.saved = starting.saved_options(meta, self.workdir)
        step = jax.device_put(jnp.int32(meta["step"]), abstract.step.sharding)
        return State(step, trees["params"], trees["optimizer"]), trees["constants"]

    def _fresh(self) -> tuple[State, dict]:
        """Weights drawn from the seed, or those of the run in `init_from`."""
        with jax.set_mesh(self.program.mesh):
            state, constants = self.program.initial(self.options.seed)
        unfitted = self.options.model.attention.features in KINDS
        if self.options.init_from:
            model = starting.with_vocabulary(self.options, self.corpus).model
            origin = weights_of(Path(self.options.init_from), model, self.corpus)
            state = state._replace(params=_placed(origin.params, state.params))
            found, unfitted = carried(constants, origin.constants, origin.source, model)
            constants = _placed(found, constants)
        if unfitted:
            with jax.set_mesh(self.program.mesh):
                inputs, _ = self._rows(0)
                constants = self.program.calibrate(state.params, constants, inputs)
        return state, constants

    def _introduce(self) -> None:
        weights = sum(x.size for x in jax.tree.leaves(self.state.params))
        begin = "new run"
        if self.first:
            begin = f"resumed at step {self.first}"
        elif self.options.init_from:
            begin = f"weights of {self.options.init_from}"
        count = jax.process_count()
        many = f" of {count} processes" if count > 1 else ""
        self.progress.line(
            f"{weights:,} parameters, {self.corpus.size}, "
            f"{self.program.mesh.size} {jax.devices()[0].platform} device(s)"
            f"{many}: {begin} in {self.workdir}"
        )
        taken = int(self.state.optimizer.taken)
        if line := schedule_change(self.saved, self.options, taken):
            self.progress.line(line)
        if line := source_change(self.options.data, self.workdir / "data"):
            self.progress.line(line)

    def _rows(self, step: int) -> list[jax.Array]:
        """Inputs and targets of a step, over the mesh."""
        rows = self.corpus.batch(self.shape, seed=self.options.seed, step=step)
        return self.program.place(self.shape, rows)

    def _due(self, every: int, done: int) -> bool:
        """The last step is always due, 0 means no other one."""
        return done == self.options.steps or (every > 0 and done % every == 0)

    def _report(self, done: int, metrics: dict[str, Any]) -> None:
        """Check the numbers of a step, show them, and log them where it is time."""
        values = {name: float(value) for name, value in metrics.items()}
        speed = self.clock.speed()
        if done % self.options.log.every == 0 or done == self.options.steps:
            self.metrics.write(done, {**values, "tokens_per_second": speed})
            self.clock.restart()
        self._judge_step(done, values)
        left = (self.options.steps - done) * self.clock.tokens / speed
        self.progress.update(done, values["train/loss"], speed, left)

    def _judge_step(self, done: int, values: dict[str, float]) -> None:
        """Stop at a harmful step, or say that it was skipped.

        Raises:
            FloatingPointError: as the configuration says, or as many steps were
                skipped in a row that the weights themselves must be the cause.
        """
        skipped = values["skipped_steps"] > self.skipped
        self.skipped = values["skipped_steps"]
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        finite = all(math.isfinite(values[x]) for x in ("train/loss", "gradient_norm"))
        if finite and not skipped:
            return
        name = "gradient_norm" if math.isfinite(values["train/loss"]) else "train/loss"
        what = f"{name} is {values[name]:.6g}"
        if done % self.options.log.every and done != self.options.steps:
            self.metrics.write(done, values)
        if not skipped or self.options.optimizer.nonfinite == "stop":
            self._not_finite(done, what)
        if self.skipped_in_a_row == MOST_SKIPPED:
            self._not_finite(done, f"{MOST_SKIPPED} steps in a row skipped: {what}")
        self.progress.line(f"step {done} skipped: {what}")

    def _not_finite(self, done: int, what: str) -> None:
        """Raises: FloatingPointError: naming the step and what can be gone back to."""
        self.checkpoints.settle()
        steps = self.checkpoints.steps()
        last = f"the last checkpoint is {steps[-1]}" if steps else "none was saved"
        raise FloatingPointError(f"{what} at step {done}; {last} in {self.workdir}")

    def _stopped_at(self, done: int) -> str:
        self.checkpoints.wait()
        return f"saved checkpoint {done} in {self.workdir}; the same command goes on"

    def _evaluate(self, done: int) -> float:
        """The held-out loss, on the record.

        Raises:
            FloatingPointError: it is not finite.
        """
        found = self._means(self.options.evaluate.batches)
        self.heldout, values = found.loss, {"heldout/loss": found.loss}
        accuracy = ""
        if self.corpus.text is None:  # targets are answers
            values["heldout/accuracy"] = found.accuracy
            accuracy = f", accuracy {found.accuracy:.4f},"
        self.metrics.write(done, values)
        lines = ", ".join(f"{n} {v:.2f}" for n, v in self.corpus.references.items())
        total = self.corpus.heldout_count(self.shape)
        count = min(self.options.evaluate.batches, total)
        loss = f"{self.heldout:.4f} nats/{self.corpus.unit}{accuracy}"
        self.progress.line(
            f"step {done}: held-out loss {loss} on {count} of {total} batches ({lines})"
        )
        if not math.isfinite(self.heldout):
            self._not_finite(done, f"held-out loss is {self.heldout}")
        if (text := self.corpus.text) is not None:
            weights = processes.gathered((self.state.params, self.constants))
            sample = processes.first(lambda: self._sample(text, weights))
            self.progress.line(f"step {done}: sample {sample!r}")
        return self.heldout

    def _means(self, count: int) -> Means:
        """Of the first `count` held-out batches."""
        chosen = self.corpus.heldout_batches(self.shape, count)
        return means(
            self.program, self.state.params, self.constants, self.shape, chosen
        )

    def _sample(self, text: Corpus, weights: tuple[Any, Any]) -> str:
        """What the model writes after the first words of the held-out text."""
        start = min(SAMPLE_PROMPT, (self.shape[1] + 1) // 2)
        count = min(SAMPLE_LENGTH, self.shape[1] - start)
        prompt = jnp.asarray(text.heldout[:start][None], jnp.int32)
        if count:
            model = nnx.merge(self.program.graph, *weights)
            more = generate(model, prompt, count, jax.random.key(0), temperature=0.8)
            prompt = jnp.concatenate([prompt, more], axis=1)
        return text.tokenizer.decode(prompt[0])

    def _save(self, done: int, *, judged: bool) -> None:
        """Save the weights, unless the step that made them has spoilt them."""
        if line := self.corpus.vanished():
            self.progress.line(line)
        if not judged and not math.isfinite(loss := self._means(1).loss):
            self._not_finite(done, f"held-out loss is {loss}")
        self.checkpoints.save(
            done,
            {
                "params": self.state.params,
                "optimizer": self.state.optimizer,
                "constants": self.constants,
            },
            {
                "config": validation.to_dict(self.options),
                "data": self.corpus.fingerprint,
                "heldout_loss": self.heldout if judged else None,  # of this step
            },
        )


def _placed(values: Any, like: Any) -> Any:
    """Arrays where those of another tree of the same kind are.

    Copies: a conversion may give two weights one array, and a step donates each.
    """
    places = jax.tree.map(lambda x: x.sharding, like)
    return jax.device_put(values, places, may_alias=False)
