"""Source text of a user's code and of the local modules that it imports."""

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, NamedTuple


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
        return sha256(self.text)

    def __str__(self) -> str:
        return f"{self.name} (sha256 {self.sha256[:12]})"

    @property
    def added(self) -> str:
        """The table entries in words."""
        return ", ".join(self.adds) or "nothing to the tables"

    def serves(self, used: set[str]) -> bool:
        """Return whether a model that uses these table entries may depend on it."""
        if not self.adds:  # its effect is not known
            return not self.package
        return not used.isdisjoint(self.adds)

    def replaces(self, other: "Source") -> bool:
        """Return whether both add the same, or have one name if the other adds none."""
        if not other.adds:
            return self.name == other.name
        return not {*self.adds}.isdisjoint(other.adds)

    def changes(self, other: "Source") -> list[str]:
        """Return a line for each file of both that differs: before → after."""
        pairs = [(self.name, self.text, other.text)]
        pairs += [
            (path, text, other.files[path])
            for path, text in self.files.items()
            if path not in (self.name, other.name) and path in other.files
        ]
        return [
            f"{path} (sha256 {sha256(one)[:12]} → {sha256(two)[:12]})"
            for path, one, two in pairs
            if one != two
        ]


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_text(path: Path) -> str:
    """Return the text of a file with the line ends that it has, for its hash."""
    return path.read_bytes().decode()


def source_of_file(path: Path, adds: tuple[str, ...]) -> Source:
    """Return the source of a file that has run."""
    text = read_text(path)
    return Source(_with_local({path.name: text}, _imported(text, "")), adds)


def source_of_module(
    name: str, module: ModuleType, adds: tuple[str, ...], package: str = ""
) -> Source:
    """Return the source of a module that has been imported.

    Raises:
        ValueError: it has no Python source.
    """
    path, text = _text_of(name, module)
    parts = name.split(".")
    parents = [".".join(parts[:i]) for i in range(1, len(parts))]
    names = [*parents, *_imported(text, module.__package__ or "")]
    return Source(_with_local({path: text}, names), adds, name, package)


def to_json(source: Source) -> dict[str, Any]:
    return {
        "name": source.name,
        "sha256": source.sha256,
        "adds": list(source.adds),
        "module": source.module,
        "package": source.package,
        "files": source.files,
    }


def from_json(stored: Any, where: str) -> list[Source]:
    """Return the sources of a list of `to_json`, which may hold anything.

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
            adds = tuple(map(str, entry["adds"]))
            source = Source(files, adds, str(entry["module"]), str(entry["package"]))
            if source.sha256 != entry["sha256"]:
                raise ValueError(f"{source.name} does not match its hash")
            found.append(source)
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError) as error:
        raise ValueError(
            f"the imports that {where} stores are damaged: {error}"
        ) from None
    return found


def _with_local(files: dict[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return the files, and those of these modules that nobody has installed."""
    files, waiting = dict(files), list(names)
    while waiting:
        name = waiting.pop()
        if parent := name.rpartition(".")[0]:
            waiting.append(parent)
        module = sys.modules.get(name)
        if module is None or not _is_local(name, module):
            continue
        path, text = _text_of(name, module)
        if path not in files:
            files[path] = text
            waiting += _imported(text, module.__package__ or "")
    return files


def _imported(text: str, package: str) -> list[str]:
    """Return the names that may be modules in the imports of a source text."""
    return list(_names(ast.parse(text), package))


def _names(tree: ast.Module, package: str) -> Iterator[str]:
    inside = package.split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = inside[: max(len(inside) + 1 - node.level, 0)] if node.level else []
            start = [*above, *filter(None, [node.module])]
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
    return name.replace(".", "/") + end, read_text(Path(file))
