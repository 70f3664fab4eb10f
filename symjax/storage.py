"""Where a run lives: a folder of this machine, or one in a bucket of Cloud Storage.

Both are an `epath.Path`. Orbax and TensorStore write checkpoints to either; small
objects of a bucket go through etils, whose client for gs:// is gcsfs. A bucket has no
locks, and its objects cannot be appended to: for these, a run in one also has a folder
on this machine, its `home`.

Files that are written whole or not at all, and folders that can be written.
"""

import contextlib
import importlib.util
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePath
from secrets import token_hex
from typing import Any

from etils import epath

SCHEME = re.compile("([A-Za-z][A-Za-z0-9+.-]*)://")
ONE_SLASH = re.compile("^(gs|s3):/(?!/)")
KINDS = "a folder of this machine, or gs://BUCKET/FOLDER"
# Of the errors of TensorStore, those that say nothing of the objects themselves.
NO_ANSWER = re.compile(
    "(ABORTED|DEADLINE_EXCEEDED|INTERNAL|PERMISSION_DENIED|RESOURCE_EXHAUSTED|"
    "UNAUTHENTICATED|UNKNOWN|UNAVAILABLE): "
)
CLIENTS = ("aiohttp", "gcsfs", "google", "requests")  # with errors of their own
NO_S3 = "Orbax, which writes the checkpoints, has no driver for it"


def place(path: str | os.PathLike[str]) -> epath.Path:
    """The absolute path of a folder, or the one in a bucket that gs:// names.

    Raises:
        ValueError: a scheme that is not known, no folder in the bucket, or gcsfs is not
            installed.
    """
    text = _text(path)
    if (found := SCHEME.match(text)) is None:
        return epath.Path(Path(text).absolute())
    if found[1] != "gs":
        why = f": {NO_S3}" if found[1] == "s3" else ""
        raise ValueError(f"{found[0]} is not supported{why}: give {KINDS}")
    where = epath.Path(text)
    if len(where.parts) < 4:  # /, gs, the bucket
        raise ValueError(f"{text!r} names no folder in a bucket: gs://BUCKET/FOLDER")
    _prepare_client()
    return where


def anywhere(path: str | os.PathLike[str]) -> Path | epath.Path:
    """A path as it is given, or the one in a bucket. Raises: ValueError: as `place`."""
    return place(path) if SCHEME.match(_text(path)) else Path(path)


def _text(path: str | os.PathLike[str]) -> str:
    """A path in words; pathlib leaves one slash of the two after a scheme.

    Raises: ValueError: it is empty.
    """
    if not (text := os.fspath(path)):
        raise ValueError("a path is empty: name a file or a folder")
    return ONE_SLASH.sub(r"\1://", text) if isinstance(path, PurePath) else text


def in_bucket(path: os.PathLike[str]) -> bool:
    return os.fspath(path).startswith("gs://")


def home(workdir: os.PathLike[str]) -> Path:
    """The folder of this machine in which a run locks, appends and packs its data.

    The workdir itself; of one in a bucket a folder of the user's cache.
    """
    if not in_bucket(workdir):
        return Path(workdir)
    return user_cache("runs").joinpath(*epath.Path(workdir).parts[1:])


def user_cache(name: str) -> Path:
    """A folder of symjax in the user's cache: $XDG_CACHE_HOME, or ~/.cache."""
    found = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(found, "symjax", name)


def brought(workdir: epath.Path, name: str) -> Path:
    """A file of a workdir on this machine: itself, or in `home` a copy of the object.

    Where the workdir has none, there is none.
    """
    here = home(workdir) / name
    if in_bucket(workdir):
        here.parent.mkdir(parents=True, exist_ok=True)
        with reaching(workdir):
            if not (workdir / name).exists():
                here.unlink(missing_ok=True)
            else:
                copy = here.with_name(f"{here.name}.{os.getpid()}")
                _client().get_file(os.fspath(workdir / name), str(copy))
                os.replace(copy, here)
    return here


def sent(workdir: epath.Path, name: str) -> None:
    """Put a file of `home` into the workdir, where these are two."""
    if in_bucket(workdir):
        put(home(workdir) / name, workdir / name)


def put(file: Path, target: os.PathLike[str]) -> None:
    """Make an object of a file; it is whole or not there."""
    with reaching(target):
        _client().put_file(str(file), os.fspath(target))


@contextlib.contextmanager
def copied(folder: Path | epath.Path, *suffixes: str) -> Iterator[Path]:
    """A folder on this machine: itself, or of one in a bucket a copy of its files with
    these suffixes, until the block ends.

    A ValueError of the block names the folder in the bucket.
    """
    if not in_bucket(folder):
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory() as here:
        with reaching(folder):
            for name in [x.name for x in epath.Path(folder).iterdir()]:
                if name.endswith(suffixes):
                    there = os.fspath(epath.Path(folder, name))
                    _client().get_file(there, str(Path(here, name)))
        try:
            yield Path(here)
        except ValueError as error:
            said = str(error).replace(here, os.fspath(folder))
            raise ValueError(said) from error


@contextlib.contextmanager
def reaching(path: os.PathLike[str]) -> Iterator[None]:
    """Inside, what the client of a store raises for want of it is an OSError.

    Its own kinds of error are many, and depend on the packages that it is made of.
    """
    try:
        yield
    except Exception as error:
        if not in_bucket(path) or isinstance(
            error, FileNotFoundError | PermissionError
        ):
            raise
        line = (str(error).splitlines() or [""])[0]
        raise OSError(0, f"{type(error).__name__}: {line}", os.fspath(path)) from error


def no_answer(error: BaseException) -> bool:
    """Whether a store was not reached, or told this user nothing, so that it is unknown
    what it holds."""
    if isinstance(error, FileNotFoundError):
        return False
    client = type(error).__module__.partition(".")[0] in CLIENTS
    refused = isinstance(error, OSError) and str(error).startswith("Forbidden: ")
    return client or refused or NO_ANSWER.match(str(error)) is not None


def _client() -> Any:
    """What copies whole files, piece by piece."""
    import fsspec

    return fsspec.filesystem("gs")


def _prepare_client() -> None:
    """Of small objects: gcsfs, also where TensorFlow is; without a cache of names,
    since Orbax writes there too.

    Raises:
        ValueError: it is not installed.
    """
    if importlib.util.find_spec("gcsfs") is None:
        raise ValueError("gs:// needs gcsfs: pip install gcsfs")
    import fsspec.config

    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # of what it raises
    os.environ.setdefault("EPATH_USE_TF", "false")
    fsspec.config.conf.setdefault("gs", {}).setdefault("use_listings_cache", False)


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
