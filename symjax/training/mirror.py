"""Copies for a bucket of what a run appends to in its folder on this machine."""

from etils import epath

from symjax.places import home, in_bucket, sent
from symjax.training.launch import is_process_zero
from symjax.training.progress import print_warning

# Files, and folders of files.
COPIED = ("metrics.jsonl", "metrics.png", "tensorboard", "profile")


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
