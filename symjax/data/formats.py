"""Formats of data files by their names, and folders that mix them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
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


class Refused(ValueError):
    """Raised here, and told apart from the ValueErrors of the libraries."""


def table_format(name: str) -> str:
    """What a file is that is no plain text: "parquet", "compressed"; else ""."""
    suffix = Path(name).suffix.lower()
    found = FORMATS.get(suffix, "compressed" if suffix in PACKED else "")
    return "" if found == "text" else found


def check_one_format(folder: str) -> None:
    """Refuse a folder of which only the files of the commonest format would be read.

    A folder whose data card says which files to read is read as it says.

    Raises:
        Refused: naming the formats and how many files each has.
    """
    if _has_choice(folder):
        return
    counts = Counter(kind for _, kind in _data_files(folder))
    if len(counts) > 1:
        files = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        raise Refused(
            f"data.name {folder!r} has files of several formats ({files}), of which "
            "one would be read: put each format into a folder of its own"
        )


def check_all_read(folder: str, read: Iterable[str]) -> None:
    """Refuse a folder of which only the files named after splits would be read.

    Args:
        read: the paths that a loader has found.
    Raises:
        Refused: naming the first file that it has not found.
    """
    if _has_choice(folder):
        return
    found = {Path(path).resolve() for path in read}
    files = sorted(path for path, _ in _data_files(folder))
    left = [path for path in files if path.resolve() not in found]
    if left:
        raise Refused(
            f"data.name {folder!r}: {len(left)} of {len(files)} files would not be "
            f"read, such as {str(left[0].relative_to(folder))!r}, beside files named "
            "after splits (train, test, …): name all of them so, or none"
        )


def _data_files(folder: str) -> Iterator[tuple[Path, str]]:
    """The files of known formats, and the format of each; no hidden ones."""
    for path in Path(folder).rglob("*"):
        parts = path.relative_to(folder).parts
        hidden = any(part.startswith((".", "__")) for part in parts)
        if hidden or path.stem in ABOUT or not path.is_file():
            continue
        plain = path.with_suffix("") if path.suffix.lower() in PACKED else path
        if kind := FORMATS.get(plain.suffix.lower()):
            yield path, kind


def _has_choice(folder: str) -> bool:
    """Whether a folder has a data card with subsets or the files of splits."""
    from huggingface_hub import DatasetCard

    card = Path(folder, CARD)
    return card.is_file() and bool(DatasetCard.load(card).data.get("configs"))
