"""The packed data of a run: a manifest in its folder `data`, and arrays in the cache.

If the arrays are no longer in the cache, they are packed again from the source, and
must have the hashes of the manifest. Older versions had no cache: their runs have the
arrays beside the manifest, and do not need the source.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from symjax import config
from symjax.data.boundaries import FORMAT
from symjax.data.sources import table
from symjax.data.sources.mixture import ENTRY_KEYS, config_key
from symjax.data.store.cache import Pack, open_arrays, open_cached, root
from symjax.data.store.manifest import (
    MANIFEST,
    check_options,
    content_of,
    format_of,
    read_manifest,
    stamp_of,
    write_manifest,
)
from symjax.data.store.packed import PackedArray

SPLITS = ("train", "heldout")


def open_folder(
    options: config.Data,
    directory: Path,
    pack: Pack,
    *,
    replace: bool = False,
    format: int = FORMAT,
) -> tuple[dict[str, Any], dict[str, PackedArray]]:
    """Return the manifest of a run, and its arrays by name; pack them if necessary.

    Args:
        directory: the folder "data" of the run.
        pack: packs a corpus that is not in the cache.
        replace: whether a manifest with other options, and damaged files, may be
            replaced. Callers allow this only while nothing has been trained on them.
        format: the format to pack if there is no manifest.
    Raises:
        ValueError: the source cannot be read, the manifest has other options, a file
            is damaged, or the arrays are gone and their source has changed.
    """
    if (directory / MANIFEST).exists():
        try:
            return _read_folder(options, directory, pack)
        except ValueError:
            if not replace:
                raise
    manifest, arrays = open_cached(options, pack, repair=replace, format=format)
    write_manifest(directory, manifest)
    return manifest, arrays


def arrays_in(options: config.Data, directory: Path) -> Path:
    """The folder of the arrays of a run; they may be gone."""
    name = read_manifest(directory).get("name")
    return root(options) / name if name else directory


def verify(options: config.Data, directory: Path) -> None:
    """Read all arrays of a run and compare them with their hashes.

    Nothing happens if the run has no arrays.

    Raises:
        ValueError: a file or the manifest is damaged.
    """
    if not (directory / MANIFEST).exists():
        return
    place = arrays_in(options, directory)
    if (place / MANIFEST).exists():
        for file in open_arrays(place, read_manifest(directory)).values():
            file.verify()


def source_change(options: config.Data, directory: Path) -> str:
    """Return a line if the source has changed since it was packed; else ""."""
    if not _changed(options, read_manifest(directory)):
        return ""
    return (
        f"{source_name(options)} has changed since it was packed: the run continues "
        f"with the text in {arrays_in(options, directory)}; a run in a new --workdir "
        "packs the new text"
    )


def _read_folder(
    options: config.Data, directory: Path, pack: Pack
) -> tuple[dict[str, Any], dict[str, PackedArray]]:
    """Open the arrays of a manifest that exists; pack them again if they are gone."""
    manifest = read_manifest(directory)
    check_options(manifest["options"], options, directory)
    place = arrays_in(options, directory)
    if (place / MANIFEST).exists():
        return manifest, open_arrays(place, manifest)
    gone = f"{place}, which this run has been packed into, is gone"
    changed = (
        f"{gone}, and {source_name(options)} has changed since: use another --workdir"
    )
    if _changed(options, manifest):
        raise ValueError(changed)
    try:
        again, arrays = open_cached(
            options, pack, format=format_of(manifest["fingerprint"])
        )
    except ValueError as error:
        raise ValueError(f"{gone}, and cannot be packed again: {error}") from None
    if again["files"] != manifest["files"]:
        raise ValueError(changed)
    return manifest, arrays


def _changed(options: config.Data, manifest: dict[str, Any]) -> bool:
    """Return whether the source's files exist and differ from those that were packed.

    Contents are compared by sha256, but only if names, sizes or times differ.
    """
    packed = manifest.get("origin")
    try:
        files = table.files(options)
        if not files or packed is None or stamp_of(files) == packed["stamp"]:
            return False
        return content_of(files) != packed["sha256"]
    except (ValueError, OSError):
        return False


def source_name(options: config.Data) -> str:
    """Name of a source in messages: "data.path 'book.txt'"."""
    key = "mixture" if options.mixture else ENTRY_KEYS.get(options.source)
    return (
        f"data.{key} {getattr(options, key)!r}" if key else config_key(options.source)
    )
