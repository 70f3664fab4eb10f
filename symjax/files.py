"""Files that are written whole or not at all, and folders that can be written."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

UNFINISHED = ".unfinished-"


def user_cache(name: str) -> Path:
    """A folder of symjax in the user's cache: $XDG_CACHE_HOME, or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home, "symjax", name)


def check_writable(folder: Path, what: str) -> None:
    """Make a folder, and a file in it that is gone again.

    Raises:
        ValueError: `what`, which belongs there, cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"{what} cannot be written: {error.strerror}") from None


@contextlib.contextmanager
def replaced(folder: Path, *names: str) -> Iterator[Path]:
    """A temporary folder, whose files move to `folder` when the block ends well.

    A kill leaves each file the old one or the new one, and a later name is new only
    where all before it are.
    """
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=folder) as unfinished:
        yield Path(unfinished)
        for name in names:
            with open(Path(unfinished, name), "rb") as file:
                os.fsync(file.fileno())
            os.replace(Path(unfinished, name), folder / name)
