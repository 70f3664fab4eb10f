"""A run from its configuration to its last checkpoint."""

import contextlib
import dataclasses
import math
import signal
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx

from symjax import config, imports, validation
from symjax.data.corpus import Corpus
from symjax.data.delimiters import delimiters
from symjax.data.documents import tokens_of
from symjax.data.examples import Examples
from symjax.data.sources.mixture import rounding_notes
from symjax.data.store.folder import source_change
from symjax.distributed.exit_codes import Interrupted
from symjax.distributed.processes import (
    check_same,
    on_process_zero,
    process_zero_first,
    to_host,
)
from symjax.distributed.signals import Interrupts
from symjax.models.generate import before_stop, generate
from symjax.models.lambdas import lambda_table, mean_lambdas
from symjax.monitor.curve import NAME as CURVE
from symjax.monitor.curve import draw
from symjax.monitor.metrics import LAMBDA, rows_of
from symjax.monitor.profile import FOLDER as TRACES
from symjax.monitor.progress import duration
from symjax.storage import in_bucket, local_folder
from symjax.tables import aligned
from symjax.training.compile import use_compile_cache
from symjax.training.optimizer import schedule_change
from symjax.training.run import Run, open_run
from symjax.training.saved import described
from symjax.training.step import Means, State, means
from symjax.training.workdir import locked, removed_on_failure

MOST_SKIPPED = 20  # steps in a row, then a run ends
SAMPLE_PROMPT, SAMPLE_LENGTH = 16, 120  # tokens


def run(options: config.Config, workdir: epath.Path, allow: Sequence[str] = ()) -> None:
    """Train until `options.steps`, from the newest checkpoint of `workdir` if any.

    Args:
        allow: keys that may differ from those of the checkpoint. Rows are numbered by
            step · batch_size, so another batch_size continues elsewhere in the data.
    Raises:
        ValueError: bad input; the message is one line, and the workdir is as it was.
        FloatingPointError: the loss or its gradient is not finite, or a spike.
        Interrupted: a signal came; after a step, a checkpoint has been saved.
    """
    use_compile_cache()
    tree = validation.to_dict(options)
    code = [str(source) for source in imports.serving(tree["model"])]
    check_same(workdir=str(workdir), allow=list(allow), imports=code, **tree)
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        lock = locked(workdir)
        # In this order: the process that makes the folder removes it, after its lock.
        process_zero_first(lambda: stack.enter_context(lock))
        with removed_on_failure(workdir):
            opened, state = open_run(options, workdir, allow, interrupts, stack)
        train(opened, state)


def train(run: Run, state: State) -> None:
    """Run the remaining steps; log, evaluate and save when due.

    Raises:
        FloatingPointError, Interrupted: as `run` says.
    """
    options, first, done = run.options, int(state.step), run.options.steps
    if first >= options.steps:
        more = "a larger --config.steps continues it"
        run.progress.line(f"complete at step {first}: {more}")
        return
    introduce(run, state)
    key = jax.random.key(options.seed)
    pending = None
    run.interrupts.begin_steps()
    run.clock.begin()
    for done in range(first + 1, options.steps + 1):
        run.profile.before(done)
        with run.clock.waiting():
            rows = next(run.batches)
        if rows is None:
            stop_waiting(run, state, pending)
        with jax.set_mesh(run.program.mesh):
            state, metrics = run.step(state, run.constants, *rows, key)
        run.clock.step()
        run.profile.after(done, metrics)
        # The metrics of a step are read while the next one runs.
        if pending is not None:
            report(run, done - 1, pending)
        pending = metrics
        evaluate_now = run.due(options.evaluate.every, done)
        stop = run.interrupts.due()
        save = run.due(options.checkpoint.every, done) or stop is not None
        if evaluate_now or save:
            report(run, done, metrics)
            pending, loss = None, None
            with run.clock.stopped():
                if evaluate_now:
                    loss = evaluate(run, state)
                    save = save or run.checkpoints.improves(loss)
                if save:
                    save_checkpoint(run, state, loss)
        if stop is not None and done < options.steps:
            raise interrupted(run, done, stop)
    run.checkpoints.wait()  # a signal does not end the last save
    run.profile.close()  # of steps that the run does not have
    run.progress.line(
        f"complete at step {done}: python eval.py --workdir {run.workdir}"
    )
    on_process_zero(lambda: draw(run.workdir, run.examples.unit))
    for line in summary(run):
        run.progress.line(line)


def summary(run: Run) -> list[str]:
    """The last lines of a complete run: best loss, goodput, and where its files are."""
    workdir, name, rows = run.workdir, "heldout/loss", []
    found = [x for x in rows_of(workdir) if isinstance(x.get(name), float)]
    if best := min(found, key=lambda x: x[name], default=None):
        loss = f"{best[name]:.4f} nats/{run.examples.unit} at step {best['step']}"
        if count := best.get("heldout/batches"):
            loss += f", on {count:.0f} batches"
        rows.append(("best held-out loss", loss))
    share, seconds = run.clock.goodput()
    rows.append(("goodput", f"{share:.0%} of {duration(seconds)} were steps"))
    steps = ", ".join(map(str, run.checkpoints.steps()))
    rows.append(("checkpoints", f"{workdir / 'checkpoints'}: {steps}"))
    rows.append(("metrics", str(workdir / "metrics.jsonl")))
    if (local_folder(workdir) / CURVE).exists():
        rows.append(("loss curve", str(workdir / CURVE)))
    if (local_folder(workdir) / TRACES).exists():
        rows.append(("trace", str(workdir / TRACES)))
    return aligned(rows)


def stop_waiting(run: Run, state: State, pending: Any) -> NoReturn:
    """End at a signal that came while a step waited for its batch.

    Raises:
        Interrupted: the step before has been saved, if there was one.
    """
    done = int(state.step)
    if not done:
        run.interrupts.check()
    if pending is not None:
        report(run, done, pending)
    if done not in run.checkpoints.steps():
        save_checkpoint(run, state, None)
    raise interrupted(run, done, run.interrupts.received or signal.SIGTERM)


def interrupted(run: Run, done: int, stop: signal.Signals) -> Interrupted:
    """What to end with, once the checkpoint of a step is on the disk."""
    run.checkpoints.wait()
    saved = f"saved checkpoint {done} in {run.workdir}"
    return Interrupted(stop, f"{saved}; the same command resumes")


def introduce(run: Run, state: State) -> None:
    """Say what is trained, on what, from where, and what has changed since then."""
    weights = sum(x.size for x in jax.tree.leaves(state.params))
    origin = "new run"
    if first := int(state.step):
        origin = f"resumed at step {first}"
    elif run.options.init_from:
        origin = f"weights of {run.options.init_from}"
    count = jax.process_count()
    many = f" of {count} processes" if count > 1 else ""
    run.progress.line(
        f"{weights:,} parameters, {run.examples.size}, "
        f"{run.program.mesh.size} {jax.devices()[0].platform} device(s)"
        f"{many}: {origin} in {run.workdir}"
    )
    if in_bucket(run.workdir):
        run.progress.line(
            f"a bucket has no locks: start no second run in {run.workdir}; metrics are "
            f"copied there at each save from {local_folder(run.workdir)}"
        )
    taken = int(state.optimizer.taken)
    for line in run.changed:
        run.progress.line(f"changed {line}")
    if unknown := imports.unaccounted(dataclasses.asdict(run.options.model)):
        run.progress.line(
            f"not stored: the code of {', '.join(unknown)}, which --import did not "
            "add; whoever reads this run has to add it"
        )
    if (saved := run.saved) and saved.steps != run.options.steps:
        if line := schedule_change(saved, run.options, taken):
            run.progress.line(line)
    if 0 < run.profile.last <= first:
        run.progress.line(f"no trace: log.profile {run.options.log.profile} is over")
    if run.options.optimizer.version < config.Optimizer().version:
        run.progress.line(
            f"optimizer.version {run.options.optimizer.version}: the run continues by "
            "the rules of the optimizer that it began with (docs/checkpoints.md)"
        )
    for line in rounding_notes(run.options.data):
        run.progress.line(line)
    if line := source_change(run.options.data, local_folder(run.workdir) / "data"):
        run.progress.line(line)


def report(run: Run, done: int, metrics: dict[str, Any]) -> None:
    """Check the numbers of a step, show them, and log them where it is time.

    Raises:
        FloatingPointError: the step was harmful, and the configuration says to stop, or
            so many were skipped in a row that the weights themselves must be the cause.
    """
    values = {name: float(value) for name, value in metrics.items()}
    skipped = run.skips.count(values["skipped_steps"])
    wrong = [x for x in ("train/loss", "gradient_norm") if not math.isfinite(values[x])]
    if skipped:
        wrong.append("gradient_norm")
    speed, more = run.clock.speed(), ""
    speeds = {"tokens_per_second": speed, "data_seconds": run.clock.data_seconds()}
    if logged := run.due(run.options.log.every, done):
        run.clock.restart()
    if run.peak:
        each, share = speed / run.program.mesh.size, speed / run.peak
        speeds |= {"mfu": share, "tokens_per_second_per_device": each}
        more = f" ({each:,.0f} a device, MFU {share:.1%})"
    if logged or wrong:
        run.metrics.write(done, values | speeds)
    left = (run.options.steps - done) * run.clock.tokens / speed
    if wrong:
        what = f"{wrong[0]} is {values[wrong[0]]:.6g}"
        if not skipped or run.options.optimizer.nonfinite == "stop":
            raise stopped_at(run, done, what)
        if run.skips.in_a_row == MOST_SKIPPED:
            raise stopped_at(
                run, done, f"{MOST_SKIPPED} steps in a row skipped: {what}"
            )
        run.progress.line(f"step {done} skipped: {what}")
    run.progress.update(done, values["train/loss"], speed, left, more)


def stopped_at(run: Run, done: int, what: str) -> FloatingPointError:
    """The error that names the step and the checkpoint before it."""
    run.checkpoints.settle()
    steps = run.checkpoints.steps()
    last = f"the last checkpoint is {steps[-1]}" if steps else "none was saved"
    return FloatingPointError(f"{what} at step {done}; {last} in {run.workdir}")


def heldout(run: Run, state: State, count: int) -> Means:
    """Return the means over `count` held-out batches."""
    run.progress.compiling("the evaluation")
    chosen = run.examples.heldout_batches(run.shape, count)
    return means(run.program, state.params, run.constants, run.shape, chosen)


def evaluate(run: Run, state: State) -> float:
    """Return the held-out loss; show and log it, and a sample if it is wanted.

    Raises:
        FloatingPointError: it is not finite.
    """
    examples, done = run.examples, int(state.step)
    total = examples.heldout_count(run.shape)
    count = min(run.options.evaluate.batches or total, total)
    loss, accuracy = heldout(run, state, count)
    values = {"heldout/loss": loss, "heldout/batches": count}
    shown = f"{loss:.4f} nats/{examples.unit}"
    if (text := examples.text) is None:  # targets are answers
        values["heldout/accuracy"] = accuracy
        shown += f", accuracy {accuracy:.4f},"
    else:
        values["heldout/bits_per_byte"] = bits = text.bits_per_byte(loss)
        shown += f", {bits:.4f} bits/byte"
    run.metrics.write(done, values | lambdas(run, state))
    run.progress.line(
        f"step {done}: held-out loss {shown} on {count} of {total} batches "
        f"({references(examples, count, total)})"
    )
    if not math.isfinite(loss):
        raise stopped_at(run, done, f"held-out loss is {loss}")
    if text is not None and run.options.evaluate.sample:
        run.progress.compiling("the sample")
        weights = to_host((state.params, run.constants))
        shown = on_process_zero(lambda: sample(run, text, weights))
        run.progress.line(f"step {done}: sample {shown!r}")
    return loss


def lambdas(run: Run, state: State) -> dict[str, float]:
    """Return λ of every differential layer, named for metrics.jsonl.

    Differential V2 has one λ for every token and head: the mean of those of the first
    held-out batch.
    """
    kind = run.options.model.attention.differential
    if kind == "none":
        return {}
    model = nnx.merge(run.program.graph, state.params, run.constants)
    if kind == "v1":
        found = {row["layer"]: row["lambda"] for row in lambda_table(model)}
    else:
        [rows] = run.examples.heldout_batches(run.shape, 1)
        inputs, *_ = run.program.place(run.shape, rows)
        with jax.set_mesh(run.program.mesh):
            found = mean_lambdas(model, tokens_of(inputs))
    return {f"{LAMBDA}{layer}": lam for layer, lam in found.items()}


def references(examples: Examples, count: int, total: int) -> str:
    """Return the losses that need no model, and the batches they are measured on.

    Tables of n-grams and frequencies of labels are measured on all held-out examples.
    The line says so where the model was measured on `count` of `total` batches alone.
    """
    partial = count < total and examples.heldout_rows is not None
    where = f"on all {total}" if partial else ""
    found, unit = examples.references, f" nats/{examples.unit}"
    if text := examples.text:
        where, unit = f"n-gram tables {where}".rstrip(), " bits/byte"
        found = {name: text.bits_per_byte(x) for name, x in found.items()}
    shown = ", ".join(f"{name} {x:.2f}" for name, x in found.items()) + unit
    return f"{where}: {shown}" if where else shown


def sample(run: Run, text: Corpus, weights: tuple[Any, Any]) -> str:
    """The first words of the held-out text, continued to the end of the document."""
    length = run.options.model.length
    start = min(SAMPLE_PROMPT, (length + 1) // 2)
    count = min(SAMPLE_LENGTH, length - start)
    tokens = np.asarray(text.heldout[:start], np.int32)
    if count:
        end = delimiters(text.tokenizer, run.examples.language).end
        stop = [] if end is None else [end]
        model = nnx.merge(run.program.graph, *weights)
        key, prompts = jax.random.key(0), jnp.asarray(tokens[None])
        more = generate(model, prompts, count, key, temperature=0.8, stop=stop)
        tokens = np.concatenate([tokens, before_stop(np.asarray(more[0]), stop)])
    return text.decode(tokens)


def save_checkpoint(run: Run, state: State, loss: float | None) -> None:
    """Save the weights, once a held-out loss has shown them to be finite.

    Args:
        loss: of the held-out examples at this step, if it is known.
    Raises:
        FloatingPointError: it is not finite.
    """
    done = int(state.step)
    if line := run.examples.vanished():
        run.progress.line(line)
    if loss is None:
        found = heldout(run, state, 1).loss
        if not math.isfinite(found):
            raise stopped_at(run, done, f"held-out loss is {found}")
    trees = {
        "params": state.params,
        "optimizer": state.optimizer,
        "constants": run.constants,
    }
    meta = {
        "config": validation.to_dict(run.options),
        "data": run.examples.fingerprint,
        "examples": described(run.examples, run.program.model),
        "heldout_loss": loss,
        "changed": run.changed,
        "imports": imports.to_store(dataclasses.asdict(run.options.model)),
        "sessions": run.sessions,
    }
    run.mirror.copy()  # first: a checkpoint has the metrics up to its step
    run.checkpoints.save(done, trees, meta)
