"""Sources of text, each a function that returns `Texts`.

Every source has the splits "train" and "heldout". Files are read exactly: no newline is
translated, nothing is stripped. Only `hub` downloads, into the Hugging Face cache.
"""

from __future__ import annotations

import glob
import itertools
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from symjax import config
from symjax.data import tokens
from symjax.data.progress import bar
from symjax.data.sources import hub, mixture, splits
from symjax.data.sources.formats import table_format
from symjax.data.sources.left_out import LeftOut
from symjax.data.sources.texts import Document, Texts, read_pieces

# The keys that each source reads. Labelled sources are in `classes`, tasks in
# `generated`.
TOKENS = ("tokenizer", "vocabulary")
TEXT = (*TOKENS, "documents", "bos")
STREAM = ("streaming", "tokens")
KEYS = {
    "stdlib": TEXT,
    "text": (*TEXT, "path", "mixture"),
    "hub": (*TEXT, "name", "mixture", "subset", "column", "label", *STREAM),
    "packages": TOKENS,
    "digits": (),
    "mqar": ("items", "symbols"),
    "needle": ("items", "symbols", "asked"),
    "copy": ("items", "symbols"),
    "listops": (),
}

TEXT_SOURCES = tuple(name for name, keys in KEYS.items() if "documents" in keys)

# Tests, generated tables, and what a distribution may leave out.
EXCLUDED = frozenset(
    "site-packages dist-packages test tests idle_test __pycache__ idlelib lib2to3 "
    "turtledemo tkinter distutils encodings pydoc_data ensurepip".split()
)

PACKAGES, LEAST_FILES = 8, 5  # how many are labels; with this many files or more


def load(options: config.Data) -> tuple[Texts, dict[str, Any]]:
    """The documents of a source, and plain values that identify them beside their text.

    Raises:
        ValueError: the source is unknown, or cannot give text for these options.
    """
    check_keys(options)
    if options.source == "hub":
        return hub.load(options)
    return (text(options.path) if options.source == "text" else stdlib()), {}


def files(options: config.Data) -> dict[str, Path]:
    """The files that a source reads on this machine, by name; of the hub itself none.

    Raises:
        ValueError: as `load`, where files are missing.
    """
    check_keys(options)
    if options.mixture:
        parts = [files(part) for _, part in mixture.entries(options)]
        return {f"{n} {x}": y for n, part in enumerate(parts) for x, y in part.items()}
    if options.source == "stdlib":
        return _library()
    if options.source == "packages":
        return {n: path for files in packages().values() for n, path in files.items()}
    if options.source == "text":
        return {
            name: file for name, (file, _) in _files(options.path, LeftOut()).items()
        }
    folder = Path(options.name).expanduser()
    found = sorted(folder.rglob("*")) if options.name else []
    return {str(path.relative_to(folder)): path for path in found if path.is_file()}


def revisions(options: config.Data) -> list[str]:
    """What the data sets that are read from the hub are at, one each; else none.

    Raises:
        ValueError: the hub does not answer, or has no such data set.
    """
    parts = [part for _, part in mixture.entries(options)]
    return [hub.revision(x) for x in parts if x.source == "hub" and not files(x)]


def check_keys(options: config.Data) -> None:
    """Refuse a source that is unknown, and keys that it would not look at.

    Raises:
        ValueError: naming the key, and the sources that read it.
    """
    if options.source not in KEYS:
        raise ValueError(
            f"data.source {options.source!r} is unknown: choose from {', '.join(KEYS)}"
        )
    for key in dict.fromkeys(key for keys in KEYS.values() for key in keys):
        value, unset = getattr(options, key), getattr(config.Data(), key)
        if value != unset and key not in KEYS[options.source]:
            readers = ", ".join(name for name, keys in KEYS.items() if key in keys)
            left = "empty" if unset == "" else unset
            raise ValueError(
                f"data.{key} {value!r} is read by data.source={readers} only: set "
                f"data.source={readers}, or leave data.{key} {left}"
            )
    if options.mixture and options.label:
        raise ValueError(
            f"data.mixture {options.mixture!r} is of text: leave data.label "
            f"{options.label!r} empty"
        )
    if options.streaming != bool(options.tokens):
        raise ValueError(
            f"data.streaming {options.streaming} and data.tokens {options.tokens}: "
            "a stream needs both, or leave both away"
        )
    if options.streaming and (options.mixture or options.label):
        raise ValueError("data.streaming is of one text: no data.mixture or data.label")
    if options.streaming and options.tokenizer == "char":
        raise ValueError(
            "data.tokenizer char needs all characters before the first: data.streaming "
            "has byte, bpe or a tokenizer.json"
        )
    if options.bos == "true" and (options.tokenizer in tokens.KINDS or options.label):
        other = "data.label" if options.label else f"data.tokenizer={options.tokenizer}"
        raise ValueError(
            f"data.bos true is for texts and a tokenizer.json, not for {other}: leave "
            "data.bos auto"
        )
    if options.tokenizer != "bpe" and options.vocabulary != config.Data().vocabulary:
        raise ValueError(
            f"data.vocabulary {options.vocabulary} is learned by data.tokenizer=bpe "
            f"only, got data.tokenizer {options.tokenizer!r}"
        )


def stdlib() -> Texts:
    """The source of this machine's Python standard library, without its tests.

    About 390 files and 7.8 MB on Python 3.11 and 3.12; the bytes differ between
    versions. A file is held out by the sha256 of its path below the library, so it is
    on the same side for every version of Python.

    Raises:
        ValueError: this Python has no source files, or one cannot be read.
    """
    paths = _library()
    documents, scanned = _scanned(list(paths.values()), "data.source=stdlib")
    keys = [splits.number(splits.sha256(name)) for name in paths]
    sizes = np.array([characters for _, characters in scanned])
    held = splits.held_out(np.array(keys, np.uint64), sizes)
    return Texts(documents, held, int(sizes.sum()))


def _scanned(
    paths: list[Path], key: str
) -> tuple[Callable[[], Iterator[Document]], list[tuple[int, int]]]:
    """What reads files, and the hash and the characters of each, by reading all."""

    def documents() -> Iterator[Document]:
        return (read_pieces(path, key) for path in paths)

    scanned = []
    with bar(sum(path.stat().st_size for path in paths), "reading") as shown:
        for path, document in zip(paths, documents(), strict=True):
            scanned.append(splits.scan(document))
            shown.update(path.stat().st_size)
    return documents, scanned


def packages() -> dict[str, dict[str, Path]]:
    """The files of the largest packages of the standard library that have several.

    On Python 3.11 to 3.12 these are asyncio, email, http, importlib, multiprocessing,
    unittest, urllib and xml. Empty files are left out.
    """
    found: dict[str, dict[str, Path]] = {}
    for name, path in _library().items():
        if "/" in name and path.stat().st_size:
            found.setdefault(name.partition("/")[0], {})[name] = path

    def size(package: str) -> int:
        return sum(path.stat().st_size for path in found[package].values())

    several = [name for name in found if len(found[name]) >= LEAST_FILES]
    largest = sorted(several, key=size, reverse=True)[:PACKAGES]
    return {name: found[name] for name in sorted(largest)}


def _library() -> dict[str, Path]:
    """Each file of the standard library by its path below it, in order."""
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


def text(path: str | Path) -> Texts:
    """Local UTF-8 files, exactly as they are.

    A single file holds out its last tenth, cut between two characters. Of several
    files, whole ones are held out by the sha256 of their content, so two copies of a
    file are on the same side. Empty files that match a glob are left out. What is left
    out is named, one line a kind.

    Args:
        path: a file, a folder (all files below it, but hidden ones), a glob (`**`
            descends), or several of these joined by commas.
    Raises:
        ValueError: nothing is found, a file is empty, cannot be read or is not UTF-8, a
            folder holds tables, or all files are copies of one.
    """
    left_out, where = LeftOut(), f"data.path {str(path)!r}"
    found = _files(str(path), left_out)
    for name, (file, named) in found.items():
        if named and not file.stat().st_size:
            raise ValueError(f"data.path {name!r} is an empty file")
    paths = {name: file for name, (file, _) in found.items() if file.stat().st_size}
    documents, scanned = _scanned(list(paths.values()), "data.path")
    # A file may hold a byte order mark alone, and a compressed one nothing.
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
    return splits.by_content(texts, scanned, where, "files")


def _files(path: str, left_out: LeftOut) -> dict[str, tuple[Path, bool]]:
    """Each file once, by name: where it is, and whether it was named or matched.

    Args:
        left_out: counts entries of folders, and matches of globs, that are no files.
    """
    files: dict[str, tuple[Path, bool]] = {}
    met = set()
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
            if resolved not in met:
                met.add(resolved)
                files[name] = resolved, named
    return files


def _texts_below(folder: str, left_out: LeftOut) -> list[str]:
    """All files of a folder, in order; hidden ones are left out, and counted.

    Raises:
        ValueError: one is no plain text by its name, so that the folder would not be
            read whole.
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
