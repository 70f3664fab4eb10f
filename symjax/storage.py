"""Storage of a run: a folder of this machine, or a folder in a bucket of Cloud Storage.

The folder of a run is its workdir, an `epath.Path` in both cases. Orbax and TensorStore
write checkpoints to either kind. Small objects of a bucket go through etils, whose
client for gs:// is gcsfs. A bucket has no locks, and nothing can be appended to its
objects. A run in a bucket therefore also has a folder on this machine, `local_folder`,
for its lock, its metrics and its packed data.

`resolve` turns what a user typed into a path. `download` and `upload` copy files
between the workdir and the local folder, and `local_copy` copies a folder of a bucket
to a temporary folder. `replaced` writes each file whole or not at all, and
`check_writable` tests whether a folder can be written.
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
# Errors of TensorStore that do not tell whether objects are missing or damaged.
UNANSWERED = re.compile(
    "(ABORTED|DEADLINE_EXCEEDED|INTERNAL|PERMISSION_DENIED|RESOURCE_EXHAUSTED|"
    "UNAUTHENTICATED|UNKNOWN|UNAVAILABLE): "
)
CLIENTS = ("aiohttp", "gcsfs", "google", "requests")  # packages with their own errors
NO_S3 = "Orbax, which writes the checkpoints, has no driver for it"
UNFINISHED = ".unfinished-"  # prefix of temporary names


def resolve(path: str | os.PathLike[str]) -> epath.Path:
    """Return the absolute path of a folder, or the folder in a bucket of a gs:// URL.

    Raises:
        ValueError: the path is empty, its scheme is not supported, it names a bucket
            without a folder, or gcsfs is not installed.
    """
    text = _text(path)
    if (found := SCHEME.match(text)) is None:
        return epath.Path(Path(text).absolute())
    if found[1] != "gs":
        why = f": {NO_S3}" if found[1] == "s3" else ""
        raise ValueError(f"{found[0]} is not supported{why}: give {KINDS}")
    where = epath.Path(text)
    if len(where.parts) < 4:  # "/", "gs" and the bucket
        raise ValueError(f"{text!r} names no folder in a bucket: gs://BUCKET/FOLDER")
    _prepare_client()
    return where


def resolve_url(path: str | os.PathLike[str]) -> Path | epath.Path:
    """Return a local path unchanged, and for a URL the result of `resolve`.

    Raises:
        ValueError: as `resolve`.
    """
    return resolve(path) if SCHEME.match(_text(path)) else Path(path)


def _text(path: str | os.PathLike[str]) -> str:
    """Return a path as text; restore the second slash of a scheme, which pathlib drops.

    Raises:
        ValueError: the path is empty.
    """
    if not (text := os.fspath(path)):
        raise ValueError("a path is empty: name a file or a folder")
    return ONE_SLASH.sub(r"\1://", text) if isinstance(path, PurePath) else text


def in_bucket(path: os.PathLike[str]) -> bool:
    return os.fspath(path).startswith("gs://")


def local_folder(workdir: os.PathLike[str]) -> Path:
    """Return the folder on this machine for the lock, metrics and packed data of a run.

    It is the workdir itself, or for a workdir in a bucket a folder of the user's cache.
    """
    if not in_bucket(workdir):
        return Path(workdir)
    return user_cache("runs").joinpath(*epath.Path(workdir).parts[1:])


def user_cache(name: str) -> Path:
    """Return the folder symjax/`name` of $XDG_CACHE_HOME, by default ~/.cache."""
    found = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(found, "symjax", name)


def download(workdir: epath.Path, name: str) -> Path:
    """Return the local path of a file of a workdir; copy it from a bucket first.

    If the workdir does not have the file, the returned path does not exist.
    """
    here = local_folder(workdir) / name
    if in_bucket(workdir):
        here.parent.mkdir(parents=True, exist_ok=True)
        with store_errors(workdir):
            if not (workdir / name).exists():
                here.unlink(missing_ok=True)
            else:
                copy = here.with_name(f"{here.name}.{os.getpid()}")
                _client().get_file(os.fspath(workdir / name), str(copy))
                os.replace(copy, here)
    return here


def upload(workdir: epath.Path, name: str) -> None:
    """Copy a file of the local folder to the workdir, if the workdir is in a bucket."""
    if in_bucket(workdir):
        upload_file(local_folder(workdir) / name, workdir / name)


def upload_file(file: Path, target: os.PathLike[str]) -> None:
    """Copy a file to an object, which appears whole or not at all."""
    with store_errors(target):
        _client().put_file(str(file), os.fspath(target))


@contextlib.contextmanager
def local_copy(folder: Path | epath.Path, *suffixes: str) -> Iterator[Path]:
    """Yield a folder on this machine with the files of `folder`.

    A local folder is yielded itself. The files of a folder in a bucket that have one of
    the suffixes are copied to a temporary folder, which is removed when the block ends.
    If the block raises a ValueError, its message names the folder in the bucket instead
    of the temporary one.
    """
    if not in_bucket(folder):
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory() as here:
        with store_errors(folder):
            for name in [x.name for x in epath.Path(folder).iterdir()]:
                if name.endswith(suffixes):
                    there = os.fspath(epath.Path(folder, name))
                    _client().get_file(there, str(Path(here, name)))
        try:
            yield Path(here)
        except ValueError as error:
            message = str(error).replace(here, os.fspath(folder))
            raise ValueError(message) from error


@contextlib.contextmanager
def store_errors(path: os.PathLike[str]) -> Iterator[None]:
    """Turn errors of a bucket's client into OSError inside the block.

    The client has many own types of error, which depend on the packages that it uses.
    FileNotFoundError and PermissionError pass unchanged. If `path` is local, all errors
    pass unchanged.
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


def is_unanswered(error: BaseException) -> bool:
    """Return whether an error means that a store was not reached or refused this user.

    It is then unknown what the store holds: no object can be called missing or damaged.
    """
    if isinstance(error, FileNotFoundError):
        return False
    client = type(error).__module__.partition(".")[0] in CLIENTS
    refused = isinstance(error, OSError) and str(error).startswith("Forbidden: ")
    return client or refused or UNANSWERED.match(str(error)) is not None


def _client() -> Any:
    """Return fsspec's client for gs://, which copies large files in parts."""
    import fsspec

    return fsspec.filesystem("gs")


def _prepare_client() -> None:
    """Choose gcsfs for small objects, even if TensorFlow is installed.

    The cache of listings is switched off, since Orbax writes to the bucket too.

    Raises:
        ValueError: gcsfs is not installed.
    """
    if importlib.util.find_spec("gcsfs") is None:
        raise ValueError("gs:// needs gcsfs: pip install gcsfs")
    import fsspec.config

    # gcsfs logs the errors that it also raises.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    os.environ.setdefault("EPATH_USE_TF", "false")
    fsspec.config.conf.setdefault("gs", {}).setdefault("use_listings_cache", False)


def check_writable(folder: Path | epath.Path, what: str) -> None:
    """Make a folder, then write a file in it and remove that file again.

    In a bucket only the file is written: making a folder could make a missing bucket.

    Raises:
        ValueError: the folder cannot be written; the message begins with `what`.
    """
    try:
        if in_bucket(folder):
            with store_errors(folder):
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
    """Yield a temporary folder whose files replace those of `folder` after the block.

    The files `names` move in this order, and only if the block raises nothing. If the
    process is killed, each file is the old or the new one, and a file is new only if
    all files before it are new.
    """
    if in_bucket(folder):
        with tempfile.TemporaryDirectory() as unfinished:
            yield Path(unfinished)
            for name in names:
                upload_file(Path(unfinished, name), epath.Path(folder, name))
        return
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=folder) as unfinished:
        yield Path(unfinished)
        for name in names:
            with open(Path(unfinished, name), "rb") as file:
                os.fsync(file.fileno())
            os.replace(Path(unfinished, name), folder / name)
