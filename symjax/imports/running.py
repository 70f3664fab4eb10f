"""Running user files and modules that add to the tables, once in a process."""

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from symjax.imports.sources import (
    Source,
    is_local,
    read_text,
    sha256,
    source_of_file,
    source_of_module,
)

# Values of --import: a file, a module, "stored" or "show", or several of them.
Words = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
GROUP = "symjax.mechanisms"  # group of entry points of installed packages
STORED, SHOW = "stored", "show"  # words that are neither files nor modules

# The words of `using` in whose block the program is.
words: ContextVar[frozenset[str]] = ContextVar("imports", default=frozenset())
ran: dict[str, Source] = {}  # path or module name → source, in the order of running


@contextlib.contextmanager
def using(names: Words) -> Iterator[None]:
    """Run files and modules, and let the block run stored source if it is allowed.

    Args:
        names: files and modules; "stored" allows the block to run the source that a
            checkpoint stores, and "show" lets it print that source.
    Raises:
        ValueError: a file or module does not exist, fails, or adds an entry that other
            code has added.
    """
    one = isinstance(names, str | os.PathLike)
    new = [os.fspath(name) for name in ([names] if one else names)]
    for word in new:
        if word not in (STORED, SHOW):
            _run(word)
    token = words.set(words.get() | {*new})
    try:
        yield
    finally:
        words.reset(token)


def recorded(path: Path, run: Callable[[], Any]) -> Any:
    """Call `run`, which runs a configuration file, and note the entries that it adds.

    Raises:
        ValueError: the file adds an entry that other code has added.
    """
    before = entries()
    found = run()
    if adds := _added(before):
        _note(str(path.resolve()), source_of_file(path, adds))
    return found


@functools.cache
def load_installed() -> str:
    """Import the modules of the entry points; return a line about those that fail."""
    broken = []
    for point in metadata.entry_points(group=GROUP):
        package = f"{point.dist.name} {point.dist.version}" if point.dist else "unknown"
        try:
            with reported(f"{point.value} of package {package}"):
                run_module(point.module, package)
                point.load()
        except ValueError as error:
            broken.append(str(error))
    return "; ".join(broken)


def run_module(name: str, package: str = "", folder: Path | None = None) -> None:
    """Import a module and note the entries that it adds.

    The folder is searched before Python's path. Without a folder, the current folder
    is searched after Python's path.
    """
    if (key := f"module {name}") in ran:
        return
    before = entries()
    with _importable(str(folder) if folder else os.getcwd(), last=not folder):
        importlib.import_module(name)
    _note(key, source_of_module(name, _added(before), package))


def run_file(path: Path, key: str, folder: Path) -> None:
    """Run a file and note the entries that it adds; it may import from `folder`."""
    before = entries()
    with _importable(str(folder)):
        run_path(path, f"symjax_import_{path.stem}_{sha256(read_text(path))[:8]}")
    _note(key, source_of_file(path, _added(before)))


def run_path(path: Path, name: str) -> ModuleType:
    """Run a Python file as a module of this name, and return the module."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextlib.contextmanager
def reported(what: str) -> Iterator[None]:
    """Turn an error of user code into a ValueError, and remove what the code added."""
    dicts = [ran, *(table for _, table in _tables())]
    before, modules = [dict(x) for x in dicts], {*sys.modules}
    try:
        yield
    except (Exception, SystemExit) as error:
        for table, content in zip(dicts, before, strict=True):
            table.clear()
            table.update(content)
        for name in {*sys.modules} - modules:
            if is_local(name):  # it runs again when it is imported again
                del sys.modules[name]
        why = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ValueError(f"--import {what}: {why}{error}") from error


def entries() -> dict[str, Any]:
    """Return every entry of the tables, by kind and name."""
    return {f"{kind} {x}": table[x] for kind, table in _tables() for x in table}


def _run(word: str) -> None:
    """Run a file or a module that the user names, unless this process has run it."""
    if not (word.endswith(".py") or os.sep in word):
        if not all(part.isidentifier() for part in word.split(".")):
            raise ValueError(
                f"--import {word!r}: give a file (FILE.py), a module (PACKAGE.MODULE), "
                f"{STORED} or {SHOW}"
            )
        with reported(word):
            run_module(word)
        return
    path = Path(word).resolve()
    if not path.is_file():
        raise ValueError(f"--import {word}: there is no such file")
    with reported(word):
        text = read_text(path)
        if (known := ran.get(str(path))) is not None:
            if known.text != text:
                raise ValueError("it has changed since this process ran it")
        # A stored copy of the same text may have run.
        elif not any(x.text == text for x in ran.values()):
            run_file(path, str(path), path.parent)


@contextlib.contextmanager
def _importable(folder: str, last: bool = False) -> Iterator[None]:
    """Put a folder first (or last) on Python's path, and last when the block ends.

    The folder stays on the path because functions of the code may import modules when
    they are called.
    """
    if not last:
        sys.path.insert(0, folder)
    elif folder not in sys.path:
        sys.path.append(folder)
    try:
        yield
    finally:
        if not last and folder in sys.path:
            sys.path.remove(folder)
    if folder not in sys.path:
        sys.path.append(folder)


def _note(key: str, source: Source) -> None:
    """Remember code that has run.

    Raises:
        ValueError: the code replaces an entry of symjax or of other code.
    """
    from symjax.attention import mechanisms

    for entry in source.adds:
        kind, _, name = entry.partition(" ")
        if name in mechanisms.BUILT_IN[kind]:
            raise ValueError(
                f"{source.name} replaces {entry}, which symjax has: choose another name"
            )
    for known, other in ran.items():
        shared = {*source.adds} & {*other.adds}
        if not shared or source.text == other.text:
            continue
        if known == key:
            raise ValueError(f"{source.name} has changed since this process ran it")
        raise ValueError(
            f"{source.name} and {other.name} both add {min(shared)}: put it into one "
            "file, and give that with --import"
        )
    ran.setdefault(key, source)


def _added(before: dict[str, Any]) -> tuple[str, ...]:
    now = entries()
    return tuple(sorted(x for x in now if before.get(x) is not now[x]))


def _tables() -> list[tuple[str, dict[str, Any]]]:
    from symjax.attention import mechanisms

    return [(kind, table) for kind, some in mechanisms.TABLES.items() for table in some]
