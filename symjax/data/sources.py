"""Where text comes from: one function a source, each returning a `DatasetDict`.

Every source has the splits "train" and "heldout", one row a document, column "text".
The text is exact: no newline is translated, nothing is stripped. Data sets stay in
memory, so nothing is written to the Hugging Face cache and nothing is downloaded.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from symjax import config

if TYPE_CHECKING:
    from datasets import DatasetDict

FILE_SHARE = 1 / 20  # of the files, by hash; 3.5 % of the bytes of Python 3.11
LARGEST_SHARE = 1 / 4  # the hash of a few files may hold out more

# Tests, generated tables, and what a distribution may leave out.
EXCLUDED = frozenset(
    "site-packages dist-packages test tests idle_test __pycache__ idlelib lib2to3 "
    "turtledemo tkinter distutils encodings pydoc_data ensurepip".split()
)


def load(options: config.Data) -> DatasetDict:
    """The documents of a configured source.

    Raises:
        ValueError: the source is unknown, or cannot give text for these options.
    """
    if options.source == "text":
        return text(options.path)
    if options.source != "stdlib":
        raise ValueError(
            f"data.source {options.source!r} is unknown: choose from stdlib, text"
        )
    if options.path:
        raise ValueError(
            f"data.path {options.path!r} is read by data.source=text only: "
            "set data.source=text, or leave data.path empty"
        )
    return stdlib()


def stdlib() -> DatasetDict:
    """The source of this machine's Python standard library, without its tests.

    About 390 files and 7.8 MB on Python 3.11 and 3.12; the bytes differ between
    versions. A file is held out by the sha256 of its path below the library, so it is
    on the same side for every version of Python.

    Raises:
        ValueError: this Python has no source files, or one cannot be read.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths: dict[str, Path] = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if name not in EXCLUDED and not name.startswith("config-")
        ]
        for name in files:
            path = Path(folder, name)
            kept = name.endswith(".py") and not name.startswith("_sysconfigdata")
            if kept and path.is_file():
                paths[path.relative_to(root).as_posix()] = path
    if len(paths) < 2:
        raise ValueError(
            f"data.source=stdlib: no Python source files in {root}: "
            "set data.source=text and data.path"
        )
    names = sorted(paths)
    texts = [_read(paths[name], "data.source=stdlib") for name in names]
    return _by_file(texts, keys=[_sha256(name) for name in names])


def text(path: str | Path) -> DatasetDict:
    """Local UTF-8 files, exactly as they are.

    A single file holds out its last tenth, cut between two characters. Of several
    files, whole ones are held out by the sha256 of their content, so two copies of a
    file are on the same side. Empty files that match a glob are left out.

    Args:
        path: a file, a glob (`**` descends), or several of both joined by commas.
    Raises:
        ValueError: nothing is found, a file is empty, is a directory, cannot be read or
            is not UTF-8, or all files are copies of one.
    """
    files = _files(str(path))
    texts = {name: _read(file, "data.path") for name, (file, _) in files.items()}
    for name, (_, named) in files.items():
        if named and not texts[name]:
            raise ValueError(f"data.path {name!r} is an empty file")
    texts = {name: content for name, content in texts.items() if content}
    if not texts:
        raise ValueError(f"data.path {str(path)!r} matches only empty files")
    if len(texts) == 1:
        [content] = texts.values()
        cut = len(content) * 9 // 10
        return _dataset(train=[content[:cut]], heldout=[content[cut:]])
    keys = [_sha256(content) for content in texts.values()]
    if len(set(keys)) == 1:
        raise ValueError(
            f"data.path {str(path)!r}: its {len(texts)} files are copies of one, "
            "so none can be held out: name one of them"
        )
    return _by_file(list(texts.values()), keys)


def _files(path: str) -> dict[str, tuple[Path, bool]]:
    """Each file once, by name: where it is, and whether it was named or matched."""
    files: dict[str, tuple[Path, bool]] = {}
    met = set()
    whole = os.path.isfile(path)
    pieces = [path] if whole else [piece.strip() for piece in path.split(",")]
    for piece in map(os.path.expanduser, pieces):
        if not piece:
            raise ValueError(
                f"data.path {path!r} has an empty entry: "
                "give a file, a glob, or several joined by commas"
            )
        named = os.path.exists(piece) or not glob.has_magic(piece)
        found = [piece] if named else sorted(glob.glob(piece, recursive=True))
        if named:
            _check_regular(piece)
        found = [name for name in found if os.path.isfile(name)]
        if not found:
            raise ValueError(f"data.path {piece!r} matches no file")
        for name in found:
            resolved = Path(name).resolve()
            if resolved not in met:
                met.add(resolved)
                files[name] = resolved, named
    return files


def _check_regular(name: str) -> None:
    if not os.path.exists(name):
        raise ValueError(f"data.path {name!r} does not exist")
    if os.path.isdir(name):
        raise ValueError(
            f"data.path {name!r} is a directory: give a file or a glob such as "
            f"{os.path.join(name, '*.txt')!r}"
        )
    if not os.path.isfile(name):
        raise ValueError(f"data.path {name!r} is not a regular file")


def _read(path: Path, key: str) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{key}: {str(path)!r} is not UTF-8 (byte 0x{error.object[error.start]:02x}"
            f" at offset {error.start}): convert it first"
        ) from None
    except OSError as error:
        raise ValueError(
            f"{key}: {str(path)!r} cannot be read ({error.strerror})"
        ) from None


def _sha256(content: str) -> str:
    return hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()


def _by_file(texts: list[str], keys: list[str]) -> DatasetDict:
    """Whole documents held out by the hash that is their key; both splits non-empty.

    Where the hash holds out nothing, or more than a quarter of the text (which happens
    with few files), the documents whose share is closest to a tenth are held out.
    """
    sizes = dict.fromkeys(sorted(keys), 0)
    for key, content in zip(keys, texts, strict=True):
        sizes[key] += len(content)
    total = sum(sizes.values())
    held = {key for key in sizes if int(key[:8], 16) < FILE_SHARE * 2**32}
    if not 0 < sum(sizes[key] for key in held) <= total * LARGEST_SHARE:
        held = {min(sizes, key=lambda key: abs(sizes[key] - total / 10))}
    documents = list(zip(keys, texts, strict=True))
    return _dataset(
        train=[content for key, content in documents if key not in held],
        heldout=[content for key, content in documents if key in held],
    )


def _dataset(**splits: list[str]) -> DatasetDict:
    import datasets  # six times numpy's import: only where a corpus is built

    features = datasets.Features({"text": datasets.Value("large_string")})
    return datasets.DatasetDict(
        {
            split: datasets.Dataset.from_dict({"text": texts}, features=features)
            for split, texts in splits.items()
        }
    )
