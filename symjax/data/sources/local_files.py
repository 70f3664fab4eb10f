"""Text from files of this machine: the standard library of Python, and `data.path`."""

from __future__ import annotations

import glob
import itertools
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from symjax.data.progress import bar
from symjax.data.sources import splits
from symjax.data.sources.formats import table_format
from symjax.data.sources.left_out import LeftOut
from symjax.data.sources.texts import Document, Texts, read_pieces

# Folders of tests and generated tables, and folders that a distribution may lack.
EXCLUDED = frozenset(
    "site-packages dist-packages test tests idle_test __pycache__ idlelib lib2to3 "
    "turtledemo tkinter distutils encodings pydoc_data ensurepip".split()
)

PACKAGES, LEAST_FILES = 8, 5  # number of packages (labels); fewest files of a package


def stdlib() -> Texts:
    """The source code of this machine's Python standard library, without its tests.

    It has about 390 files and 7.8 MB on Python 3.11 and 3.12; the text differs between
    versions. The sha256 of a file's path in the library tells whether the file is held
    out, so a file is in the same split for every version of Python.

    Raises:
        ValueError: this Python has no source files, or one cannot be read.
    """
    paths = library_files()
    documents, scanned = _scanned(list(paths.values()), "data.source=stdlib")
    keys = [splits.hash_number(splits.sha256(name)) for name in paths]
    sizes = np.array([characters for _, characters in scanned])
    held = splits.held_out(np.array(keys, np.uint64), sizes)
    return Texts(documents, held, int(sizes.sum()))


def _scanned(
    paths: list[Path], key: str
) -> tuple[Callable[[], Iterator[Document]], list[tuple[int, int]]]:
    """Read all files once.

    Args:
        key: the configuration key that names the files, for messages.
    Returns:
        a function that reads them again, and the `hash_and_size` of each.
    """

    def documents() -> Iterator[Document]:
        return (read_pieces(path, key) for path in paths)

    scanned = []
    with bar(sum(path.stat().st_size for path in paths), "reading") as progress:
        for path, document in zip(paths, documents(), strict=True):
            scanned.append(splits.hash_and_size(document))
            progress.update(path.stat().st_size)
    return documents, scanned


def packages() -> dict[str, dict[str, Path]]:
    """The files of the 8 largest packages of the standard library, by package.

    Only packages with 5 files or more count. On Python 3.11 and 3.12 these are asyncio,
    email, http, importlib, multiprocessing, unittest, urllib and xml. Empty files are
    left out.
    """
    found: dict[str, dict[str, Path]] = {}
    for name, path in library_files().items():
        if "/" in name and path.stat().st_size:
            found.setdefault(name.partition("/")[0], {})[name] = path

    def size(package: str) -> int:
        return sum(path.stat().st_size for path in found[package].values())

    several = [name for name in found if len(found[name]) >= LEAST_FILES]
    largest = sorted(several, key=size, reverse=True)[:PACKAGES]
    return {name: found[name] for name in sorted(largest)}


def library_files() -> dict[str, Path]:
    """The files of the standard library by their path in it, in order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths: dict[str, Path] = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if name not in EXCLUDED and not name.startswith("config-")
        ]
        for name in names:
            path = Path(folder, name)
            kept = name.endswith(".py") and not name.startswith("_sysconfigdata")
            if kept and path.is_file():
                paths[path.relative_to(root).as_posix()] = path
    if len(paths) < 2:
        raise ValueError(
            f"data.source=stdlib: no Python source files in {root}: "
            "set data.source=text and data.path"
        )
    return dict(sorted(paths.items()))


def text_files(path: str | Path) -> Texts:
    """Load local UTF-8 files; only a byte order mark is removed from the text.

    The last tenth of a single file is held out. Of several files, whole files are held
    out by the sha256 of their content, so copies of a file are in the same split. Empty
    files in a folder or among the matches of a glob are left out. For each kind of
    entries that are left out, a line is printed.

    Args:
        path: a file, a folder (all files in it and below, except hidden ones), a glob
            (`**` descends), or several of these joined by commas.
    Raises:
        ValueError: nothing is found, a file is empty, cannot be read or is not UTF-8, a
            folder holds files that are no plain text, or all files are copies of one.
    """
    left_out, where = LeftOut(), f"data.path {str(path)!r}"
    found = _files(str(path), left_out)
    for name, (file, named) in found.items():
        if named and not file.stat().st_size:
            raise ValueError(f"data.path {name!r} is an empty file")
    paths = {name: file for name, (file, _) in found.items() if file.stat().st_size}
    documents, scanned = _scanned(list(paths.values()), "data.path")
    # A file may hold only a byte order mark, and a compressed file may hold nothing.
    full = [characters > 0 for _, characters in scanned]
    kept = set(itertools.compress(paths, full))
    for name, (_, named) in found.items():
        if name not in kept and named:
            raise ValueError(f"data.path {name!r} holds no text")
        if name not in kept:
            left_out.add("empty files", repr(name))
    if not kept:
        raise ValueError(f"{where} matches only empty files")
    left_out.say(where)

    def texts() -> Iterator[Document]:
        return itertools.compress(documents(), full)

    scanned = list(itertools.compress(scanned, full))
    return splits.held_out_by_content(texts, scanned, where, "files")


def matched_files(path: str) -> dict[str, Path]:
    """Return the files that `data.path` names or matches, by name."""
    return {name: file for name, (file, _) in _files(path, LeftOut()).items()}


def _files(path: str, left_out: LeftOut) -> dict[str, tuple[Path, bool]]:
    """Find the files of `data.path`, each once.

    Args:
        left_out: counts entries of folders, and matches of globs, that are no files.
    Returns:
        by name, the resolved path, and True if the path names the file itself, False
        if a folder or glob matches it.
    """
    files: dict[str, tuple[Path, bool]] = {}
    seen = set()
    whole = os.path.exists(path)
    pieces = [path] if whole else [piece.strip() for piece in path.split(",")]
    for piece in map(os.path.expanduser, pieces):
        if not piece:
            raise ValueError(
                f"data.path {path!r} has an empty entry: "
                "give a file, a glob, or several joined by commas"
            )
        named = os.path.exists(piece) or not glob.has_magic(piece)
        found = [piece] if named else sorted(glob.glob(piece, recursive=True))
        if os.path.isdir(piece):
            named, found = False, _texts_below(piece, left_out)
        elif named and not os.path.exists(piece):
            raise ValueError(f"data.path {piece!r} does not exist")
        elif named and not os.path.isfile(piece):
            raise ValueError(f"data.path {piece!r} is not a regular file")
        if not any(map(os.path.isfile, found)):
            raise ValueError(f"data.path {piece!r} matches no file")
        for name in found:
            if not os.path.isfile(name):
                kind = "folders" if os.path.isdir(name) else "entries that are no files"
                left_out.add(kind, repr(name))
                continue
            resolved = Path(name).resolve()
            if resolved not in seen:
                seen.add(resolved)
                files[name] = resolved, named
    return files


def _texts_below(folder: str, left_out: LeftOut) -> list[str]:
    """Return all files in a folder and below, in order, except hidden files.

    Hidden entries and links to folders are left out and counted.

    Raises:
        ValueError: the name of a file has an ending of a format that is no plain text.
    """
    found = []
    for place, folders, names in os.walk(folder, onerror=left_out.add_unreadable):
        descended = []
        for name in sorted(folders):
            path = os.path.join(place, name)
            if name.startswith("."):
                left_out.add("hidden folders", repr(path))
            elif os.path.islink(path):
                left_out.add("links to folders", repr(path))
            else:
                descended.append(name)
        folders[:] = descended
        for name in sorted(names):
            path = os.path.join(place, name)
            if name.startswith("."):
                left_out.add("hidden files", repr(path))
                continue
            if kind := table_format(path):
                raise ValueError(
                    f"data.path {folder!r} has {path!r}, which is {kind} and no plain "
                    "text: data.source=hub with data.name reads it, or give a glob "
                    f"such as {os.path.join(folder, '*.txt')!r}"
                )
            found.append(path)
    return found
