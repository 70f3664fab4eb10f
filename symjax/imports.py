"""Code of users that adds mechanisms, feature maps and decays to the tables.

`--import FILE.py` or `--import PACKAGE.MODULE` runs it, a configuration file may add to
the tables itself, and an installed package does so by an entry point of the group
`symjax.mechanisms`. What a run needs of it is stored in its checkpoints as source text.
Stored source runs only where the user has said `--import stored`.
"""

import ast
import contextlib
import functools
import hashlib
import importlib.util
import os
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from importlib import metadata
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, NamedTuple

# What a user names: a file, a module or one of the words below; or several of them.
Words = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
GROUP = "symjax.mechanisms"  # of entry points
STORED, SHOW = "stored", "show"  # words that are neither files nor modules

_words: ContextVar[frozenset[str]] = ContextVar("imports", default=frozenset())


class Source(NamedTuple):
    """Source text that adds to the tables, and the modules that it imports.

    Attributes:
        files: path → text; the first is the code itself, the others are modules that
            it imports and that no package manager has installed.
        adds: table entries that it makes, such as "mechanism softcap".
        module: its name, if it is no file on its own.
        package: name and version of the package whose entry point it is.
    """

    files: dict[str, str]
    adds: tuple[str, ...] = ()
    module: str = ""
    package: str = ""

    @property
    def name(self) -> str:
        """Path of the code itself."""
        return next(iter(self.files))

    @property
    def text(self) -> str:
        return self.files[self.name]

    @property
    def sha256(self) -> str:
        """Hash of the code itself, as sha256sum prints it."""
        return _sha256(self.text)

    def __str__(self) -> str:
        return f"{self.name} (sha256 {self.sha256[:12]})"

    def serves(self, used: set[str]) -> bool:
        """Return whether a model that uses these table entries may depend on it."""
        if not self.adds:  # its effect is not known
            return not self.package
        return not used.isdisjoint(self.adds)

    def changes(self, other: "Source") -> list[str]:
        """Return a line for each file of both that differs: before → after."""
        pairs = [(self.name, self.text, other.text)]
        pairs += [
            (path, text, other.files[path])
            for path, text in self.files.items()
            if path not in (self.name, other.name) and path in other.files
        ]
        return [
            f"{path} (sha256 {_sha256(one)[:12]} → {_sha256(two)[:12]})"
            for path, one, two in pairs
            if one != two
        ]


_ran: dict[str, Source] = {}  # by where it came from, in the order of running
_folders: list[tempfile.TemporaryDirectory] = []  # of stored source that has run


@contextlib.contextmanager
def using(words: Words) -> Iterator[None]:
    """Run files and modules; inside, stored source may run if "stored" is a word.

    Raises:
        ValueError: there is no such file or module, it fails, or it adds what another
            one has added.
    """
    one = isinstance(words, str | os.PathLike)
    words = [os.fspath(word) for word in ([words] if one else words)]
    for word in words:
        if word not in (STORED, SHOW):
            _run(word)
    token = _words.set(_words.get() | {*words})
    try:
        yield
    finally:
        _words.reset(token)


def require(
    stored: Any,
    model: Any,
    where: str,
    warn: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> None:
    """Make sure that the table entries of a stored model are there.

    Args:
        stored: of `to_store`, as read from a file; None: of an older version.
        model: the configuration of the model, as a dict that may hold anything.
        where: the checkpoint or folder, for messages.
        warn: called with a line for code that is not the stored one.
    Raises:
        ValueError: code is needed that was not given, or is damaged.
    """
    used = entries_of(model)
    for source in _read(stored, where):
        if not source.serves(used):
            continue
        if not {*source.adds} <= _entries().keys():
            load_installed()
        if (given := _counterpart(source)) is not None:
            for line in source.changes(given):
                warn(f"code differs from what {where} stores: {line}")
        elif source.adds and {*source.adds} <= _entries().keys():
            warn(
                f"{_shown(source)} is from this process: it was not compared with "
                f"{source}, which {where} stores"
            )
        elif STORED in _words.get():
            _run_stored(source, where)
        else:
            if SHOW in _words.get():
                for path, text in source.files.items():
                    print(f"# {path} (sha256 {_sha256(text)})\n{text}", flush=True)
            raise ValueError(
                f"{where} needs {source}, which adds {_shown(source)}: give the file "
                "with --import FILE, print the stored copy with --import show, or run "
                "it with --import stored (imports= in Python)"
            )


def to_store(model: Any) -> list[dict[str, Any]]:
    """Return what the checkpoint of a model stores, for JSON: the code it may need."""
    return [
        {
            "name": source.name,
            "sha256": source.sha256,
            "adds": list(source.adds),
            "module": source.module,
            "package": source.package,
            "files": source.files,
        }
        for source in _serving(model)
    ]


def differences(stored: Any, model: Any, where: str) -> list[str]:
    """Return a line for each difference between stored code and that of this process.

    None where an older version stored nothing.
    """
    if stored is None:
        return []
    used, lines = entries_of(model), []
    before = [x for x in _read(stored, where) if x.serves(used)]
    for source in before:
        given = _counterpart(source)
        lines += [] if given is None else source.changes(given)
    matched = [_counterpart(source) for source in before]
    new = [source for source in _serving(model) if source not in matched]
    return lines + [f"no such code → {source}" for source in new]


def unaccounted(model: Any) -> list[str]:
    """Return entries of a model that neither symjax nor any import has added."""
    from symjax.attention import tables

    known = {f"{kind} {x}" for kind, names in tables.BUILT_IN.items() for x in names}
    known |= {entry for source in _ran.values() for entry in source.adds}
    return sorted((entries_of(model) & _entries().keys()) - known)


def entries_of(model: Any) -> set[str]:
    """Return the table entries that the configuration of a model names."""
    group = model.get("attention") if isinstance(model, Mapping) else None
    if not isinstance(group, Mapping):
        return set()
    pattern = model.get("pattern")
    names = pattern if isinstance(pattern, list | tuple) and pattern else ()
    found = {f"mechanism {name}" for name in names or (group.get("mechanism"),)}
    return found | {f"{kind} {group.get(kind)}" for kind in ("features", "decay")}


def recorded(path: Path, run: Callable[[], Any]) -> Any:
    """Return what running a configuration file returns, and note what the file adds.

    Raises:
        ValueError: it adds what another file has added.
    """
    before = _entries()
    found = run()
    if adds := _added(before):
        _note(str(path.resolve()), _source(path.name, _read_text(path), adds))
    return found


@functools.cache
def load_installed() -> str:
    """Import what entry points of the group name; return a line on the broken ones."""
    broken = []
    for point in metadata.entry_points(group=GROUP):
        package = f"{point.dist.name} {point.dist.version}" if point.dist else "unknown"
        try:
            with _reported(f"{point.value} of package {package}"):
                _run_module(point.module, package)
                point.load()
        except ValueError as error:
            broken.append(str(error))
    return "; ".join(broken)


def _serving(model: Any) -> list[Source]:
    used = entries_of(model)
    return [source for source in _ran.values() if source.serves(used)]


def _counterpart(stored: Source) -> Source | None:
    """Return the code of this process that has the place of the stored one."""
    for source in _ran.values():
        if {*stored.adds} & {*source.adds}:
            return source
    for source in _ran.values():
        if not stored.adds and source.name == stored.name:
            return source
    return None


def _shown(source: Source) -> str:
    return ", ".join(source.adds) or "nothing to the tables"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _run(word: str) -> None:
    """Run a file or a module that the user names, unless this process has run it."""
    if not (word.endswith(".py") or os.sep in word):
        if not all(part.isidentifier() for part in word.split(".")):
            raise ValueError(
                f"--import {word!r}: give a file (FILE.py), a module (PACKAGE.MODULE), "
                f"{STORED} or {SHOW}"
            )
        with _reported(word):
            _run_module(word)
        return
    path = Path(word).resolve()
    if not path.is_file():
        raise ValueError(f"--import {word}: there is no such file")
    with _reported(word):
        text = _read_text(path)
        if (known := _ran.get(str(path))) is not None:
            if known.text != text:
                raise ValueError("it has changed since this process ran it")
            return
        if any(x.text == text for x in _ran.values()):
            return  # the stored copy has run
        _run_file(path, str(path), [str(path.parent)])


def _run_module(name: str, package: str = "") -> None:
    if (key := f"module {name}") in _ran:
        return
    before = _entries()
    with _importable([os.getcwd()], last=True):
        module = importlib.import_module(name)
    path, text = _text_of(name, module)
    parents = [name.rsplit(".", i)[0] for i in range(1, name.count(".") + 1)]
    source = _source(path, text, _added(before), module.__package__ or "", parents)
    _note(key, source._replace(module=name, package=package))


def _run_file(path: Path, key: str, folders: list[str]) -> None:
    text = _read_text(path)
    before = _entries()
    with _importable(folders):
        run_path(path, f"symjax_import_{path.stem}_{_sha256(text)[:8]}")
    _note(key, _source(path.name, text, _added(before)))


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


def _run_stored(source: Source, where: str) -> None:
    """Run the source that a checkpoint stores, from a temporary folder."""
    _folders.append(tempfile.TemporaryDirectory(prefix="symjax-import-"))
    folder = Path(_folders[-1].name)
    for path, text in source.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(text.encode())
    with _reported(f"{STORED}, {source.name} of {where}"):
        if source.module:
            with _importable([str(folder)]):
                _run_module(source.module)
        else:
            _run_file(folder / source.name, f"{where}: {source}", [str(folder)])
    if missing := {*source.adds} - _entries().keys():
        raise ValueError(f"{source}, which {where} stores, adds no {min(missing)}")
    sys.path.append(str(folder))  # for what its functions import when they are called


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    """Turn any error of the code into one line, and undo what it added."""
    tables = _tables()
    before = [(table, dict(table)) for _, table in tables]
    try:
        yield
    except (Exception, SystemExit) as error:
        for table, content in before:
            table.clear()
            table.update(content)
        why = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ValueError(f"--import {what}: {why}{error}") from error


@contextlib.contextmanager
def _importable(folders: list[str], last: bool = False) -> Iterator[None]:
    """Folders are on Python's path inside the block, before or after all others."""
    sys.path[:] = [*sys.path, *folders] if last else [*folders, *sys.path]
    try:
        yield
    finally:
        for folder in folders:
            if folder in sys.path:
                sys.path.remove(folder)


def _note(key: str, source: Source) -> None:
    """Remember code that has run.

    Raises:
        ValueError: it replaces what other code has added.
    """
    for known, other in _ran.items():
        shared = {*source.adds} & {*other.adds}
        if not shared or source.text == other.text:
            continue
        if known == key:
            raise ValueError(f"{source.name} has changed since this process ran it")
        raise ValueError(
            f"{source.name} and {other.name} both add {min(shared)}: put it into one "
            "file, and give that with --import"
        )
    _ran.setdefault(key, source)


def _tables() -> list[tuple[str, dict[str, Any]]]:
    from symjax.attention import tables

    return [(kind, table) for kind, some in tables.TABLES.items() for table in some]


def _entries() -> dict[str, Any]:
    """Return every entry of the tables, by kind and name."""
    return {f"{kind} {x}": table[x] for kind, table in _tables() for x in table}


def _added(before: dict[str, Any]) -> tuple[str, ...]:
    now = _entries()
    return tuple(sorted(x for x in now if before.get(x) is not now[x]))


def _source(
    path: str,
    text: str,
    adds: tuple[str, ...],
    package: str = "",
    names: Sequence[str] = (),
) -> Source:
    """Source with the modules that it imports, as far as nobody has installed them."""
    files, waiting = {path: text}, [*names, *_imported(text, package)]
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        if parent := name.rpartition(".")[0]:
            waiting.append(parent)
        if module is None or not _is_local(name, module):
            continue
        found, content = _text_of(name, module)
        if found not in files:
            files[found] = content
            waiting += _imported(content, module.__package__ or "")
    return Source(files, adds)


def _imported(text: str, package: str) -> Iterator[str]:
    """Yield the names that may be modules in the imports of a source text."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[
                : max(len(package.split(".")) + 1 - node.level, 0)
            ]
            start = [*(above if node.level else []), *filter(None, [node.module])]
            yield from (".".join([*start, alias.name]) for alias in node.names)


def _is_local(name: str, module: ModuleType) -> bool:
    """Return whether a module is a user's own file, and no installed package."""
    file = getattr(module, "__file__", None)
    if not file or not file.endswith(".py") or name.split(".")[0] == "symjax":
        return False
    paths = sysconfig.get_paths()
    installed = [Path(paths[x]).resolve() for x in ("stdlib", "purelib", "platlib")]
    return not any(Path(file).resolve().is_relative_to(x) for x in installed)


def _text_of(name: str, module: ModuleType) -> tuple[str, str]:
    """Return the path and the text of a module.

    Raises:
        ValueError: it has no Python source.
    """
    file = getattr(module, "__file__", None)
    if not file or not file.endswith(".py"):
        raise ValueError(f"module {name} has no Python source")
    end = "/__init__.py" if Path(file).name == "__init__.py" else ".py"
    return name.replace(".", "/") + end, _read_text(Path(file))


def _read_text(path: Path) -> str:
    """Return the text of a file with the line ends that it has, for its hash."""
    return path.read_bytes().decode()


def _read(stored: Any, where: str) -> list[Source]:
    """Return the sources of `to_store`, which may hold anything.

    Raises:
        ValueError: they are damaged, or name paths outside their folder.
    """
    found = []
    try:
        for entry in stored or []:
            files = dict(entry["files"])
            for path, text in files.items():
                parts = PurePosixPath(path).parts
                if not isinstance(text, str) or ".." in parts or path.startswith("/"):
                    raise ValueError(f"file {path!r}")
            adds, names = (
                tuple(map(str, entry["adds"])),
                (entry["module"], entry["package"]),
            )
            source = Source(files, adds, *map(str, names))
            if source.sha256 != entry["sha256"]:
                raise ValueError(f"{source.name} does not match its hash")
            found.append(source)
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError) as error:
        raise ValueError(
            f"the imports that {where} stores are damaged: {error}"
        ) from None
    return found
