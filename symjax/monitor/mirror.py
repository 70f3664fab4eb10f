"""Copies in a bucket of the files that a run writes on its machine."""

from etils import epath

from symjax.distributed.exit_codes import print_warning
from symjax.distributed.launch import is_process_zero
from symjax.storage import in_bucket, local_folder, upload

# Patterns of the files in `local_folder` that are copied to a bucket.
COPIED = ("metrics.jsonl", "metrics.png", "tensorboard/**/*", "profile/**/*")


class Mirror:
    """Copies whole files from a run's local folder to its workdir in a bucket.

    With several processes only the first one copies, from its machine.
    """

    def __init__(self, workdir: epath.Path):
        self._workdir, self._local = workdir, local_folder(workdir)
        self._copied: dict[str, tuple[int, int]] = {}
        self._failed = False

    def copy(self) -> None:
        """Copy the files that have changed since they were last copied.

        If the bucket cannot be written, one line says so, and the next call tries
        again.
        """
        if not in_bucket(self._workdir) or not is_process_zero():
            return
        try:
            for name, stamp in self._stamps().items():
                if self._copied.get(name) != stamp:
                    upload(self._workdir, name)
                    self._copied[name] = stamp
        except OSError as error:
            if not self._failed:
                print_warning(
                    f"metrics cannot be copied to {self._workdir} ({error.strerror}): "
                    f"continuing, they are in {self._local}"
                )
            self._failed = True
        else:
            self._failed = False

    def _stamps(self) -> dict[str, tuple[int, int]]:
        """Return the size and the time of change of each file."""
        found = [path for name in COPIED for path in sorted(self._local.glob(name))]
        stats = {path: path.stat() for path in found if path.is_file()}
        return {
            path.relative_to(self._local).as_posix(): (stat.st_size, stat.st_mtime_ns)
            for path, stat in stats.items()
        }
