"""A run that is open: its data, compiled step, checkpoints, metrics and counters."""

import contextlib
import platform
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
from etils import epath

import symjax
from symjax import config
from symjax.checkpoints.checkpoint import Checkpoints
from symjax.data.examples import Examples
from symjax.distributed.processes import all_succeed, check_same, process_zero_first
from symjax.distributed.signals import Interrupts
from symjax.models import chips, cost
from symjax.monitor.metrics import Metrics
from symjax.monitor.mirror import Mirror
from symjax.monitor.profile import Profile
from symjax.monitor.progress import Clock, Progress
from symjax.storage import local_folder
from symjax.training import compile, preflight
from symjax.training.initial import initial_state
from symjax.training.prefetch import ahead
from symjax.training.sharding import make_mesh
from symjax.training.step import Program, State, compile_program


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


class Run(NamedTuple):
    """The parts of a run that every step uses, beside the state that it changes."""

    options: config.Config
    workdir: epath.Path
    examples: Examples
    program: Program
    step: Callable  # the compiled training step
    constants: dict[str, Any]
    saved: config.Config | None  # of a resumed run, the configuration until then
    checkpoints: Checkpoints
    metrics: Metrics
    mirror: Mirror
    progress: Progress
    clock: Clock
    skips: Skips
    changed: list[str]  # keys that a resumed run was allowed to change, and when
    sessions: list[dict[str, Any]]  # its versions and dates: see `session`
    profile: Profile
    batches: Iterator  # of every step that is left, on the devices
    interrupts: Interrupts
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
) -> tuple[Run, State]:
    """The parts of a run, in the order in which each can be refused; and its state.

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
    options = preflight.as_begun(options, meta, workdir, allow)
    with interrupts.at_once():
        examples = process_zero_first(
            lambda: preflight.open_data(options, workdir, meta)
        )
    interrupts.check()
    program = all_succeed(
        lambda: compile_program(
            preflight.with_vocabulary(options, examples),
            mesh,
            separate=examples.separate,
        )
    )
    keep, best = options.checkpoint.keep, options.checkpoint.best
    checkpoints = all_succeed(lambda: Checkpoints(folder, keep, best=best))
    stack.enter_context(checkpoints)
    shape = options.batch_size, options.model.length
    step = all_succeed(lambda: compile.compiled_step(program, shape))
    state, constants, saved = all_succeed(
        lambda: initial_state(options, program, examples, checkpoints)
    )
    first = int(state.step)
    mirror = Mirror(workdir)
    stack.callback(mirror.copy)  # once the files are closed
    metrics = all_succeed(lambda: Metrics(workdir, first, options))
    stack.callback(metrics.close)
    mirror.copy()
    interrupts.check()
    profile = Profile(options.log.profile, options.steps, local_folder(workdir))
    stack.callback(profile.close)

    def batch(step: int) -> list[Any]:
        rows = examples.batch(shape, seed=options.seed, step=step - 1)
        return program.place(shape, rows)

    pool = stack.enter_context(ThreadPoolExecutor(1, "batches"))
    batches = ahead(
        pool, batch, first + 1, options.steps, lambda: interrupts.received is not None
    )
    if examples.stream:
        stack.callback(examples.stream.close)
    progress = Progress(options.steps, first)
    stack.callback(progress.close)
    opened = Run(
        options,
        workdir,
        examples,
        program,
        step,
        constants,
        saved,
        checkpoints,
        metrics,
        mirror,
        progress,
        clock,
        Skips(int(state.optimizer.skipped)),
        meta["changed"] if meta else [],
        sessions(meta, first),
        profile,
        batches,
        interrupts,
        peak_speed(program),
    )
    return opened, state


def sessions(meta: dict[str, Any] | None, step: int) -> list[dict[str, Any]]:
    """Return an entry for each start of a run with versions other than before.

    Its plain values are stored in checkpoints: the step that it starts from, the date
    (UTC), and the versions of Python, symjax, jax and flax.

    Args:
        meta: of the checkpoint that a resumed run starts from.
    """
    now = datetime.now(UTC).isoformat(" ", "minutes").removesuffix("+00:00")
    here = {
        "python": platform.python_version(),
        "symjax": symjax.__version__,
        "jax": jax.__version__,
        "flax": version("flax"),
    }
    before = (meta or {}).get("sessions", [])
    known = before and all(before[-1].get(name) == x for name, x in here.items())
    return before if known else [*before, {"step": step, "date": now, **here}]


def peak_speed(program: Program) -> float:
    """Tokens a second at the peak of all devices; 0 if their kind is not known."""
    devices = program.mesh.devices
    if (chip := chips.known(devices.flat[0].device_kind)) is None:
        return 0.0
    parameters = sum(x.size for x in jax.tree.leaves(program.state.params))
    return chip.flops * devices.size / cost.train_flops(program.model, parameters)
