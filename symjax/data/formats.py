"""Formats of data files by their names, and folders that mix them."""

from __future__ import annotations

import os
from pathlib import Path

FORMATS = {
    ".parquet": "parquet",
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".arrow": "arrow",
    ".txt": "text",
}
PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
CARD = "README.md"  # may say which files are which subset


class MixedFormats(ValueError):
    """A folder has files of several formats, of which a loader would read one."""


def table_format(name: str) -> str:
    """What a file is that is no plain text: "parquet", "compressed"; else ""."""
    suffix = Path(name).suffix.lower()
    found = FORMATS.get(suffix, "compressed" if suffix in PACKED else "")
    return "" if found == "text" else found


def check_one_format(folder: str) -> None:
    """Refuse a folder of which only the files of the commonest format would be read.

    A folder with a data card is read as its card says.

    Raises:
        MixedFormats: naming the formats and how many files each has.
    """
    if os.path.exists(os.path.join(folder, CARD)):
        return
    counts: dict[str, int] = {}
    for path in Path(folder).rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or path.stem == "metadata" or not path.is_file():
            continue
        plain = path.with_suffix("") if path.suffix.lower() in PACKED else path
        if kind := FORMATS.get(plain.suffix.lower()):
            counts[kind] = counts.get(kind, 0) + 1
    if len(counts) > 1:
        files = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        raise MixedFormats(
            f"data.name {folder!r} has files of several formats ({files}), of which "
            "one would be read: put each format into a folder of its own"
        )
