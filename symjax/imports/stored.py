"""Source text that checkpoints and folders of weights store for their model."""

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from symjax.imports import running
from symjax.imports.running import SHOW, STORED
from symjax.imports.sources import (
    Source,
    from_json,
    is_installed,
    sha256,
    text_of,
    to_json,
)

_folders: list[tempfile.TemporaryDirectory] = []  # with the stored source that ran


def require(
    stored: Any,
    model: Any,
    where: str,
    warn: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> None:
    """Make sure that the tables have the entries that a stored model needs.

    Args:
        stored: the value of `to_store` as read from a file; None if an older version of
            symjax wrote the file.
        model: the configuration of the model, as a dict that is not trusted.
        where: the checkpoint or folder, for messages.
        warn: called with a line if the code of this process differs from the stored
            code.
    Raises:
        ValueError: code is needed that was not given, or stored code is damaged.
    """
    used = _entries_of(model)
    for source in from_json(stored, where):
        if not source.serves(used):
            continue
        if not _is_added(source):
            running.load_installed()
        if (loaded := _counterpart(source)) is not None:
            for line in source.changes(loaded):
                warn(f"code differs from what {where} stores: {line}")
        elif source.adds and _is_added(source):
            warn(
                f"{source.added} is from this process: it was not compared with "
                f"{source}, which {where} stores"
            )
        elif STORED in running.words.get():
            _run_stored(source, where)
        else:
            if SHOW in running.words.get():
                for path, text in source.files.items():
                    print(f"# {path} (sha256 {sha256(text)})", flush=True)
                    print(_printable(text), flush=True)
            raise ValueError(
                f"{where} needs {source}, which adds {source.added}: give the file "
                "with --import FILE, print the stored copy with --import show, or run "
                "it with --import stored (imports= in Python)"
            )


def to_store(model: Any) -> list[dict[str, Any]]:
    """Return the code that a model may need, in the JSON form of checkpoints."""
    return [to_json(source) for source in serving(model)]


def differences(stored: Any, model: Any, where: str) -> list[str]:
    """Return a line for each difference between stored code and this process's code.

    The list is empty if an older version of symjax stored nothing.
    """
    if stored is None:
        return []
    used, lines, matched = _entries_of(model), [], []
    for source in from_json(stored, where):
        if source.serves(used) and (loaded := _counterpart(source)) is not None:
            lines += source.changes(loaded)
            matched.append(loaded)
    new = [source for source in serving(model) if source not in matched]
    return lines + [f"no such code → {source}" for source in new]


def unaccounted(model: Any) -> list[str]:
    """Return the table entries of a model that neither symjax nor an import added."""
    from symjax.attention import mechanisms

    known = {
        f"{kind} {x}" for kind, names in mechanisms.BUILT_IN.items() for x in names
    }
    known |= {entry for source in running.ran.values() for entry in source.adds}
    return sorted((_entries_of(model) & running.entries().keys()) - known)


def _entries_of(model: Any) -> set[str]:
    """Return the table entries that the configuration of a model names."""
    group = model.get("attention") if isinstance(model, Mapping) else None
    if not isinstance(group, Mapping):
        return set()
    pattern = model.get("pattern")
    names = pattern if isinstance(pattern, list | tuple) and pattern else ()
    found = {f"mechanism {name}" for name in names or (group.get("mechanism"),)}
    return found | {f"{kind} {group.get(kind)}" for kind in ("features", "decay")}


def serving(model: Any) -> list[Source]:
    """Return the code of this process that a model may need."""
    used = _entries_of(model)
    return [source for source in running.ran.values() if source.serves(used)]


def _counterpart(stored: Source) -> Source | None:
    """Return the code of this process that replaces the stored code, if any."""
    return next((x for x in running.ran.values() if x.replaces(stored)), None)


def _is_added(source: Source) -> bool:
    return {*source.adds} <= running.entries().keys()


def _run_stored(source: Source, where: str) -> None:
    """Run the source that a checkpoint stores, from a temporary folder.

    Raises:
        ValueError: the source fails, does not add what it is stored for, has the name
            of an installed module, or has the name of a module that this process has
            imported with another text.
    """
    _folders.append(tempfile.TemporaryDirectory(prefix="symjax-import-"))
    folder = Path(_folders[-1].name)
    with running.reported(f"{STORED}, {source.name} of {where}"):
        for name, path in source.modules.items():
            if is_installed(name):
                raise ValueError(f"{path} has the name of an installed module")
        _check_imported(source)
        for path, text in source.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(text.encode())
        if source.module:
            running.run_module(source.module, folder=folder)
        else:
            main = folder / source.name
            if is_installed(main.stem):  # an import of that name must not find it
                (folder / "main").mkdir()
                main = main.rename(folder / "main" / source.name)
            running.run_file(main, f"{where}: {source}", folder)
        _check_imported(source)  # the code may have imported another file of this name
        if missing := {*source.adds} - running.entries().keys():
            raise ValueError(f"it adds no {min(missing)}")


def _check_imported(source: Source) -> None:
    for name, path in source.modules.items():
        if name in sys.modules and text_of(name)[1] != source.files[path]:
            raise ValueError(
                f"this process has imported another {path}: start a new process"
            )


def _printable(text: str) -> str:
    """Return a text with control characters escaped, so that a terminal shows them."""
    return "".join(
        x if x.isprintable() or x in "\n\t" else ascii(x)[1:-1]
        for x in text.replace("\r\n", "\n")
    )
