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
# Endings of compressed files, and what fsspec calls each.
PACKED = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
ZSTANDARD = "compressed by zstd, which needs: pip install zstandard"
ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar")
CARD = "README.md"  # may say which files are which subset
ABOUT = "config", "dataset_info", "dataset_infos", "dataset_dict", "metadata"  # no rows
# Of these, the files that are about every data set; that they are not read is no news.
DESCRIPTIONS = frozenset(
    f"{name}.json" for name in ("dataset_info", "dataset_infos", "dataset_dict")
)
STATE = "state.json"  # what Dataset.save_to_disk writes beside its arrow files
OTHER, ANOTHER = "files of no known format", "files of another format"
# Held-out splits by the words that `datasets` looks for in the names of files.
_WORDS = "validation|valid|val|dev|testing|test|evaluation|eval"
_HELD_OUT = re.compile(rf"(?<![^-._ 0-9/])({_WORDS})(?![^-._ 0-9/])")


class UnusableData(ValueError):
    """Raised here, and told apart from the ValueErrors of the libraries."""


def table_format(name: str) -> str:
    """Return what a file is that is no plain text by its name: "parquet", "an archive",
    "compressed" where nothing says what is inside; else ""."""
    path = Path(name)
    inside = path.with_suffix("") if compression(path) else path
    if inside.suffix.lower() in ARCHIVES:
        return "an archive"
    if inside != path and not inside.suffix:
        return "compressed"
    found = _format(path)
    return "" if found == "text" else found


def compression(path: Path) -> str:
    """Return what fsspec calls the compression of a file, by its ending; else ""."""
    return PACKED.get(path.suffix.lower(), "")


def _format(path: Path) -> str:
    """The format of a file by its endings, in capitals too; "" if it is unknown."""
    plain = path
    if path.suffix.lower() in (*PACKED, ".zip"):
        plain = path.with_suffix("")
    return FORMATS.get(plain.suffix.lower(), "")


def data_files(folder: str) -> dict[Path, str]:
    """The files of known formats, and the format of each; no hidden ones.

    None of a folder whose data card says which files to read: it is read as it says.
    """
    found = {}
    if has_card(folder):
        return {}
    for path in Path(folder).rglob("*"):
        parts = path.relative_to(folder).parts
        hidden = any(part.startswith((".", "__")) for part in parts)
        if hidden or path.stem in ABOUT or not path.is_file():
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

    card = Path(folder, CARD)
    if not card.is_file():
        return False
    try:
        return bool(DatasetCard.load(card).data.get("configs"))
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UnusableData(f"{str(card)!r} cannot be read: {said}") from None


def in_capitals(files: Iterable[Path]) -> bool:
    """Return whether an ending has capitals, which `datasets` does not know."""
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
            elif name not in (CARD, STATE, *DESCRIPTIONS):
                known = _format(path) and path.stem not in ABOUT
                kind = _why(path) or other or (ANOTHER if known else OTHER)
                left_out.add(kind, repr(str(inside / name)))


def _why(path: Path) -> str:
    """The kind of a file that no data set has rows in; "" for others."""
    if path.name.startswith("."):
        return "hidden files"
    if not path.is_file():
        return "entries that are no files"
    return "" if path.stat().st_size else "empty files"


def check_one_format(folder: str, files: dict[Path, str]) -> None:
    """Refuse a folder of which only the files of the commonest format would be read.

    Raises:
        UnusableData: naming the formats and how many of its `data_files` each has.
    """
    counts = Counter(files.values())
    if len(counts) > 1:
        several = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        raise UnusableData(
            f"data.name {folder!r} has files of several formats ({several}), of which "
            "one would be read: put each format into a folder of its own"
        )


def check_splits_seen(
    folder: str, files: Iterable[Path], splits: Iterable[str]
) -> None:
    """Refuse a folder whose held-out files would be trained on, for their capitals.

    Args:
        files: its `data_files`.
        splits: those that `datasets` has found by names in small letters.
    Raises:
        UnusableData: naming the first file, unless all files are held out.
    """
    if [str(split) for split in splits] != ["train"]:
        return
    names = sorted(path.relative_to(folder).as_posix() for path in files)
    unseen = [name for name in names if _HELD_OUT.search(name.lower())]
    if 0 < len(unseen) < len(names):
        raise UnusableData(
            f"data.name {folder!r}: {unseen[0]!r} would be trained on, since names of "
            "splits in capitals are not known: rename it"
        )


def check_all_read(folder: str, files: Iterable[Path], read: Iterable[str]) -> None:
    """Refuse a folder of which only the files named after splits would be read.

    Args:
        files: its `data_files`.
        read: the paths that a loader has found; if they are others, such as images, the
            folder passes.
    Raises:
        UnusableData: naming the first file that it has not found.
    """
    found, files = {Path(path).resolve() for path in read}, sorted(files)
    left = [path for path in files if path.resolve() not in found]
    if 0 < len(left) < len(files):
        raise UnusableData(
            f"data.name {folder!r}: {len(left)} of {len(files)} files would not be "
            f"read, such as {str(left[0].relative_to(folder))!r}, beside files named "
            "after splits (train, test, …): name all of them so, or none"
        )
