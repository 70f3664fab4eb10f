"""Files that are written whole or not at all, and folders that can be written."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

from etils import epath

from symjax.places import in_bucket, put, reaching

UNFINISHED = ".unfinished-"


def check_writable(folder: Path | epath.Path, what: str) -> None:
    """Make a folder, and a file in it that is gone again; in a bucket only the file.

    Raises:
        ValueError: `what`, which belongs there, cannot be written.
    """
    try:
        if in_bucket(folder):  # to make a folder would make a bucket that is missing
            with reaching(folder):
                probe = epath.Path(folder, f"{UNFINISHED}{token_hex(8)}")
                probe.write_bytes(b"")
                probe.unlink()
        else:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(
            f"{what} cannot be written: {error.strerror or error}"
        ) from None


@contextlib.contextmanager
def replaced(folder: Path | epath.Path, *names: str) -> Iterator[Path]:
    """A temporary folder, whose files move to `folder` when the block ends well.

    A kill leaves each file the old one or the new one, and a later name is new only
    where all before it are.
    """
    if in_bucket(folder):
        with tempfile.TemporaryDirectory() as unfinished:
            yield Path(unfinished)
            for name in names:
                put(Path(unfinished, name), epath.Path(folder, name))
        return
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=folder) as unfinished:
        yield Path(unfinished)
        for name in names:
            with open(Path(unfinished, name), "rb") as file:
                os.fsync(file.fileno())
            os.replace(Path(unfinished, name), folder / name)
