"""Workdir of a run: locked for one run, and unchanged by a run that is refused."""

import contextlib
import os
from collections.abc import Iterator

import filelock
from etils import epath

from symjax.distributed.exit_codes import print_warning
from symjax.distributed.launch import is_process_zero
from symjax.storage import check_writable, local_folder, store_errors

# Names that a run may make in its workdir before its first step, besides the lock.
PARTS = ("checkpoints", "data", "tensorboard", "wandb", "profile", "metrics.jsonl")
LOCK = "lock"


@contextlib.contextmanager
def locked(workdir: epath.Path) -> Iterator[None]:
    """Make the workdir, and lock it against other runs until the block ends.

    If a process is killed, the file `lock` stays, but the operating system releases the
    lock. Folders that were made here and are empty at the end are removed. Reading
    needs no lock. A bucket has no locks: for a run in a bucket, the lock keeps out only
    other runs on this machine.

    Raises:
        ValueError: the workdir cannot be made or written, or another process holds the
            lock.
    """
    here = local_folder(workdir)
    folders = [x for x in (here, *here.parents) if not x.exists()]
    what = f"--workdir {str(workdir)!r}"
    check_writable(workdir, what)
    check_writable(here, f"{here}, which {what} needs,")
    try:
        with _lock(workdir) if is_process_zero() else contextlib.nullcontext():
            yield
    finally:
        with contextlib.suppress(OSError):
            for folder in folders:
                folder.rmdir()


@contextlib.contextmanager
def removed_on_failure(workdir: epath.Path) -> Iterator[None]:
    """Remove the files and folders of `PARTS` that the block has made, if it raises.

    Files that existed before the block stay.
    """
    folders = {epath.Path(local_folder(workdir)), epath.Path(workdir)}
    parts = [folder / name for folder in folders for name in PARTS]
    with store_errors(workdir):
        parts = [part for part in parts if not part.exists()]
    try:
        yield
    except BaseException:
        for part in parts:
            with contextlib.suppress(OSError), store_errors(workdir):
                part.rmtree(missing_ok=True)
        raise


@contextlib.contextmanager
def _lock(workdir: epath.Path) -> Iterator[None]:
    """Hold the lock file of a workdir. Warn and go on if the file cannot be locked.

    Raises:
        ValueError: another process holds the lock.
    """
    path = local_folder(workdir) / LOCK
    lock = filelock.FileLock(path, blocking=False)
    try:
        lock.acquire()
        path.write_text(str(os.getpid()))  # for the message below
    except filelock.Timeout:
        raise ValueError(
            f"--workdir {str(workdir)!r} is in use by process {path.read_text()}: wait "
            "for it, or use another"
        ) from None
    except OSError as error:
        print_warning(
            f"{path} cannot be locked ({error.strerror}): start no second run in it"
        )
    try:
        yield
    finally:
        if lock.is_locked:
            # Removed before the release, since afterwards another run may hold it.
            path.unlink(missing_ok=True)
            lock.release()
