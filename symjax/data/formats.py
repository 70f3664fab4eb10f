"""Formats of data files by their names, and folders that mix them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

FORMATS = {
    ".parquet": "parquet",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".arrow": "arrow",
    ".txt": "text",
}
PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
CARD = "README.md"  # may say which files are which subset
ABOUT = "config", "dataset_info", "dataset_infos", "dataset_dict", "metadata"  # no rows


class UnusableData(ValueError):
    """Raised here, and told apart from the ValueErrors of the libraries."""


def table_format(name: str) -> str:
    """What a file is that is no plain text: "parquet", "compressed"; else ""."""
    suffix = Path(name).suffix.lower()
    found = FORMATS.get(suffix, "compressed" if suffix in PACKED else "")
    return "" if found == "text" else found


def data_files(folder: str) -> dict[Path, str]:
    """The files of known formats, and the format of each; no hidden ones.

    None of a folder whose data card says which files to read: it is read as it says.
    """
    from huggingface_hub import DatasetCard

    card, found = Path(folder, CARD), {}
    if card.is_file() and DatasetCard.load(card).data.get("configs"):
        return {}
    for path in Path(folder).rglob("*"):
        parts = path.relative_to(folder).parts
        hidden = any(part.startswith((".", "__")) for part in parts)
        if hidden or path.stem in ABOUT or not path.is_file():
            continue
        plain = path.with_suffix("") if path.suffix.lower() in PACKED else path
        if kind := FORMATS.get(plain.suffix.lower()):
            found[path] = kind
    return found


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


def check_all_read(folder: str, files: Iterable[Path], read: Iterable[str]) -> None:
    """Refuse a folder of which only the files named after splits would be read.

    Args:
        files: its `data_files`.
        read: the paths that a loader has found.
    Raises:
        UnusableData: naming the first file that it has not found.
    """
    found, files = {Path(path).resolve() for path in read}, sorted(files)
    left = [path for path in files if path.resolve() not in found]
    if left:
        raise UnusableData(
            f"data.name {folder!r}: {len(left)} of {len(files)} files would not be "
            f"read, such as {str(left[0].relative_to(folder))!r}, beside files named "
            "after splits (train, test, …): name all of them so, or none"
        )
