"""Source text of user code and of the local modules that it imports."""

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple


class Source(NamedTuple):
    """Source text of code that adds to the tables, with the modules that it imports.

    Attributes:
        files: path → text. The first file is the code itself. The others are modules
            that it imports and that no package manager has installed.
        adds: table entries that the code adds, such as "mechanism softcap".
        module: name of the module, or "" for a file that was run by its path.
        package: name and version of the package whose entry point the code is.
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
        return ", ".join(
            f"{path} (sha256 {sha256(text)[:12]})" for path, text in self.files.items()
        )

    @property
    def added(self) -> str:
        """The table entries in words."""
        return ", ".join(self.adds) or "nothing to the tables"

    @property
    def modules(self) -> dict[str, str]:
        """Name → path of the files that are imported by name."""
        paths = list(self.files) if self.module else list(self.files)[1:]
        return {_module_of(path): path for path in paths}

    def serves(self, used: set[str]) -> bool:
        """Return whether a model with the table entries `used` may need this code."""
        if not self.adds:  # the effect of the code is not known
            return not self.package
        return not used.isdisjoint(self.adds)

    def replaces(self, other: "Source") -> bool:
        """Return whether this code and `other` add an entry in common.

        If `other` adds no entry, return whether both have the same name.
        """
        if not other.adds:
            return self.name == other.name
        return not {*self.adds}.isdisjoint(other.adds)

    def changes(self, other: "Source") -> list[str]:
        """Return a line with both hashes for each file of both that differs.

        The code itself is compared even if its files have different names.
        """
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
    """Return the text of a file with its own line ends, so the hash is the file's."""
    return path.read_bytes().decode()


def source_of_file(path: Path, adds: tuple[str, ...]) -> Source:
    """Return the source of a file that has run."""
    text = read_text(path)
    return Source(_with_local({path.name: text}, _imported(text, "")), adds)


def source_of_module(name: str, adds: tuple[str, ...], package: str = "") -> Source:
    """Return the source of a module that has been imported.

    Raises:
        ValueError: it has no Python source.
    """
    path, text = text_of(name)
    parts = name.split(".")
    parents = [".".join(parts[:i]) for i in range(1, len(parts))]
    inside = sys.modules[name].__package__ or ""
    names = [*parents, *_imported(text, inside)]
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
    """Return the sources of a list of `to_json` values. The list is not trusted.

    Raises:
        ValueError: a value is damaged, or a path leads outside its folder.
    """
    found = []
    try:
        for entry in stored or []:
            files = dict(entry["files"])
            for path, text in files.items():
                if not _is_path(path) or not isinstance(text, str):
                    raise ValueError(f"file {path!r}")
                text.encode()
            adds = tuple(map(str, entry["adds"]))
            source = Source(files, adds, str(entry["module"]), str(entry["package"]))
            if source.sha256 != entry["sha256"]:
                raise ValueError(f"{source.name} does not match its hash")
            if source.module and _module_of(source.name) != source.module:
                raise ValueError(f"{source.name} is not module {source.module!r}")
            for word in (*adds, source.package):
                if not word.isprintable():
                    raise ValueError(f"{word!r}")
            found.append(source)
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError) as error:
        raise ValueError(
            f"the imports that {where} stores are damaged: {error}"
        ) from None
    return found


def is_installed(name: str) -> bool:
    """Return whether Python, symjax or an installed package has a module's name."""
    top = name.split(".")[0]
    if top in sys.stdlib_module_names or top == "symjax":
        return True
    return PathFinder.find_spec(top, list(map(str, _site()))) is not None


def is_local(name: str) -> bool:
    """Return whether a module is a user's own file, and no installed package."""
    file = _file_of(name)
    if file is None or name.split(".")[0] == "symjax":
        return False
    stdlib = Path(sysconfig.get_paths()["stdlib"]).resolve()
    return not any(file.is_relative_to(x) for x in (stdlib, *_site()))


def _with_local(files: dict[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return `files` and the files of the modules `names`, with what they import.

    Installed modules are left out.
    """
    files, waiting = dict(files), list(names)
    while waiting:
        name = waiting.pop()
        if parent := name.rpartition(".")[0]:
            waiting.append(parent)
        if not is_local(name):
            continue
        path, text = text_of(name)
        if path not in files:
            files[path] = text
            package = name if path.endswith("/__init__.py") else parent
            waiting += _imported(text, package)
    return files


def _imported(text: str, package: str) -> list[str]:
    """Return the names that may be modules in the imports of a source text."""
    return list(_names(ast.parse(text.encode()), package))


def _names(tree: ast.Module, package: str) -> Iterator[str]:
    inside = package.split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = inside[: max(len(inside) + 1 - node.level, 0)] if node.level else []
            start = [*above, *filter(None, [node.module])]
            yield from (".".join([*start, alias.name]) for alias in node.names)


def _site() -> list[Path]:
    paths = sysconfig.get_paths()
    return [Path(paths[x]).resolve() for x in ("purelib", "platlib")]


def _file_of(name: str) -> Path | None:
    """Return the source file of a module, also of one that is not imported yet."""
    module, parent = sys.modules.get(name), name.rpartition(".")[0]
    if module is not None:
        file = getattr(module, "__file__", None)
    elif parent and not is_local(parent):
        return None
    else:
        package = _file_of(parent) if parent else None
        spec = PathFinder.find_spec(name, [str(package.parent)] if package else None)
        file = spec.origin if spec else None
    return Path(file).resolve() if file and file.endswith(".py") else None


def text_of(name: str) -> tuple[str, str]:
    """Return the path and the text of a module.

    Raises:
        ValueError: it has no Python source.
    """
    if (file := _file_of(name)) is None:
        raise ValueError(f"module {name} has no Python source")
    end = "/__init__.py" if file.name == "__init__.py" else ".py"
    return name.replace(".", "/") + end, read_text(file)


def _module_of(path: str) -> str:
    """Return the module name of a path that is relative to Python's path."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _is_path(path: Any) -> bool:
    """Return whether this is a plain path of a Python file inside a folder."""
    if not isinstance(path, str) or not path.isprintable() or "\\" in path:
        return False
    parts = PurePosixPath(path).parts
    plain = "/".join(parts) == path and path.endswith(".py")
    return plain and ".." not in parts and not path.startswith("/")
