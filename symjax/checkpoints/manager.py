"""Orbax's checkpoint manager, the policy of which steps to keep, and failed saves."""

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
    """A checkpoint could not be written; older checkpoints are unharmed."""


class KeepPolicy:
    """Preservation policy of Orbax that keeps the newest trusted steps.

    A step is trusted if this process has saved or restored it. Other steps on disk may
    be damaged. A step is deleted once `keep` trusted steps have higher numbers. If
    `best` is True, the step with the least held-out loss stays too.

    Attributes:
        trusted: steps that this process has saved or restored.
        passed_over: steps that the last `restore` found on disk and that are later than
            the restored one; they are deleted.
        losses: held-out losses by step.
    """

    def __init__(self, keep: int, best: bool):
        self.keep = keep
        self.best = best
        self.trusted: set[int] = set()
        self.passed_over: set[int] = set()
        self.losses: dict[int, float] = {}

    def saved(self, step: int, meta: dict[str, Any]) -> None:
        """Note a step that is being saved."""
        self.trusted.add(step)
        if (loss := heldout_loss(meta)) is not None:
            self.losses[step] = loss

    def forget(self, step: int) -> None:
        """Forget a step whose save has failed."""
        self.trusted.discard(step)
        self.losses.pop(step, None)

    def restored(
        self, step: int, present: Sequence[int], losses: dict[int, float]
    ) -> None:
        """Note a step that was restored; later steps were passed over.

        Args:
            present: all steps on disk.
            losses: held-out losses by step.
        """
        self.passed_over = {other for other in present if other > step}
        self.trusted = {step} | (self.trusted - self.passed_over)
        self.losses = {
            other: loss
            for other, loss in losses.items()
            if other <= step and math.isfinite(loss)
        }

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any):
        """Return for each checkpoint whether to keep it; Orbax calls this."""
        del context
        steps = [checkpoint.step for checkpoint in checkpoints]
        trusted = sorted(self.trusted.intersection(steps))
        oldest = trusted[-self.keep] if len(trusted) >= self.keep else -1
        with_loss = self.losses.keys() & set(steps)
        best = min(with_loss, key=lambda step: (self.losses[step], step), default=None)
        return [
            step not in self.passed_over
            and (step >= oldest or (self.best and step == best))
            for step in steps
        ]


@functools.cache
def quiet_orbax() -> None:
    """Silence Orbax's logs, which are pages about errors that Orbax also raises.

    If one array fails, Orbax closes its event loop before the tasks of the other arrays
    are done. asyncio then logs the errors of these tasks, and threads of TensorStore
    fail because the loop is closed.
    """
    absl.logging.set_verbosity(absl.logging.FATAL)
    from_orbax = re.compile(
        "orbax|OCDBT|TensorStore|exception was never retrieved|^Event loop is closed$"
    )
    logging.getLogger("asyncio").addFilter(
        lambda x: not from_orbax.search(x.getMessage())
    )
    report = sys.unraisablehook

    def report_others(unraisable: Any) -> None:
        if not from_orbax.search(str(unraisable.exc_value)):
            report(unraisable)

    sys.unraisablehook = report_others


def committed(step: epath.Path) -> bool:
    """Return whether the save of this step was completed."""
    return ocp.utils.is_checkpoint_finalized(step)


def heldout_loss(meta: dict[str, Any]) -> float | None:
    """Return the held-out loss in a checkpoint's meta; None unless it is finite."""
    loss = meta.get("heldout_loss")
    return loss if isinstance(loss, float) and math.isfinite(loss) else None


def failure(error: Exception, what: str, directory: os.PathLike[str]) -> BaseException:
    """Return the exception of a failed save: a lost connection, or NotSaved."""
    cause = error.__cause__ or error
    if lost_connection(cause):
        return cause
    reason = record.short(error)
    return NotSaved(f"{what} cannot be written to {directory}: {reason}")


class Manager(ocp.CheckpointManager):
    """Orbax's manager, changed to abort a process that cannot write its shards.

    Without this change the processes of a run would then wait for each other for 20
    minutes.
    """

    def __init__(self, directory: epath.Path, policy: KeepPolicy):
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy,
            cleanup_tmp_directories=True,
            lightweight_initialize=True,
            save_root_metadata=False,
        )
        super().__init__(directory, options=options)

    def reached_preemption(self, step: int) -> bool:
        """Return False, so that Orbax does not ask jax whether a SIGTERM came.

        jax's `reached_preemption_sync_point` compares over all processes a counter that
        its caller gives. `Interrupts.due` (distributed/signals.py) gives the number of
        its calls. If Orbax also gave it training steps, the run would stop at a wrong
        time, or never.
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
