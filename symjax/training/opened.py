"""A run that is open: its data, compiled step, checkpoints, metrics and counters."""

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from etils import epath

from symjax import config
from symjax.data.examples import Examples
from symjax.models import cost
from symjax.places import home, in_bucket, sent
from symjax.training import chips, preflight
from symjax.training.checkpoint import Checkpoints
from symjax.training.initial import Start, initial_state
from symjax.training.interrupt import Interrupts
from symjax.training.launch import is_process_zero
from symjax.training.metrics import Metrics
from symjax.training.processes import all_succeed, check_same, process_zero_first
from symjax.training.profile import Profile
from symjax.training.progress import Clock, Progress, print_warning
from symjax.training.sharding import make_mesh
from symjax.training.step import Program, compile_program

ASK = 0.2  # seconds between the questions whether to stop waiting for a batch
# Files, and folders of files, of which a bucket gets copies.
COPIED = ("metrics.jsonl", "metrics.png", "tensorboard", "profile")


@dataclass
class Skips:
    """Counts the steps that the optimizer's guard has skipped."""

    total: int
    in_a_row: int = 0

    def count(self, total: float) -> bool:
        """Whether the last step was skipped, after which there are `total`."""
        skipped, self.total = total > self.total, int(total)
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        return skipped


class Ahead:
    """The batches of steps, each made while the step before it runs.

    A batch depends on its step alone, so a resumed run needs to know nothing of this.

    Args:
        make: step → its batch; what it raises, `take` raises.
        last: the last step.
    """

    def __init__(self, make: Callable[[int], Any], last: int):
        self._make, self._last = make, last
        self._pool = ThreadPoolExecutor(1, "batches")
        self._next: Future | None = None

    def take(self, step: int, stop: Callable[[], bool] = lambda: False) -> Any:
        """The batch of a step; that of the next one is begun.

        Args:
            stop: asked while the batch is not there, as one of a stream may not be.
        Returns:
            None if `stop` said so.
        """
        if self._next is None:
            self._next = self._pool.submit(self._make, step)
        while not wait([self._next], ASK).done:
            if stop():
                return None
        batch = self._next.result()
        more = step < self._last
        self._next = self._pool.submit(self._make, step + 1) if more else None
        return batch

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class Mirror:
    """Brings whole files from a run's `home` to its workdir, where these are two.

    The first of several processes does, with the files of its machine.
    """

    def __init__(self, workdir: epath.Path):
        self._workdir, self._home = workdir, home(workdir)
        self._copied: dict[str, tuple[int, int]] = {}  # size and time of each file
        self._failed = False

    def copy(self) -> None:
        """What has changed since it was copied; a store that cannot be written is said
        in one line, and tried again the next time."""
        if not in_bucket(self._workdir) or not is_process_zero():
            return
        try:
            for name, stamp in self._stamps().items():
                if self._copied.get(name) != stamp:
                    sent(self._workdir, name)
                    self._copied[name] = stamp
        except OSError as error:
            if not self._failed:
                print_warning(
                    f"metrics cannot be copied to {self._workdir} ({error.strerror}): "
                    f"going on, they are in {self._home}"
                )
            self._failed = True
        else:
            self._failed = False

    def _stamps(self) -> dict[str, tuple[int, int]]:
        found = {}
        for name in COPIED:
            path = self._home / name
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                if file.is_file():
                    status = file.stat()
                    stamp = status.st_size, status.st_mtime_ns
                    found[file.relative_to(self._home).as_posix()] = stamp
        return found


class Run(NamedTuple):
    """What every step of a run uses, beside the weights that it changes."""

    options: config.Config
    workdir: epath.Path
    examples: Examples
    program: Program
    step: Callable  # the compiled training step
    checkpoints: Checkpoints
    metrics: Metrics
    mirror: Mirror
    progress: Progress
    clock: Clock
    skips: Skips
    changed: list[str]  # keys that a resumed run was allowed to change, and when
    profile: Profile
    batches: Ahead  # of every step that is left, on the devices
    peak: float  # tokens a second that the devices' peak would give; 0: unknown

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of a batch, and tokens of a row."""
        return self.options.batch_size, self.options.model.length

    def due(self, every: int, done: int) -> bool:
        """The last step is always due, 0 means no other one."""
        return done == self.options.steps or (every > 0 and done % every == 0)


def open_run(
    options: config.Config,
    workdir: epath.Path,
    allow: Sequence[str],
    interrupts: Interrupts,
    stack: contextlib.ExitStack,
) -> tuple[Run, Start]:
    """The parts of a run, in the order in which each can be refused.

    Args:
        stack: closes them.
    Raises:
        ValueError, Interrupted: as `run` says; in every process.
    """
    clock = Clock(options.batch_size * options.model.length)
    mesh = all_succeed(lambda: make_mesh(options.mesh))
    folder = workdir / "checkpoints"
    check_same(checkpoints=Checkpoints(folder).steps())
    meta = all_succeed(lambda: preflight.saved_meta(options, workdir, allow))
    with interrupts.at_once():
        examples = process_zero_first(
            lambda: preflight.open_data(options, workdir, meta)
        )
    interrupts.check()
    fitted = all_succeed(lambda: preflight.with_vocabulary(options, examples))
    program = all_succeed(
        lambda: compile_program(fitted, mesh, separate=examples.separate)
    )
    keep, best = options.checkpoint.keep, options.checkpoint.best
    checkpoints = all_succeed(lambda: Checkpoints(folder, keep, best=best))
    stack.enter_context(checkpoints)
    shape = options.batch_size, options.model.length
    step = all_succeed(lambda: preflight.compiled_step(program, shape))
    start = all_succeed(lambda: initial_state(options, program, examples, checkpoints))
    first = int(start.state.step)
    mirror = Mirror(workdir)
    stack.callback(mirror.copy)  # once the files are closed
    metrics = all_succeed(lambda: Metrics(workdir, first, options))
    stack.enter_context(contextlib.closing(metrics))
    mirror.copy()
    interrupts.check()
    profile = Profile(options.log.profile, options.steps, home(workdir))
    stack.enter_context(contextlib.closing(profile))

    def batch(step: int) -> list[Any]:
        rows = examples.batch(shape, seed=options.seed, step=step - 1)
        return program.place(shape, rows)

    batches = Ahead(batch, options.steps)
    stack.enter_context(contextlib.closing(batches))
    if examples.stream:
        stack.enter_context(contextlib.closing(examples.stream))
    progress = Progress(options.steps, first)
    stack.enter_context(contextlib.closing(progress))
    opened = Run(
        options,
        workdir,
        examples,
        program,
        step,
        checkpoints,
        metrics,
        mirror,
        progress,
        clock,
        Skips(int(start.state.optimizer.skipped)),
        meta["changed"] if meta else [],
        profile,
        batches,
        peak_speed(program),
    )
    return opened, start


def peak_speed(program: Program) -> float:
    """Tokens a second at the peak of all devices; 0 if their kind is not known."""
    devices = program.mesh.devices
    if (chip := chips.known(devices.flat[0].device_kind)) is None:
        return 0.0
    parameters = sum(x.size for x in jax.tree.leaves(program.state.params))
    return chip.flops * devices.size / cost.train_flops(program.model, parameters)
