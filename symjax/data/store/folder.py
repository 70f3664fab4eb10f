"""The examples of a run: a manifest in its folder `data`, and the arrays it names.

The arrays are in the cache: see `cache`. If they are gone, they are packed again from
the source, and must be those of the manifest. Runs from before there was a cache have
their arrays beside the manifest, and do not need their source.
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
    """The manifest of a run and its arrays by name, packed where no run has yet.

    Args:
        replace: pack anew where the manifest is of other options, or something is
            damaged, as long as nothing has been trained on it.
        format: what is packed where there is no manifest.
    Raises:
        ValueError: the source cannot be read, the manifest is of other options, a file
            is damaged, or what was packed is gone and its source has changed.
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
    """Where the arrays of a run's manifest are, or were."""
    name = read_manifest(directory).get("name")
    return root(options) / name if name else directory


def verify(options: config.Data, directory: Path) -> None:
    """Compare every byte of a run's arrays, where it has any, with what was written.

    Raises:
        ValueError: a file is damaged, or the manifest.
    """
    if not (directory / MANIFEST).exists():
        return
    place = arrays_in(options, directory)
    if (place / MANIFEST).exists():
        for file in open_arrays(place, read_manifest(directory)).values():
            file.verify()


def source_change(options: config.Data, directory: Path) -> str:
    """One line if the source's files are no longer those that were packed, else ""."""
    if not _changed(options, read_manifest(directory)):
        return ""
    return (
        f"{source_name(options)} has changed since it was packed: the run continues "
        f"with what it has of it in {arrays_in(options, directory)}, a new --workdir "
        "takes the new text"
    )


def _read_folder(
    options: config.Data, directory: Path, pack: Pack
) -> tuple[dict[str, Any], dict[str, PackedArray]]:
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
    """Whether the source's files are there, and others than were packed.

    Names, sizes and times are compared; only where they differ, the content, by sha256.
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
    """What a user would call it: data.path 'book.txt'."""
    key = "mixture" if options.mixture else ENTRY_KEYS.get(options.source)
    return (
        f"data.{key} {getattr(options, key)!r}" if key else config_key(options.source)
    )
