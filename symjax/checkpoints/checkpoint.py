"""Checkpoints of a run: saved in the background, checked when they are restored.

Orbax commits a step by renaming its directory, or in a bucket by writing a last object.
So a save that is killed leaves nothing that counts as a step. Orbax does not notice two
kinds of damage: a flipped bit, and a directory that has lost files but still counts as
the latest step. `record` finds both, and `Checkpoints.restore` then restores the step
before.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import orbax.checkpoint as ocp
from etils import epath

from symjax.checkpoints import record
from symjax.checkpoints.manager import (
    KeepPolicy,
    Manager,
    NotSaved,
    committed,
    failure,
    heldout_loss,
    quiet_orbax,
)
from symjax.checkpoints.record import Damaged
from symjax.distributed.exit_codes import print_warning
from symjax.distributed.launch import is_distributed
from symjax.storage import check_writable, store_errors


class Checkpoints:
    """The checkpoints of one run.

    With several processes, every process calls every method with the same arguments,
    and all of them share the directory.

    Args:
        directory: absolute path; the directory is made if it is missing.
        keep: number of the newest undamaged checkpoints to keep. With None checkpoints
            can only be read: nothing is made, written or deleted.
        best: also keep the checkpoint whose meta has the least `heldout_loss`.
    Raises:
        ValueError: the directory is not absolute or cannot be written, or keep < 1.
    """

    def __init__(
        self,
        directory: os.PathLike[str],
        keep: int | None = None,
        *,
        best: bool = False,
    ):
        quiet_orbax()
        self.directory = epath.Path(directory)
        if not self.directory.is_absolute():
            raise ValueError(f"checkpoints need an absolute directory, got {directory}")
        if keep is not None and keep < 1:
            raise ValueError(f"checkpoint.keep {keep} must be at least 1")
        self._policy = KeepPolicy(keep or 0, best)
        self._manager = None
        if keep:
            check_writable(self.directory, f"checkpoints in {self.directory}")
            with store_errors(self.directory):
                self._manager = Manager(self.directory, self._policy)
        self._saving: int | None = None
        self._failed: BaseException | None = None

    def steps(self) -> list[int]:
        """Return all committed steps on disk, ascending.

        Some may be damaged. `restore` finds the damage when it reads the arrays.
        """
        with store_errors(self.directory):
            if not self.directory.is_dir():
                return []
            paths = {path.name: path for path in self.directory.iterdir()}
            return sorted(
                int(name)
                for name, path in paths.items()
                if name.isdecimal() and name == str(int(name)) and committed(path)
            )

    def improves(self, loss: float) -> bool:
        """Return whether a checkpoint with this held-out loss would be the best one.

        The result is False without `best`.
        """
        return self._policy.best and loss < min(
            self._policy.losses.values(), default=math.inf
        )

    def save(self, step: int, trees: dict[str, Any], meta: dict[str, Any]) -> None:
        """Start to save a checkpoint in the background.

        The method first waits for the previous save, and for the arrays. On return the
        caller may donate or delete the arrays.

        If the checkpoint cannot be written, for instance on a full disk, older
        checkpoints are unharmed. The next `wait` or `settle` reports the error. `save`,
        `restore` and `read_meta` begin with `settle`.

        If the last `restore` passed over newer checkpoints, for instance because they
        are damaged, they are deleted. One that has the number `step` is deleted first,
        since its folder is needed, and the others once this save is complete.

        Args:
            trees: item name → pytree of arrays; empty trees and arrays are allowed.
            meta: dict of values that JSON can hold.
        Raises:
            ValueError: the step or a later one exists already, two leaves have one
                name, or `keep` is None.
            NotSaved: as `settle`.
        """
        if self._manager is None:
            raise ValueError(f"checkpoints in {self.directory} are open for reading")
        self.settle()
        arguments = record.to_save(step, trees, meta)
        self._make_room(self._manager, step)
        self._policy.saved(step, meta)
        self._saving = step
        try:
            self._manager.save(step, args=ocp.args.Composite(**arguments), force=True)
        except Exception as error:
            self._give_up(step, error)
            if is_distributed():
                self.wait()  # raises the error

    def restore(
        self,
        abstract_trees: dict[str, Any],
        step: int | None = None,
        *,
        best: bool = False,
        warn: Callable[[str], None] = print_warning,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Restore a checkpoint, by default the newest undamaged one.

        The arrays are bitwise those that were saved, on any mesh. Every array is read
        once.

        Args:
            abstract_trees: item name → pytree of `jax.ShapeDtypeStruct` with shardings
                (the default device if there is none). Other items are not read.
            step: restore the checkpoint of this step.
            best: restore the undamaged checkpoint with the least held-out loss.
            warn: called with one line for each damaged checkpoint that was skipped.
        Returns:
            (trees, meta).
        Raises:
            ValueError: there is no checkpoint, or no whole one; the checkpoint of
                `step` is missing or damaged; or the arrays of a checkpoint have other
                names, shapes or types than the trees.
        """
        self.settle()
        (trees, meta), restored, reasons = self._first_whole(
            self._candidates(step, best),
            lambda directory: record.read(directory, abstract_trees),
        )
        for passed, why in reasons.items():
            warn(f"checkpoint {passed} is damaged ({why}): restored {restored} instead")
        if self._manager is not None:
            present = self.steps()
            self._policy.restored(restored, present, self._losses(present))
        return trees, meta

    def read_meta(
        self, step: int | None = None, *, best: bool = False
    ) -> dict[str, Any]:
        """Return the meta that `save` was given, and `step`; no array is read.

        Without `step` it is the meta of the newest or best checkpoint whose meta is
        whole. If the arrays of that checkpoint are damaged, `restore` restores another
        checkpoint and returns the meta of that one.

        Raises:
            ValueError: there is no checkpoint, or no whole meta.
        """
        self.settle()
        return self._first_whole(self._candidates(step, best), record.read_meta)[0]

    def wait(self) -> None:
        """Wait until the save in the background is complete and old steps are deleted.

        Raises:
            NotSaved: the checkpoint could not be written. It is raised only once. If
                the connection to another process was lost, its error is raised instead.
        """
        if self._manager is not None and self._saving is not None:
            try:
                self._manager.wait_until_finished()
            except Exception as error:
                self._give_up(self._saving, error)
            self._saving = None
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def settle(self) -> None:
        """Wait like `wait`, but only print a warning if the checkpoint was not saved.

        Raises:
            NotSaved: the checkpoint was not saved, and there are several processes. The
                run must end, since other processes may wait for the shards of this one.
        """
        try:
            self.wait()
        except NotSaved as error:
            if is_distributed():
                raise
            print_warning(f"{error}; continuing without it")

    def close(self) -> None:
        """Wait, and end Orbax's threads. Reading is still possible afterwards."""
        try:
            self.wait()
        finally:
            if self._manager is not None:
                with contextlib.suppress(Exception):  # `wait` has reported it
                    self._manager.close()
                self._manager = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            self.close()
        except NotSaved as error:
            if kind is None:
                raise
            print_warning(str(error))  # the exception that ended the run goes on

    def _candidates(self, step: int | None, best: bool) -> list[int]:
        """Return the steps in the order in which to try them until one is whole.

        Without `best` the newest comes first. With `best` the steps are in the order of
        their losses. Steps whose loss cannot be read come before all others. So the
        user is told that such a step, which may have been the best, is damaged.
        """
        if best and step is not None:
            raise ValueError(f"step {step!r} and the best one: give one of them")
        valid = isinstance(step, SupportsIndex | None) and not isinstance(step, bool)
        if not valid:
            raise ValueError(f"a step must be a whole number, got {step!r}")
        present = self.steps()[::-1]
        if not present:
            raise ValueError(f"no checkpoint in {self.directory}")
        if step is not None and step not in present:
            known = ", ".join(map(str, present[::-1]))
            raise ValueError(
                f"no checkpoint {step!r} in {self.directory}, only {known}"
            )
        if not best:
            return present if step is None else [step]
        losses = self._losses(present)
        if not any(math.isfinite(loss) for loss in losses.values()):
            raise ValueError(f"no checkpoint in {self.directory} has a held-out loss")
        return sorted(losses, key=lambda step: (losses[step], step))

    def _losses(self, steps: Sequence[int]) -> dict[int, float]:
        """Return the held-out losses of steps that have one; −∞ for damaged meta."""
        losses = {}
        for step in steps:
            try:
                meta = record.read_meta(self.directory / str(step))
            except Damaged:
                losses[step] = -math.inf
            else:
                if (loss := heldout_loss(meta)) is not None:
                    losses[step] = loss
        return losses

    def _make_room(self, manager: Manager, step: int) -> None:
        """Delete the checkpoint with the number `step` if `restore` passed over it.

        Raises:
            ValueError: this step, or a later one, exists and was not passed over.
        """
        steps = manager.all_steps()
        newest = max(
            (s for s in steps if s not in self._policy.passed_over), default=-1
        )
        if step <= newest:
            raise ValueError(
                f"checkpoint {step} cannot be saved: {newest} is in {self.directory} "
                "already"
            )
        if step in steps:
            manager.delete(step)
            self._policy.passed_over.discard(step)

    def _first_whole(
        self, steps: list[int], read: Callable[[epath.Path], Any]
    ) -> tuple[Any, int, dict[int, str]]:
        """Read the first undamaged step.

        Returns:
            The result of `read`, the step, and the damage of each step before it.
        """
        reasons: dict[int, str] = {}
        for step in steps:
            try:
                return read(self.directory / str(step)), step, reasons
            except Damaged as error:
                reasons[step] = str(error)
        lines = [f"{step} is damaged ({why})" for step, why in reasons.items()]
        if len(lines) == 1:
            raise ValueError(f"checkpoint {lines[0]} in {self.directory}")
        raise ValueError(
            f"no checkpoint is whole in {self.directory}: {'; '.join(lines)}"
        )

    def _give_up(self, step: int, error: Exception) -> None:
        """Forget a step that was not saved, and delete its unfinished files."""
        self._saving = None
        self._failed = failure(error, f"checkpoint {step}", self.directory)
        self._policy.forget(step)
        with contextlib.suppress(OSError), store_errors(self.directory):
            for path in self.directory.iterdir():
                if path.name.split(".")[0] == str(step) and not committed(path):
                    path.rmtree(missing_ok=True)
        # The old manager would raise the same error at every later save. With several
        # processes there is no later save, and closing it would wait for the others.
        self._manager = (
            None if is_distributed() else Manager(self.directory, self._policy)
        )
