"""The checkpoints of a run: saved in the background, checked when they are read.

Orbax commits a step by a rename, in a bucket by a last object, so a killed save leaves
nothing that counts as a step. What it does not notice is a flipped bit, or a directory
that lost its files and still counts as the latest step. `record` finds both; here the
step before is taken.
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
    Kept,
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
    """The checkpoints of one run: saved in the background, checked when restored.

    With several processes, each calls every method with the same arguments, and the
    directory is one that all of them see.

    Args:
        directory: absolute; made if it is missing.
        keep: how many of the newest whole checkpoints stay; None opens for reading,
            which makes, writes and deletes nothing.
        best: beside them, keep the one whose meta has the least `heldout_loss`.
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
        self._kept = Kept(keep or 0, best)
        self._manager = None
        if keep:
            check_writable(self.directory, f"checkpoints in {self.directory}")
            with store_errors(self.directory):
                self._manager = Manager(self.directory, self._kept)
        self._saving: int | None = None
        self._failed: BaseException | None = None

    def steps(self) -> list[int]:
        """Every step on disk, ascending: committed by a save, whole or damaged since.

        Only `restore` reads the arrays, and so only it can tell the two apart.
        """
        with store_errors(self.directory):
            if not self.directory.is_dir():
                return []
            found = {path.name: path for path in self.directory.iterdir()}
            return sorted(
                int(name)
                for name, path in found.items()
                if name.isdecimal() and name == str(int(name)) and committed(path)
            )

    def improves(self, loss: float) -> bool:
        """Whether a checkpoint of this held-out loss would be kept as the best."""
        return self._kept.best and loss < min(
            self._kept.losses.values(), default=math.inf
        )

    def save(self, step: int, trees: dict[str, Any], meta: dict[str, Any]) -> None:
        """Start saving; on return the caller may donate or delete the arrays.

        A save that cannot be written, on a full disk for instance, takes nothing else
        with it: `wait` raises it, and the next save only says so on stderr (with
        several processes it raises it too).

        Waits for the save before it, and for the arrays. Steps that the last `restore`
        passed over, because they were damaged or later than the step it was asked for,
        make way: the same number at once, the others when this save is complete.

        Args:
            trees: item name → pytree of arrays; empty trees and arrays are fine.
            meta: what JSON can hold.
        Raises:
            ValueError: the step or a later one exists already, two leaves have one
                name, or `keep` was None.
        """
        if self._manager is None:
            raise ValueError(f"checkpoints in {self.directory} are open for reading")
        self.settle()
        arguments = record.to_save(step, trees, meta)
        self._remove_passed(self._manager, step)
        self._kept.saved(step, meta)
        self._saving = step
        try:
            self._manager.save(step, args=ocp.args.Composite(**arguments), force=True)
        except Exception as error:
            self._give_up(step, error)
            if is_distributed():
                self.wait()  # raises it

    def restore(
        self,
        abstract_trees: dict[str, Any],
        step: int | None = None,
        *,
        best: bool = False,
        warn: Callable[[str], None] = print_warning,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The trees and meta of the newest whole checkpoint, or of the one asked for,
        or of the one of the least held-out loss.

        Bitwise what was saved, on whatever mesh the shardings name. Each damaged
        checkpoint on the way is named to `warn` in one line. Reads every array once.

        Args:
            abstract_trees: item name → pytree of `jax.ShapeDtypeStruct` with shardings
                (the default device where there is none); other items are not read.
        Raises:
            ValueError: there is no checkpoint, none is whole, the one asked for is not,
                or its arrays have other names, shapes or types than the trees.
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
            self._kept.restored(restored, present, self._losses(present))
        return trees, meta

    def read_meta(
        self, step: int | None = None, *, best: bool = False
    ) -> dict[str, Any]:
        """The meta given to `save`, and `step`, without reading any array.

        Without a step, of the newest or best checkpoint whose meta is whole. `restore`
        may find arrays of that one damaged; it returns the meta of the one it restored.

        Raises:
            ValueError: there is no checkpoint, or no whole meta.
        """
        self.settle()
        return self._first_whole(self._candidates(step, best), record.read_meta)[0]

    def wait(self) -> None:
        """Until the save in the background is complete and the old ones are deleted.

        Raises:
            NotSaved: it could not be written; said once.
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
        """`wait`, but a checkpoint that could not be saved does not end the run.

        Raises: NotSaved: with several processes, of which the others may wait for this
            one to finish the save: it ends, and they with it.
        """
        try:
            self.wait()
        except NotSaved as error:
            if is_distributed():
                raise
            print_warning(f"{error}; continuing without it")

    def close(self) -> None:
        """Wait, and end Orbax's threads; reading is still possible afterwards."""
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
            print_warning(str(error))  # and what ended the run continues

    def _candidates(self, step: int | None, best: bool) -> list[int]:
        """The steps to try until one is whole: the newest first.

        By their loss if the best is asked for: first those whose loss cannot be read,
        since each of them may be the best.
        """
        if best and step is not None:
            raise ValueError(f"step {step!r} and the best one: give one of them")
        known = isinstance(step, SupportsIndex | None) and not isinstance(step, bool)
        if not known:
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
        """Held-out loss by step, of those that have one; −∞ where it is damaged."""
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

    def _remove_passed(self, manager: Manager, step: int) -> None:
        steps = manager.all_steps()
        newest = max((s for s in steps if s not in self._kept.passed), default=-1)
        if step <= newest:
            raise ValueError(
                f"checkpoint {step} cannot be saved: {newest} is in {self.directory} "
                "already"
            )
        if step in steps:
            manager.delete(step)
            self._kept.passed.discard(step)

    def _first_whole(
        self, steps: list[int], read: Callable[[epath.Path], Any]
    ) -> tuple[Any, int, dict[int, str]]:
        """What `read` makes of the first undamaged step, that step, and what was wrong
        with those before it."""
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
        """Forget a step that was not saved, and free the room that it has taken."""
        self._saving = None
        self._failed = failure(error, f"checkpoint {step}", self.directory)
        self._kept.forget(step)
        with contextlib.suppress(OSError), store_errors(self.directory):
            for path in self.directory.iterdir():
                if path.name.split(".")[0] == str(step) and not committed(path):
                    path.rmtree(missing_ok=True)
        # The old one would raise the same error at every save that follows; with
        # several processes none follows, and closing it would wait for the others.
        self._manager = (
            None if is_distributed() else Manager(self.directory, self._kept)
        )
