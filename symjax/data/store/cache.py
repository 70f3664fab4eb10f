"""The cache of packed corpora: one folder each, shared by all runs of a machine.

    <cache>/<name>/       .npy files and corpus.json, which is written last
    <cache>/.<name>.lock  held by the process that packs; others wait for it

A name has the source and a hash. The hash covers the format, the options, the paths,
sizes and times of the source's files, the revisions of data sets on the hub, and the
tokenizer's file.
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
from symjax.data.sources import table
from symjax.data.store.manifest import (
    MANIFEST,
    content_of,
    json_sha256,
    read_manifest,
    sha256_of,
    stamp_of,
    stored_options,
    write_manifest,
)
from symjax.data.store.packed import SAMPLED_FROM, PackedArray, sample_hash
from symjax.storage import UNFINISHED, check_writable, user_cache

# (options, folder, format): writes .npy files into the folder, and returns the entries
# of the manifest about them.
Pack = Callable[[config.Data, Path, int], dict[str, Any]]


def root(options: config.Data) -> Path:
    """The folder of the cache.

    Raises:
        ValueError: `data.cache` is not on this machine.
    """
    if "://" in options.cache:
        raise ValueError(
            f"data.cache {options.cache!r} is not on this machine: give a local "
            "folder, also if --workdir is in a bucket"
        )
    return Path(options.cache).expanduser() if options.cache else user_cache("data")


def folder_name(
    options: config.Data, revisions: list[str] | None = None, *, format: int = FORMAT
) -> str:
    """Return the name of the folder of a corpus, without reading its text.

    Args:
        revisions: the revisions of data sets on the hub; None to ask the hub.
        format: the format of the corpus; each format has another name.
    Raises:
        ValueError: the source does not exist, or the hub does not answer.
    """
    files = table.files(options)
    places = [str(path.resolve()) for path in files.values()]
    if revisions is None:
        revisions = table.revisions(options)
    tokenizer = tokens.file_hash(options.tokenizer)
    parts = [
        format,
        stored_options(options),
        places,
        stamp_of(files),
        revisions,
        tokenizer,
    ]
    return f"{options.source}-{json_sha256(parts)[:20]}"


def open_cached(
    options: config.Data, pack: Pack, *, repair: bool = False, format: int = FORMAT
) -> tuple[dict[str, Any], dict[str, PackedArray]]:
    """Return the manifest and the arrays of a corpus; pack it if the cache lacks it.

    If the process is killed, the cache has the whole corpus or none of it.

    Args:
        repair: pack a damaged corpus again.
        format: the format of the corpus.
    Raises:
        ValueError: the source or the cache cannot be read, or the cache cannot be
            written.
    """
    place = root(options) / folder_name(options, format=format)
    check_writable(place.parent, f"data.cache {str(place.parent)!r}")
    if not (place / MANIFEST).exists():
        with locked(place):
            if not (place / MANIFEST).exists():  # no other process has packed it
                _pack_into_cache(options, place, pack, format)
    try:
        manifest = read_manifest(place)
        return manifest, open_arrays(place, manifest)
    except ValueError:
        if not repair:
            raise
    with locked(place):
        _pack_into_cache(options, place, pack, format)
    manifest = read_manifest(place)
    return manifest, open_arrays(place, manifest)


def open_arrays(place: Path, manifest: dict[str, Any]) -> dict[str, PackedArray]:
    """The arrays of a corpus by name.

    Raises:
        ValueError: a file is missing or not as the manifest describes it.
    """
    files = manifest.get("files", {}).items()
    return {
        Path(name).stem: PackedArray(place / name, **facts) for name, facts in files
    }


@contextlib.contextmanager
def locked(place: Path) -> Iterator[None]:
    """Hold the lock of a corpus. If another process holds it, say so and wait."""
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


def _remove_unfinished(folder: Path) -> None:
    """Remove unfinished folders of killed processes, but none that is being written."""
    for rest in folder.glob(f"{UNFINISHED}*"):
        place = folder / rest.name.removeprefix(UNFINISHED)
        with contextlib.suppress(filelock.Timeout, OSError):
            with _lock(place).acquire(blocking=False):
                shutil.rmtree(rest)


def _pack_into_cache(
    options: config.Data, place: Path, pack: Pack, format: int
) -> None:
    """Pack a corpus into a temporary folder, then rename the folder to its place."""
    files = table.files(options)
    stamp, unfinished = stamp_of(files), place.with_name(f"{UNFINISHED}{place.name}")
    _remove_unfinished(place.parent)
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed process
    unfinished.mkdir()
    try:
        facts = pack(options, unfinished, format)
        written = {path.name: file_facts(path) for path in sorted(unfinished.iterdir())}
        # If files changed meanwhile, it is unknown which content was read.
        content = content_of(files) if stamp_of(files) == stamp else ""
        manifest = {
            "name": place.name,
            "options": stored_options(options),
            **facts,
            "origin": {"stamp": stamp, "sha256": content},
            "files": written,
        }
        write_manifest(unfinished, manifest)
        shutil.rmtree(place, ignore_errors=True)  # a damaged corpus
        os.rename(unfinished, place)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def file_facts(path: Path) -> dict[str, Any]:
    """Flush a file to the disk, and return its size and hashes for `PackedArray`."""
    facts: dict[str, Any] = {"size": path.stat().st_size, "sha256": sha256_of(path)}
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if facts["size"] >= SAMPLED_FROM:
            facts["sample"] = sample_hash(file, facts["size"])
    return facts
