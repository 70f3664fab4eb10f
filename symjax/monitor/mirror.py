"""Copies in a bucket of what a run writes on the machine."""

from etils import epath

from symjax.distributed.exit_codes import print_warning
from symjax.distributed.launch import is_process_zero
from symjax.storage import in_bucket, local_folder, upload

# Of what lies in `home`, that of which a bucket gets copies.
COPIED = ("metrics.jsonl", "metrics.png", "tensorboard/**/*", "profile/**/*")


class Mirror:
    """Brings whole files from a run's `home` to its workdir, where these are two.

    The first of several processes does, with the files of its machine.
    """

    def __init__(self, workdir: epath.Path):
        self._workdir, self._home = workdir, local_folder(workdir)
        self._copied: dict[str, tuple[int, int]] = {}
        self._failed = False

    def copy(self) -> None:
        """What has changed since it was copied; a store that cannot be written is said
        in one line, and tried again the next time."""
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
                    f"continuing, they are in {self._home}"
                )
            self._failed = True
        else:
            self._failed = False

    def _stamps(self) -> dict[str, tuple[int, int]]:
        """Size and time of each file."""
        found = [path for name in COPIED for path in sorted(self._home.glob(name))]
        stats = {path: path.stat() for path in found if path.is_file()}
        return {
            path.relative_to(self._home).as_posix(): (stat.st_size, stat.st_mtime_ns)
            for path, stat in stats.items()
        }
