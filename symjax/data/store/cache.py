"""Packed corpora of a machine, one folder each, shared by its runs and processes.

    <cache>/<name>/       .npy files and corpus.json, which is never there without them
    <cache>/.<name>.lock  locked by the process that packs; another one waits for it

A name has the source and a hash: of the options, of the names, sizes and times of the
source's files or the hub's revision, and of a tokenizer's file.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock

from symjax import config
from symjax.data import tokens
from symjax.data.boundaries import FORMAT
from symjax.data.sources import sources
from symjax.data.store.manifest import (
    MANIFEST,
    content_of,
    json_sha256,
    read_manifest,
    sha256_of,
    stamp_of,
    stored,
    write_manifest,
)
from symjax.data.store.packed import LARGE, Packed, sample_of
from symjax.storage import UNFINISHED, check_writable, user_cache

# Writes .npy files of a format into a folder, and returns what else the manifest says.
Pack = Callable[[config.Data, Path, int], dict[str, Any]]


def root(options: config.Data) -> Path:
    """The folder of all packed corpora.

    Raises:
        ValueError: `data.cache` is no folder of this machine.
    """
    if "://" in options.cache:
        raise ValueError(
            f"data.cache {options.cache!r} is not on this machine: tokens are read "
            "from a folder, which --workdir need not be"
        )
    return Path(options.cache).expanduser() if options.cache else user_cache("data")


def name_of(
    options: config.Data, revisions: list[str] | None = None, *, format: int = FORMAT
) -> str:
    """The name of a corpus. Reads no text.

    Args:
        format: of the corpus; one of another format has another name.
        revisions: of data sets of the hub, where they are not to be asked for.
    Raises:
        ValueError: the source is not there, or the hub does not answer.
    """
    files = sources.files(options)
    places = [str(path.resolve()) for path in files.values()]
    if revisions is None:
        revisions = sources.revisions(options)
    tokenizer = tokens.state(options.tokenizer)
    parts = [format, stored(options), places, stamp_of(files), revisions, tokenizer]
    return f"{options.source}-{json_sha256(parts)[:20]}"


def cached(
    options: config.Data, pack: Pack, *, repair: bool = False, format: int = FORMAT
) -> tuple[dict[str, Any], dict[str, Packed]]:
    """The manifest and the arrays of a corpus, packed if it is not in the cache.

    Killed at any moment, a process leaves the corpus whole or not at all.

    Args:
        repair: pack a damaged one again.
        format: of the corpus.
    Raises:
        ValueError: the source or the cache cannot be read, or the cache written.
    """
    place = root(options) / name_of(options, format=format)
    check_writable(place.parent, f"data.cache {str(place.parent)!r}")
    if not (place / MANIFEST).exists():
        with locked(place):
            if not (place / MANIFEST).exists():  # no other process was faster
                _build(options, place, pack, format)
    try:
        manifest = read_manifest(place)
        return manifest, opened(place, manifest)
    except ValueError:
        if not repair:
            raise
    with locked(place):
        _build(options, place, pack, format)
    manifest = read_manifest(place)
    return manifest, opened(place, manifest)


def opened(place: Path, manifest: dict[str, Any]) -> dict[str, Packed]:
    """The arrays of a corpus by name.

    Raises:
        ValueError: one of them is missing or not what the manifest says.
    """
    files = manifest.get("files", {}).items()
    return {Path(name).stem: Packed(place / name, **facts) for name, facts in files}


@contextlib.contextmanager
def locked(place: Path) -> Iterator[None]:
    """Keep other processes from packing a corpus; wait, and say so, while one does."""
    lock = _lock(place)
    try:
        held = lock.acquire(blocking=False)
    except filelock.Timeout:
        print(f"waiting: another process packs {place}", file=sys.stderr, flush=True)
        held = lock.acquire()
    with held:
        yield


def _lock(place: Path) -> filelock.BaseFileLock:
    return filelock.FileLock(place.with_name(f".{place.name}.lock"))


def _sweep(folder: Path) -> None:
    """Remove what killed processes left, but nothing that one is writing now."""
    for rest in folder.glob(f"{UNFINISHED}*"):
        place = folder / rest.name.removeprefix(UNFINISHED)
        with contextlib.suppress(filelock.Timeout, OSError):
            with _lock(place).acquire(blocking=False):
                shutil.rmtree(rest)


def _build(options: config.Data, place: Path, pack: Pack, format: int) -> None:
    """Pack into a folder of another name, which is then moved to its place."""
    files = sources.files(options)
    stamp, unfinished = stamp_of(files), place.with_name(f"{UNFINISHED}{place.name}")
    _sweep(place.parent)
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    unfinished.mkdir()
    try:
        facts = pack(options, unfinished, format)
        written = {path.name: facts_of(path) for path in sorted(unfinished.iterdir())}
        # Of files that changed meanwhile it is unknown which content was read.
        content = content_of(files) if stamp_of(files) == stamp else ""
        manifest = {
            "name": place.name,
            "options": stored(options),
            **facts,
            "origin": {"stamp": stamp, "sha256": content},
            "files": written,
        }
        write_manifest(unfinished, manifest)
        shutil.rmtree(place, ignore_errors=True)  # one that is damaged
        os.rename(unfinished, place)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def facts_of(path: Path) -> dict[str, Any]:
    """Size and hashes of a file, by which `Packed` knows it; it is on the disk then."""
    facts: dict[str, Any] = {"size": path.stat().st_size, "sha256": sha256_of(path)}
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if facts["size"] >= LARGE:
            facts["sample"] = sample_of(file, facts["size"])
    return facts
