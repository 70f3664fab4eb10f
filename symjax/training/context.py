"""Context of a run besides its weights: options, data, program, clock and log."""

import platform
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
from symjax.monitor.metrics import Metrics
from symjax.monitor.progress import Clock, Progress
from symjax.training.step import Program


@dataclass
class Skips:
    """Counters of the steps that the optimizer has skipped (`optimizer.guarded`).

    Attributes:
        total: number of all skipped steps, including those before the run resumed.
        in_a_row: number of skipped steps since the last step that was taken.
    """

    total: int
    in_a_row: int = 0

    def last_skipped(self, total: float) -> bool:
        """Return whether the last step was skipped, and count it.

        Args:
            total: the optimizer's count after that step.
        """
        skipped, self.total = total > self.total, int(total)
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        return skipped


class History(NamedTuple):
    """Starts of a run, the present one included, and changed keys, for checkpoints.

    Attributes:
        changed: a line for each key that a resumed run was allowed to change.
        sessions: the result of the function `sessions`.
    """

    changed: list[str]
    sessions: list[dict[str, Any]]


class RunContext(NamedTuple):
    """Values that evaluations, reports and checkpoints of a run share."""

    options: config.Config
    workdir: epath.Path
    examples: Examples
    program: Program
    constants: dict[str, Any]
    checkpoints: Checkpoints
    metrics: Metrics
    progress: Progress
    clock: Clock
    skips: Skips
    history: History
    teacher: config.Model | None = None  # symjax.training.transfer

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of a batch, and tokens of a row."""
        return self.options.batch_size, self.options.model.length

    def due(self, every: int, done: int) -> bool:
        """Return whether something is due after step `done`.

        It is due after every `every` steps and after the last step. With `every` 0 it
        is due only after the last step.
        """
        return done == self.options.steps or (every > 0 and done % every == 0)

    def stopped_at(self, done: int, what: str) -> FloatingPointError:
        """Return an error that names `what`, the step and the last checkpoint."""
        self.checkpoints.settle()
        steps = self.checkpoints.steps()
        last = f"the last checkpoint is {steps[-1]}" if steps else "none was saved"
        return FloatingPointError(f"{what} at step {done}; {last} in {self.workdir}")


def sessions(meta: dict[str, Any] | None, step: int) -> list[dict[str, Any]]:
    """Return the sessions of a run: its starts at which the versions changed.

    There is an entry for the first start, and for each later start whose versions are
    not those of the start before it. An entry has the step that the run started from,
    the date (UTC), and the versions of Python, symjax, jax and flax.

    Args:
        meta: metadata of the checkpoint that a resumed run starts from; None for a new
            run.
        step: the step that the run starts from now.
    """
    now = datetime.now(UTC).isoformat(" ", "minutes").removesuffix("+00:00")
    versions = {
        "python": platform.python_version(),
        "symjax": symjax.__version__,
        "jax": jax.__version__,
        "flax": version("flax"),
    }
    before = (meta or {}).get("sessions", [])
    same = before and all(before[-1].get(name) == x for name, x in versions.items())
    return before if same else [*before, {"step": step, "date": now, **versions}]
