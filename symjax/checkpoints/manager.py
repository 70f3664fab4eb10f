"""Orbax's manager of checkpoints: which steps it keeps, and how it fails."""

import functools
import logging
import math
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import absl.logging
import orbax.checkpoint as ocp
from etils import epath

from symjax.checkpoints import record
from symjax.distributed.exit_codes import exit_at_once, exit_of, lost_connection
from symjax.distributed.launch import is_distributed


class NotSaved(ValueError):
    """A checkpoint could not be written; those before it are untouched."""


class Kept:
    """Which steps stay, as an Orbax preservation policy: the newest whole ones.

    Whole are those that this process has saved or restored. An older step that nobody
    has read stays until enough whole ones are newer; a damaged one never counts. The
    step of the least held-out loss stays too, if `best` says so.
    """

    def __init__(self, keep: int, best: bool):
        self.keep = keep
        self.best = best
        self.whole: set[int] = set()
        self.passed: set[int] = set()
        self.losses: dict[int, float] = {}

    def saved(self, step: int, meta: dict[str, Any]) -> None:
        self.whole.add(step)
        if (loss := heldout_loss(meta)) is not None:
            self.losses[step] = loss

    def forget(self, step: int) -> None:
        self.whole.discard(step)
        self.losses.pop(step, None)

    def restored(
        self, step: int, present: Sequence[int], losses: dict[int, float]
    ) -> None:
        self.passed = {other for other in present if other > step}
        self.whole = {step} | (self.whole - self.passed)
        self.losses = {
            other: loss
            for other, loss in losses.items()
            if other <= step and math.isfinite(loss)
        }

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any):
        del context
        steps = [found.step for found in checkpoints]
        whole = sorted(self.whole.intersection(steps))
        oldest = whole[-self.keep] if len(whole) >= self.keep else -1
        judged = self.losses.keys() & set(steps)
        best = min(judged, key=lambda step: (self.losses[step], step), default=None)
        return [
            step not in self.passed and (step >= oldest or (self.best and step == best))
            for step in steps
        ]


@functools.cache
def quiet_orbax() -> None:
    """Keep Orbax from also logging, over pages, what it raises about an array.

    It logs that error, and closes its event loop before the tasks of the other arrays
    are done: asyncio logs theirs, and threads of TensorStore find the loop closed.
    """
    absl.logging.set_verbosity(absl.logging.FATAL)
    theirs = re.compile(
        "orbax|OCDBT|TensorStore|exception was never retrieved|^Event loop is closed$"
    )
    logging.getLogger("asyncio").addFilter(lambda x: not theirs.search(x.getMessage()))
    report = sys.unraisablehook

    def report_others(unraisable: Any) -> None:
        if not theirs.search(str(unraisable.exc_value)):
            report(unraisable)

    sys.unraisablehook = report_others


def committed(step: epath.Path) -> bool:
    """Whether a save has made the directory of this step, to its end."""
    return ocp.utils.is_checkpoint_finalized(step)


def heldout_loss(meta: dict[str, Any]) -> float | None:
    loss = meta.get("heldout_loss")
    return loss if isinstance(loss, float) and math.isfinite(loss) else None


def failure(error: Exception, what: str, directory: os.PathLike[str]) -> BaseException:
    """What a save failed of: the connection to another process, or NotSaved."""
    cause = error.__cause__ or error
    if lost_connection(cause):
        return cause
    reason = record.short(error)
    return NotSaved(f"{what} cannot be written to {directory}: {reason}")


class Manager(ocp.CheckpointManager):
    """Ends this process where it, of several, cannot write its part of a checkpoint.

    Orbax would let it wait for the others, and these for its part: 20 minutes.
    """

    def __init__(self, directory: epath.Path, kept: Kept):
        options = ocp.CheckpointManagerOptions(
            preservation_policy=kept,
            cleanup_tmp_directories=True,
            lightweight_initialize=True,
            save_root_metadata=False,
        )
        super().__init__(directory, options=options)

    def reached_preemption(self, step: int) -> bool:
        """No: `Interrupts` asks jax, which counts its questions, one after each step.

        Orbax would ask in a save, by the number of the step: jax then agrees on a
        question that is past or far ahead, and the run stops never or much later.
        """
        return False

    def _wait_for_checkpointers(self) -> None:
        try:
            super()._wait_for_checkpointers()
        except Exception as error:
            if is_distributed():
                found = exit_of(failure(error, "a checkpoint", self.directory))
                if found is not None:
                    exit_at_once(found.exit_code, str(found))
            raise
