"""The words of a command line → a configuration; every error is one line."""

import argparse
import ast
import difflib
import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ml_collections import ConfigDict

from symjax import config

USAGE = """\
python train.py --config configs/NAME.py[:preset] [--config.KEY=VALUE ...]

  --config FILE[:preset]   the configuration; its presets are named in the file
  --config.KEY=VALUE       change one key, for instance --config.model.depth=6
  --workdir DIR            where the run lives (default runs/NAME, runs/NAME-preset);
                           the same command run again resumes it
  --dry_run                print the model, its cost and its memory; train nothing
  --help                   this text
"""
TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class Command(NamedTuple):
    config: config.Config
    workdir: Path
    dry_run: bool


class Parser(argparse.ArgumentParser):
    """argparse with errors as ValueErrors, so that all bad input ends alike."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(words: list[str]) -> Command:
    """The command that the words after `python train.py` give.

    Raises:
        ValueError: an unknown key, value, file, preset or stray word; one line.
    """
    parser = Parser(prog="train.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", required=True)
    parser.add_argument("--workdir", type=Path)
    parser.add_argument("--dry_run", action="store_true")
    known, rest = parser.parse_known_args(words)
    path, _, preset = known.config.partition(":")
    name = Path(path).stem + (f"-{preset}" if preset else "")
    tree = load(Path(path), preset).to_dict()
    for key, text in _overrides(rest):
        _set(tree, key, text)
    workdir = known.workdir or Path("runs", name)
    return Command(config.from_dict(tree), workdir.absolute(), known.dry_run)


def default() -> ConfigDict:
    """The defaults, as what a configuration file changes and returns."""
    return ConfigDict(config.to_dict(config.Config()))


def load(path: Path, preset: str = "") -> ConfigDict:
    """What `get_config(preset)` of a Python file returns.

    Raises:
        ValueError: the file cannot be read or run, has no get_config, takes no such
            preset, or sets a key that does not exist.
    """
    if not path.is_file():
        known = sorted(p.stem for p in path.parent.glob("*.py") if p.stem != "base")
        beside = f": {path.parent} has {', '.join(known)}" if known else ""
        raise ValueError(f"no configuration file {str(path)!r}{beside}")
    spec = importlib.util.spec_from_file_location(f"configuration_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if not hasattr(module, "get_config"):
            raise ValueError(f"{path} has no function get_config")
        if preset and not inspect.signature(module.get_config).parameters:
            raise ValueError(f"{path} has no presets, got {preset!r}")
        found = module.get_config(preset) if preset else module.get_config()
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    if not isinstance(found, ConfigDict):
        raise ValueError(f"get_config of {path} must return the ConfigDict of base.py")
    return found


def help_text() -> str:
    """Usage, and every key with its type, default, meaning and choices."""
    lines = [USAGE, "Keys (type, default): meaning\n"]
    for name, kind, field in config.fields():
        shown = kind.__name__ if isinstance(kind, type) else str(kind)
        lines.append(f"  --config.{name} ({shown}, {field.default!r})")
        lines.append(f"      {field.metadata['meaning']}")
        if known := config.choices(field):
            lines.append(f"      one of: {', '.join(known)}")
    return "\n".join(lines)


def leave(run: Callable[[], None]) -> NoReturn:
    """Run, and exit with 0; with 2 on bad input, with 1 where a run had to stop."""
    try:
        run()
    except ValueError as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except FloatingPointError as error:
        print(f"stopped: {_one_line(error)}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)


def _overrides(words: Iterable[str]) -> Iterable[tuple[str, str]]:
    """(key, text) of --config.KEY=VALUE and of --config.KEY VALUE."""
    words = iter(words)
    for word in words:
        if not word.startswith("--"):
            raise ValueError(
                f"stray argument {word!r}: keys are given as --config.KEY=VALUE"
            )
        flag, equals, text = word.partition("=")
        if not flag.startswith("--config."):
            raise ValueError(
                f"{flag} is unknown: choose from --config, --config.KEY, --workdir, "
                "--dry_run, --help"
            )
        if not equals:
            text = next(words, "--")
            if text.startswith("--"):
                raise ValueError(f"{flag} needs a value: {flag}=VALUE")
        yield flag.removeprefix("--config."), text


def _set(tree: dict[str, Any], key: str, text: str) -> None:
    """Put the value that `text` stands for at a dotted key."""
    kinds = {name: kind for name, kind, _ in config.fields()}
    if key not in kinds:
        group = key.rpartition(".")[0]
        beside = [name for name in kinds if name.rpartition(".")[0] == group]
        near = difflib.get_close_matches(key, kinds, n=3) or beside or list(kinds)
        raise ValueError(f"config.{key} is unknown: choose from {', '.join(near)}")
    *groups, name = key.split(".")
    for group in groups:
        tree = tree[group]
    tree[name] = _value(key, text, kinds[key])


def _value(key: str, text: str, kind: Any) -> Any:
    plain = typing.get_origin(kind) or kind
    try:
        if plain is bool:
            return TRUTH[text.lower()]
        if plain is tuple:
            values = ast.literal_eval(text)
            return tuple(map(typing.get_args(kind)[0], values))
        return plain(text)
    except (KeyError, TypeError, ValueError, SyntaxError):
        shown = plain.__name__ if plain is not tuple else str(kind)
        raise ValueError(f"config.{key} must be {shown}, got {text!r}") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
