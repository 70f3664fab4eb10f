"""Configuration files: `load_config` runs one and returns its `ConfigDict`."""

import contextlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from symjax import imports


def load_config(path: Path, preset: str = "") -> ConfigDict:
    """Return what `get_config(preset)` of a Python file returns.

    In the file, `from configs import base` finds the nearest folder configs/ above the
    file, wherever the program was started.

    Raises:
        ValueError: the file cannot be read or run, has no get_config, takes no such
            preset, or sets a key that does not exist.
    """
    if not path.is_file():
        raise ValueError(
            f"no configuration file {str(path)!r}: {choices_in(path.parent)}"
        )
    try:
        with _importable_configs(path):
            tree = imports.recorded(path, lambda: _get_config(path, preset))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    if not isinstance(tree, ConfigDict):
        raise ValueError(f"get_config of {path} must return the ConfigDict of base.py")
    return tree


def _get_config(path: Path, preset: str) -> Any:
    module = imports.run_path(path, f"configuration_{path.stem}")
    if not hasattr(module, "get_config"):
        raise ValueError("it has no function get_config")
    if preset and not inspect.signature(module.get_config).parameters:
        raise ValueError(f"it has no presets, got {preset!r}")
    return module.get_config(preset) if preset else module.get_config()


@contextlib.contextmanager
def _importable_configs(path: Path) -> Iterator[None]:
    """Put the folder that contains configs/ on Python's path inside the block."""
    roots = [str(x) for x in path.resolve().parents if (x / "configs").is_dir()][:1]
    sys.path[:0] = roots
    try:
        yield
    finally:
        for root in roots:
            sys.path.remove(root)


def choices_in(folder: Path) -> str:
    """Return "choose from …" with the configuration files of a folder.

    If the folder has none, the files of configs/ are named.
    """
    for directory in (folder, Path("configs")):
        paths = [path for path in directory.glob("*.py") if path.stem != "base"]
        configs = [str(p) for p in paths if b"get_config" in p.read_bytes()]
        if configs:
            return f"choose from {', '.join(sorted(configs))}"
    return f"{folder} has none"
