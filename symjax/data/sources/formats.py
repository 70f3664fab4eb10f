"""Formats of data files by their names, and folders that mix them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from symjax.data.sources.left_out import LeftOut

FORMATS = {
    ".parquet": "parquet",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".arrow": "arrow",
    ".txt": "text",
}
# Endings of compressed files, and the name of each compression in fsspec.
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
ZSTANDARD = "compressed by zstd, which needs: pip install zstandard"
ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar")
DATA_CARD = "README.md"  # may say which files belong to which subset
# Names, without their endings, of files that describe a data set and have no rows.
WITHOUT_ROWS = "config", "dataset_info", "dataset_infos", "dataset_dict", "metadata"
# Files that many data sets have. They are not counted among the files left out.
DESCRIPTIONS = frozenset(
    f"{name}.json" for name in ("dataset_info", "dataset_infos", "dataset_dict")
)
STATE = "state.json"  # Dataset.save_to_disk writes it beside its arrow files
UNKNOWN_FORMAT, OTHER_FORMAT = "files of no known format", "files of another format"
# The words in names of files by which `datasets` recognises held-out splits.
_WORDS = "validation|valid|val|dev|testing|test|evaluation|eval"
_HELD_OUT = re.compile(rf"(?<![^-._ 0-9/])({_WORDS})(?![^-._ 0-9/])")


class UnusableData(ValueError):
    """Data that cannot be used: an error of symjax, not of a library that it calls."""


def table_format(name: str) -> str:
    """Return the kind of a file that is no plain text, judged by its name; else "".

    A kind is a format such as "parquet", "an archive", or "compressed" if the name does
    not tell the format inside.
    """
    path = Path(name)
    inside = path.with_suffix("") if compression(path) else path
    if inside.suffix.lower() in ARCHIVES:
        return "an archive"
    if inside != path and not inside.suffix:
        return "compressed"
    found = _format(path)
    return "" if found == "text" else found


def compression(path: Path) -> str:
    """Return the name of a file's compression in fsspec, by its ending; else ""."""
    return COMPRESSIONS.get(path.suffix.lower(), "")


def _format(path: Path) -> str:
    """Return the format by a file's endings, in upper or lower case; "" if unknown."""
    plain = path
    if path.suffix.lower() in (*COMPRESSIONS, ".zip"):
        plain = path.with_suffix("")
    return FORMATS.get(plain.suffix.lower(), "")


def data_files(folder: str) -> dict[Path, str]:
    """Return the files of known formats in a folder, with the format of each.

    Hidden files are left out. The result is empty if a data card says which files to
    read, because `datasets` then follows the card.
    """
    found = {}
    if has_card(folder):
        return {}
    for path in Path(folder).rglob("*"):
        parts = path.relative_to(folder).parts
        hidden = any(part.startswith((".", "__")) for part in parts)
        if hidden or path.stem in WITHOUT_ROWS or not path.is_file():
            continue
        if path.name == STATE and any(path.parent.glob("*.arrow")):
            continue
        if kind := _format(path):
            found[path] = kind
    return found


def has_card(folder: str) -> bool:
    """Return whether a folder has a data card that says which files to read.

    Raises:
        UnusableData: its README.md is damaged.
    """
    from huggingface_hub import DatasetCard

    card = Path(folder, DATA_CARD)
    if not card.is_file():
        return False
    try:
        return bool(DatasetCard.load(card).data.get("configs"))
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UnusableData(f"{str(card)!r} cannot be read: {said}") from None


def in_capitals(files: Iterable[Path]) -> bool:
    """Return whether an ending has upper-case letters; `datasets` skips such files."""
    return any(x != x.lower() for path in files for x in path.suffixes[-2:])


def add_unread(folder: str, read: Iterable[str], left_out: LeftOut) -> None:
    """Count the entries of a folder that are not read, and empty files.

    Args:
        read: the paths of the files that are read.
    """
    found = {Path(path).resolve() for path in read}
    above = {folder for path in found for folder in path.parents}
    other = "files that README.md does not choose" if has_card(folder) else ""
    for place, folders, names in os.walk(folder, onerror=left_out.add_unreadable):
        inside = Path(place).relative_to(folder)
        descended = []
        for name in sorted(folders):
            path = Path(place, name)
            if path.resolve() in above:
                descended.append(name)
            elif name.startswith((".", "__")):
                left_out.add("hidden folders", repr(str(inside / name)))
            elif path.is_symlink():
                left_out.add("links to folders", repr(str(inside / name)))
            else:
                descended.append(name)
        folders[:] = descended
        if not folders and not names and place != folder:
            left_out.add("folders without files", repr(str(inside)))
        for name in sorted(names):
            path = Path(place, name)
            if path.resolve() in found:
                if not path.stat().st_size:
                    left_out.add("empty files", repr(str(inside / name)))
            elif name not in (DATA_CARD, STATE, *DESCRIPTIONS):
                known = _format(path) and path.stem not in WITHOUT_ROWS
                kind = (
                    _unreadable_kind(path)
                    or other
                    or (OTHER_FORMAT if known else UNKNOWN_FORMAT)
                )
                left_out.add(kind, repr(str(inside / name)))


def _unreadable_kind(path: Path) -> str:
    """Return the kind of a file without rows, by its name or size; "" for others."""
    if path.name.startswith("."):
        return "hidden files"
    if not path.is_file():
        return "entries that are no files"
    return "" if path.stat().st_size else "empty files"


def check_one_format(folder: str, files: dict[Path, str]) -> None:
    """Check that all files of a folder have the same format.

    `datasets` would read only the files of the commonest format.

    Args:
        files: the `data_files` of the folder.
    Raises:
        UnusableData: there are several formats; the message has the number of files of
            each.
    """
    counts = Counter(files.values())
    if len(counts) > 1:
        several = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        raise UnusableData(
            f"data.name {folder!r} has files of several formats ({several}), of which "
            "only one would be read: put each format into a folder of its own"
        )


def check_splits_recognised(
    folder: str, files: Iterable[Path], splits: Iterable[str]
) -> None:
    """Check that no held-out files of a folder would be trained on.

    `datasets` does not recognise the names of splits in capitals, such as TEST.JSONL.

    Args:
        files: the `data_files` of the folder.
        splits: the splits that `datasets` found.
    Raises:
        UnusableData: some files, but not all, have the name of a held-out split.
    """
    if [str(split) for split in splits] != ["train"]:
        return
    names = sorted(path.relative_to(folder).as_posix() for path in files)
    unseen = [name for name in names if _HELD_OUT.search(name.lower())]
    if 0 < len(unseen) < len(names):
        raise UnusableData(
            f"data.name {folder!r}: {unseen[0]!r} would be trained on, since names of "
            "splits in capitals are ignored: rename it"
        )


def check_all_read(folder: str, files: Iterable[Path], read: Iterable[str]) -> None:
    """Check that a loader reads all data files of a folder, or none.

    `datasets` reads the files that are named after splits and skips the others.

    Args:
        files: the `data_files` of the folder.
        read: the paths that the loader reads. If none of `files` is among them (for
            example, if the loader reads only images), the folder passes.
    Raises:
        UnusableData: it reads only some; the message has the first that is not read.
    """
    found, files = {Path(path).resolve() for path in read}, sorted(files)
    left = [path for path in files if path.resolve() not in found]
    if 0 < len(left) < len(files):
        raise UnusableData(
            f"data.name {folder!r}: {len(left)} of {len(files)} files would not be "
            f"read, such as {str(left[0].relative_to(folder))!r}, beside files named "
            "after splits (train, test, …): name all of them so, or none"
        )
