"""Packed arrays in a folder: built once from their source, then read from there.

The folder holds .npy files and `corpus.json`, which is written last: a folder without
it is built again, and with it the source is not needed any more. If the files of the
source are still there, `source_change` says whether they are what was packed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from symjax import config
from symjax.data import sources
from symjax.data.packed import LARGE, REMEDY, Packed, sample_of
from symjax.files import UNFINISHED, replaced

SPLITS = ("train", "heldout")
MANIFEST = "corpus.json"
STALE = 3600.0  # age in seconds from which an unfinished build counts as abandoned
TEXT_KEYS = {"text": "data.path", "hub": "data.name"}  # what a user changes

# Writes .npy files into a folder, and returns what else the manifest says.
Pack = Callable[[config.Data, Path], dict[str, Any]]


def open_folder(
    options: config.Data, directory: Path, pack: Pack, *, replace: bool = False
) -> tuple[dict[str, Any], dict[str, Packed]]:
    """The manifest of a folder and its arrays by name, packed the first time.

    Killed at any moment, the build leaves nothing or a whole folder. An existing one is
    used without its source. Two processes may build at once: both write the same.

    Args:
        replace: build anew over a folder of other options, or a damaged one, as long
            as nothing has been trained on it.
    Raises:
        ValueError: the source cannot be read, the folder is of other options, or a file
            of it is damaged.
    """
    fresh = not (directory / MANIFEST).exists()
    if fresh:
        _build(options, directory, pack)
    try:
        return _read(options, directory)
    except ValueError:
        if fresh or not replace:
            raise
    _build(options, directory, pack)
    return _read(options, directory)


def verify(directory: Path) -> None:
    """Compare every byte of a folder's files with what was written.

    Raises:
        ValueError: a file is damaged, or the manifest.
    """
    for name, facts in read_manifest(directory).get("files", {}).items():
        Packed(directory / name, **facts).verify()


def _read(
    options: config.Data, directory: Path
) -> tuple[dict[str, Any], dict[str, Packed]]:
    manifest = read_manifest(directory)
    check_options(manifest["options"], options, directory)
    return manifest, {
        Path(name).stem: Packed(directory / name, **facts)
        for name, facts in manifest.get("files", {}).items()
    }


def _build(options: config.Data, directory: Path, pack: Pack) -> None:
    """Pack into temporary files, which are moved in, the manifest last."""
    files = sources.files(options)
    stamp = _stamp(files)
    fresh = [x for x in (directory, *directory.parents) if not x.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    _sweep(directory)
    try:
        with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=directory) as place:
            facts = pack(options, Path(place))
            # Of files that changed meanwhile it is unknown which content was read.
            sha256 = _content(files) if _stamp(files) == stamp else ""
            origin = {"stamp": stamp, "sha256": sha256}
            _move_in(directory, Path(place), {**facts, "origin": origin}, options)
    except BaseException:
        with contextlib.suppress(OSError):
            for folder in fresh:
                folder.rmdir()
        raise


def _move_in(
    directory: Path, packed: Path, facts: dict[str, Any], options: config.Data
) -> None:
    names = sorted(path.name for path in packed.iterdir())
    with replaced(directory, *names, MANIFEST) as folder:
        written = {}
        for name in names:
            path = folder / name
            os.rename(packed / name, path)
            written[name] = {"size": path.stat().st_size, "sha256": _sha256(path)}
            if written[name]["size"] >= LARGE:
                with path.open("rb") as file:
                    written[name]["sample"] = sample_of(file, written[name]["size"])
        manifest = {"options": dataclasses.asdict(options), **facts, "files": written}
        Path(folder, MANIFEST).write_text(sealed(manifest))


def _sweep(directory: Path) -> None:
    """Remove what killed builds left, but not what another process is writing now."""
    for path in directory.glob(f"{UNFINISHED}*"):
        try:
            if time.time() - path.stat().st_mtime > STALE:
                shutil.rmtree(path)
        except OSError:
            continue  # another process was faster


def sealed(manifest: dict[str, Any]) -> str:
    """A manifest as JSON with a hash of itself."""
    return json.dumps({**manifest, "seal": _json_sha256(manifest)}, indent=1) + "\n"


def read_manifest(directory: Path) -> dict[str, Any]:
    """Raises: ValueError: the file is not what `sealed` made."""
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        manifest = None
    if not isinstance(manifest, dict):
        manifest = {}
    if manifest.pop("seal", None) != _json_sha256(manifest):
        raise ValueError(
            f"corpus file {str(path)!r} is damaged (not the JSON of a corpus): {REMEDY}"
        )
    return manifest


def check_options(
    stored: dict[str, Any], options: config.Data, directory: Path
) -> None:
    """Raises: ValueError: the folder holds examples of other options."""
    wanted = dataclasses.asdict(options)
    stored = dataclasses.asdict(config.Data()) | stored  # keys it did not have yet
    different = [
        f"data.{name}: {stored[name]!r} → {value!r}"
        for name, value in wanted.items()
        if stored[name] != value
    ]
    if different:
        raise ValueError(
            f"corpus {str(directory)!r} was built with other options "
            f"({', '.join(different)}): use another --workdir"
        )


def source_change(options: config.Data, directory: Path) -> str:
    """One line if the source's files are no longer those that were packed, else "".

    Names, sizes and times are compared; only where they differ, the content, by sha256.
    A source that is gone is no change: the corpus does not need it.
    """
    packed = read_manifest(directory).get("origin")
    try:
        files = sources.files(options)
        if not files or packed is None or _stamp(files) == packed["stamp"]:
            return ""
        if _content(files) == packed["sha256"]:
            return ""
    except (ValueError, OSError):
        return ""
    what = f"data.source={options.source}"
    if options.source in TEXT_KEYS:
        key = TEXT_KEYS[options.source].removeprefix("data.")
        key = "mixture" if options.mixture else key
        what = f"data.{key} {getattr(options, key)!r}"
    return (
        f"{what} has changed since it was packed: the run goes on with its copy in "
        f"{directory}, a new --workdir takes the new text"
    )


def _stamp(files: dict[str, Path]) -> str:
    """A hash of names, sizes and times of change."""
    status = {name: path.stat() for name, path in files.items()}
    return _json_sha256({n: [s.st_size, s.st_mtime_ns] for n, s in status.items()})


def _content(files: dict[str, Path]) -> str:
    """A hash of names and contents."""
    return _json_sha256({name: _sha256(path) for name, path in files.items()})


def _json_sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
