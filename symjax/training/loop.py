"""A run from its configuration to its last checkpoint.

`run` handles signals and locks the workdir. `train` then does everything in order:
configuration, data, program, state, and the loop over steps. After a step the loop
reports the metrics of the step before (`report`). It evaluates (`heldout.evaluate`) and
saves (`save_checkpoint`) when an evaluation or a checkpoint is due. The first argument
of these three functions is a `RunContext` (`context.py`): the options, the program, the
open files and the clock of a run.
"""

import contextlib
import dataclasses
import math
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import jax
from etils import epath

from symjax import config, imports, validation
from symjax.checkpoints.checkpoint import Checkpoints
from symjax.distributed.exit_codes import Interrupted
from symjax.distributed.processes import (
    all_succeed,
    check_same,
    on_process_zero,
    process_zero_first,
)
from symjax.distributed.signals import Interrupts
from symjax.models import chips, cost
from symjax.monitor.curve import draw
from symjax.monitor.metrics import Metrics
from symjax.monitor.profile import Profile
from symjax.monitor.progress import Clock, Progress
from symjax.storage import local_folder
from symjax.training import compile, heldout, preflight, transfer
from symjax.training.context import History, RunContext, Skips, sessions
from symjax.training.initial import check_origin, initial_state
from symjax.training.messages import introduce, summary
from symjax.training.prefetch import prefetch
from symjax.training.saved import described
from symjax.training.sharding import make_mesh
from symjax.training.step import (
    LAYER_NORMS,
    TRANSFER_ERROR,
    Program,
    State,
    build_program,
)
from symjax.training.workdir import locked, removed_on_failure

MOST_SKIPPED = 20  # skipped steps in a row after which a run ends


def run(options: config.Config, workdir: epath.Path, allow: Sequence[str] = ()) -> None:
    """Train until `options.steps`, from the newest checkpoint of `workdir` if any.

    Args:
        allow: keys that may differ from those of the checkpoint. Step n begins at row
            (n − 1) · batch_size of the data, so a run with another batch_size continues
            at another row.
    Raises:
        ValueError: bad input, found before the first step; the message is one line and
            the workdir is unchanged. Or the data cannot be read in a later step.
        FloatingPointError: the loss or its gradient is not finite, or the gradient is
            a spike, and the step may not be skipped (see `report`); or the held-out
            loss is not finite when an evaluation or a checkpoint is due.
        Interrupted: a signal came; if steps were made, the last one has been saved.
    """
    compile.use_compile_cache()
    tree = validation.to_dict(options)
    code = [str(source) for source in imports.serving(tree["model"])]
    check_same(workdir=str(workdir), allow=list(allow), imports=code, **tree)
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        lock = locked(workdir)
        # Process 0 enters first, so it makes the folder. At the end it also removes the
        # folder if that is empty.
        process_zero_first(lambda: stack.enter_context(lock))
        train(options, workdir, allow, interrupts, stack)


def train(
    options: config.Config,
    workdir: epath.Path,
    allow: Sequence[str],
    interrupts: Interrupts,
    stack: contextlib.ExitStack,
) -> None:
    """Prepare a run and make its remaining steps; log, evaluate and save when due.

    All processes prepare the run together: if one raises an error, `all_succeed` raises
    it in all.

    Args:
        stack: closes files and threads when the run ends.
    Raises:
        ValueError, FloatingPointError, Interrupted: as `run`.
    """
    clock = Clock(options.batch_size * options.model.length)
    transfer.check(options)
    with removed_on_failure(workdir):
        # Configuration. A resumed run keeps its optimizer.version.
        mesh = all_succeed(lambda: make_mesh(options.mesh))
        folder = workdir / "checkpoints"
        check_same(checkpoints=Checkpoints(folder).steps())
        meta = all_succeed(lambda: preflight.saved_meta(options, workdir, allow))
        options = preflight.with_former_version(options, meta, workdir, allow)
        if options.init_from and meta is None:
            all_succeed(lambda: check_origin(options.init_from))

        # Data. A signal interrupts the packing at once.
        with interrupts.at_once():
            examples = process_zero_first(
                lambda: preflight.open_data(options, workdir, meta)
            )
        interrupts.check()

        # Program.
        program = all_succeed(
            lambda: build_program(
                preflight.with_vocabulary(options, examples),
                mesh,
                separate=examples.separate,
            )
        )
        clock.peak = peak_speed(program)
        keep, best = options.checkpoint.keep, options.checkpoint.best
        checkpoints = all_succeed(lambda: Checkpoints(folder, keep, best=best))
        stack.enter_context(checkpoints)
        shape = options.batch_size, options.model.length
        train_step = all_succeed(lambda: compile.compiled_step(program, shape))

        # State: restored, converted from other weights, or new.
        state, constants, saved, source = all_succeed(
            lambda: initial_state(options, program, examples, checkpoints)
        )
        first = int(state.step)
        teacher = all_succeed(
            lambda: transfer.teacher(options, program.model, source, meta)
        )
        transfer_step = train_step
        if teacher is not None:
            transfer_step = transfer.compiled_transfer(options, program, teacher)
        metrics = all_succeed(lambda: Metrics(workdir, first, options))
        stack.callback(metrics.close)
        interrupts.check()
        profile = Profile(options.log.profile, options.steps, local_folder(workdir))
        stack.callback(profile.close)
        pool = stack.enter_context(ThreadPoolExecutor(1, "batches"))
        if examples.stream:
            stack.callback(examples.stream.close)
        progress = Progress(options.steps, first)
        stack.callback(progress.close)
        context = RunContext(
            options,
            workdir,
            examples,
            program,
            constants,
            checkpoints,
            metrics,
            progress,
            clock,
            Skips(int(state.optimizer.skipped)),
            History(meta["changed"] if meta else [], sessions(meta, first)),
            teacher,
        )

    # Loop.
    if first >= options.steps:
        more = "a larger --config.steps continues it"
        progress.line(f"complete at step {first}: {more}")
        return
    introduce(context, state, saved, profile)
    key = jax.random.key(options.seed)

    def batch(step: int) -> list[Any]:
        read_rows = examples.batch_reader(shape, seed=options.seed, step=step - 1)
        return program.place(shape, read_rows)

    batches = prefetch(
        pool, batch, first + 1, options.steps, lambda: interrupts.received is not None
    )
    done, pending = first, None
    interrupts.begin_steps()
    clock.begin()
    for done in range(first + 1, options.steps + 1):
        profile.before(done)
        with clock.waiting():
            arrays = next(batches)
        if arrays is None:
            stop_waiting(context, state, pending, interrupts)
        with jax.set_mesh(program.mesh):
            in_transfer = done <= options.transfer.steps
            compiled = transfer_step if in_transfer else train_step
            state, values = compiled(state, constants, *arrays, key)
        clock.step()
        profile.after(done, values)
        # The metrics of a step are read while the next one runs.
        if pending is not None:
            report(context, done - 1, pending)
        pending = values
        evaluate_now = context.due(options.evaluate.every, done)
        stop = interrupts.due()
        save = context.due(options.checkpoint.every, done) or stop is not None
        if evaluate_now or save:
            report(context, done, values)
            pending, loss = None, None
            with clock.stopped():
                if evaluate_now:
                    loss = heldout.evaluate(context, state, values.get(LAYER_NORMS))
                    save = save or checkpoints.improves(loss)
                if save:
                    save_checkpoint(context, state, loss)
        if stop is not None and done < options.steps:
            raise interrupted(context, done, stop)
    checkpoints.wait()  # a signal does not interrupt the last save
    profile.close()  # still open if `log.profile` ends after the last step
    progress.line(f"complete at step {done}: python eval.py --workdir {workdir}")
    on_process_zero(lambda: draw(workdir, examples.unit))
    for line in summary(context):
        progress.line(line)


def peak_speed(program: Program) -> float:
    """Return tokens a second at the peak FLOP/s of all devices; 0 if it is unknown."""
    devices = program.mesh.devices
    if (chip := chips.chip_of(devices.flat[0].device_kind)) is None:
        return 0.0
    parameters = sum(x.size for x in jax.tree.leaves(program.state.params))
    return chip.flops * devices.size / cost.train_flops(program.model, parameters)


def report(context: RunContext, done: int, metrics: dict[str, Any]) -> None:
    """Check and show the metrics of a step.

    They are written to metrics.jsonl when log.every is due, and after a harmful step.

    Raises:
        FloatingPointError: the step is harmful (its loss or gradient is not finite, or
            its gradient is a spike) and the run must end:

            - the optimizer did not skip the step,
            - or `optimizer.nonfinite` is "stop",
            - or it is the last of `MOST_SKIPPED` skipped steps in a row.
    """
    values = {name: float(x) for name, x in metrics.items() if name != LAYER_NORMS}
    skipped = context.skips.last_skipped(values["skipped_steps"])
    loss = TRANSFER_ERROR if TRANSFER_ERROR in values else "train/loss"
    wrong = [x for x in (loss, "gradient_norm") if not math.isfinite(values[x])]
    if skipped:
        wrong.append("gradient_norm")
    speed, suffix = context.clock.speed(), ""
    speeds = {"tokens_per_second": speed, "data_seconds": context.clock.data_seconds()}
    if logged := context.due(context.options.log.every, done):
        context.clock.restart()
    if peak := context.clock.peak:
        each, share = speed / context.program.mesh.size, speed / peak
        speeds |= {"mfu": share, "tokens_per_second_per_device": each}
        suffix = f" ({each:,.0f} a device, MFU {share:.1%})"
    if logged or wrong:
        context.metrics.write(done, values | speeds)
    left = (context.options.steps - done) * context.clock.tokens / speed
    if wrong:
        what = f"{wrong[0]} is {values[wrong[0]]:.6g}"
        if not skipped or context.options.optimizer.nonfinite == "stop":
            raise context.stopped_at(done, what)
        if context.skips.in_a_row == MOST_SKIPPED:
            raise context.stopped_at(
                done, f"{MOST_SKIPPED} steps in a row skipped: {what}"
            )
        context.progress.line(f"step {done} skipped: {what}")
    context.progress.update(done, values[loss], speed, left, suffix)
    if done == context.options.transfer.steps:
        context.progress.line(transfer.end_line(context.options, values[loss]))


def save_checkpoint(context: RunContext, state: State, loss: float | None) -> None:
    """Save the state if its held-out loss is finite.

    Args:
        loss: held-out loss at this step. If it is None, the loss of one held-out batch
            is measured here.
    Raises:
        FloatingPointError: the loss is not finite.
    """
    done = int(state.step)
    if line := context.examples.vanished():
        context.progress.line(line)
    if loss is None:
        measured = heldout.measure(context, state, 1).loss
        if not math.isfinite(measured):
            raise context.stopped_at(done, f"held-out loss is {measured}")
    trees = {
        "params": state.params,
        "optimizer": state.optimizer,
        "constants": context.constants,
    }
    meta = {
        "config": validation.to_dict(context.options),
        "data": context.examples.fingerprint,
        "examples": described(context.examples, context.program.model),
        "heldout_loss": loss,
        "changed": context.history.changed,
        "imports": imports.to_store(dataclasses.asdict(context.options.model)),
        "sessions": context.history.sessions,
        "transfer": transfer.stored(context.options, context.teacher),
    }
    # First, so that a bucket that has a checkpoint also has its metrics.
    context.metrics.upload()
    context.checkpoints.save(done, trees, meta)


def stop_waiting(
    context: RunContext,
    state: State,
    pending: dict[str, Any] | None,
    interrupts: Interrupts,
) -> NoReturn:
    """End a run after a signal that came while a step waited for its batch.

    Args:
        pending: metrics of the last step; None if they have been reported.
    Raises:
        Interrupted: the last step has been saved, if there was one.
        FloatingPointError: as `report` and `save_checkpoint`.
    """
    done = int(state.step)
    if not done:
        interrupts.check()
    if pending is not None:
        report(context, done, pending)
    context.checkpoints.settle()  # checkpoint `done` may still be being written
    if done not in context.checkpoints.steps():
        save_checkpoint(context, state, None)
    raise interrupted(context, done, interrupts.received or signal.SIGTERM)


def interrupted(context: RunContext, done: int, stop: signal.Signals) -> Interrupted:
    """Return the exception that ends a run, after the checkpoint `done` is on disk."""
    context.checkpoints.wait()
    saved = f"saved checkpoint {done} in {context.workdir}"
    return Interrupted(stop, f"{saved}; the same command resumes")
