"""The words of a command line → a configuration; every error is one line."""

import argparse
import ast
import contextlib
import difflib
import inspect
import os
import sys
import typing
from collections.abc import Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from etils import epath
from ml_collections import ConfigDict

from symjax import config, imports, storage, validation
from symjax.attention import MECHANISMS, Option
from symjax.distributed import launch
from symjax.monitor.profile import steps_of
from symjax.validation import default

USAGE = """\
python train.py --config configs/NAME.py[:preset] [--config.KEY=VALUE ...]
symjax-train, the same from any directory

  --config FILE[:preset]   the configuration; configs/base.py names the presets
  --config.KEY=VALUE       change one key, for instance --config.model.depth=6
  --workdir DIR            where the run lives (default runs/NAME, runs/NAME-preset),
                           also in a bucket: gs://BUCKET/FOLDER;
                           the same command run again resumes it
  --import FILE|MODULE     first run a file (my_mechanism.py) or a module, which adds
                           mechanisms, feature maps or decays; may be repeated.
                           Checkpoints store its source: "stored" runs the source that
                           they hold, "show" prints it
  --allow KEY,KEY          keys in which a resumed run may differ from its checkpoint,
                           for instance optimizer.learning_rate,batch_size; imports:
                           the source of --import may differ
  --verify                 first compare all of the run's data with its hashes
  --pack                   pack the run's data into data.cache, where training finds
                           them, and end; needs no accelerator
  --dry_run                print the model, its cost and its memory; train nothing
  --target MACHINE         of a dry run: compile for v5e-N, v5p-N, v6e-N (TPUs) or
                           h200-N with the machine's own compiler; none is needed here
  --coordinator HOST:PORT --processes N --process I
                           this is process I of N, and process 0 is on HOST; torchrun,
                           Slurm, Open MPI and TPU pods say so themselves
  --wait SECONDS           for all processes to come (300)
  --heartbeat SECONDS      of silence after which a process counts as dead, and jax
                           ends the others (20)
  --help [GROUP]           this text, with the values that --config gives; or the
                           keys of one group alone, for instance --help model

A signal (Ctrl-C, SIGTERM) saves a checkpoint first, a second one ends at once; with
several processes SIGTERM saves, and Ctrl-C ends at once. Exit code: 0 complete, 2 bad
input, 1 a loss that is not finite or a machine that failed, 130 and 143 interrupted,
134 ended by jax because another process was lost or did not come.
"""
OWN = "model.attention.options."  # keys that mechanisms declare
TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
FLAGS = (
    "--config, --config.KEY, --workdir, --dry_run, --target, --coordinator, "
    "--processes, --process, --wait, --heartbeat, --import, --allow, --pack, "
    "--verify, --help"
)


class Command(NamedTuple):
    config: config.Config
    workdir: epath.Path
    dry_run: bool
    help: str | None  # a group of keys, all of them if empty; None: not asked for
    target: str | None = None
    verify: bool = False
    allow: tuple[str, ...] = ()  # keys that may differ from those of the checkpoint
    pack: bool = False


class Parser(argparse.ArgumentParser):
    """argparse with errors as ValueErrors, so that all bad input ends alike."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(words: list[str]) -> Command:
    """The command that the words after `python train.py` give.

    Raises:
        ValueError: an unknown key, value, file, preset or stray word; one line.
    """
    known, rest = _known(words)
    if known.config is None and known.help is None:
        raise ValueError(f"--config FILE is needed: {_files(Path('configs'))}")
    if known.workdir == "":
        raise ValueError("--workdir is empty: give a folder, or leave it out")
    path, _, preset = (known.config or "").partition(":")
    name = Path(path).stem + (f"-{preset}" if preset else "")
    workdir = storage.resolve(known.workdir or Path("runs", name))
    with imports.using(known.imports):
        return _command(known, rest, Path(path), preset, workdir)


def imported(words: list[str]) -> list[str]:
    """Return the values of --import. Raises: ValueError: a flag lacks its value."""
    return _known(words)[0].imports


def add_imports(parser: argparse.ArgumentParser) -> None:
    """Give a program the flag --import, as `imports` of what it parses."""
    parser.add_argument(
        "--import",
        action="append",
        default=[],
        dest="imports",
        metavar="FILE",
        help="first run this file or module, which adds mechanisms; stored: run the "
        "source that a run stores, show: print it; may be repeated",
    )


def _command(
    known: argparse.Namespace,
    rest: list[str],
    path: Path,
    preset: str,
    workdir: epath.Path,
) -> Command:
    """The command of the flags and of the words that are none."""
    _require(workdir, known.imports)
    tree = (load(path, preset) if known.config is not None else default()).to_dict()
    given = list(_overrides(rest))
    for key, text in given:
        if not key.startswith(OWN):
            _set(tree, key, text)
    if origin := tree.get("init_from"):
        _require(origin, known.imports)
    if known.target is not None and not known.dry_run:
        raise ValueError(f"--target {known.target!r} is of --dry_run: give both")
    if known.dry_run and (known.pack or known.verify):
        other = "--pack" if known.pack else "--verify"
        raise ValueError(f"--dry_run reads no data: leave {other} out")
    declared = config.declared_options(validation.from_dict(tree).model)
    for key, text in given:
        if key.startswith(OWN):
            kind = type(_own_option(key, declared).default)
            own = tree["model"]["attention"]["options"]
            own[key.removeprefix(OWN)] = _value(key, text, kind)
    options = validation.from_dict(tree)
    steps_of(options.log.profile, options.steps)
    if options.init_from:
        try:
            storage.resolve(options.init_from)
        except ValueError as error:
            raise ValueError(f"init_from: {error}") from None
    allow = tuple(filter(None, map(str.strip, ",".join(known.allow).split(","))))
    for key in allow:
        if key.startswith(OWN):
            _own_option(key, declared)
        elif key != "imports":
            _check_known(key)
    flags = known.dry_run, known.help, known.target, known.verify
    return Command(options, workdir, *flags, allow, known.pack)


def _require(workdir: str | epath.Path, given: list[str]) -> None:
    """Run the source that a run stores, if that was asked for.

    The configuration is checked next, and may have names which that source adds.
    """
    if {imports.STORED, imports.SHOW} & {*given}:
        from symjax.training.preflight import require_stored  # it loads Orbax

        require_stored(storage.resolve(workdir))


def place(words: list[str]) -> launch.Launch | None:
    """Which of several processes the words and the environment make this one.

    A dry run, packing and the help are each for itself.

    Raises:
        ValueError: the flags or variables contradict each other.
    """
    known, _ = _known(words)
    if known.help is not None or known.dry_run or known.pack:
        return None
    wait = launch.number("--wait", known.wait)
    heartbeat = launch.number("--heartbeat", known.heartbeat)
    found = launch.launch(known, os.environ)
    return found and found._replace(wait=wait, heartbeat=heartbeat)


def load(path: Path, preset: str = "") -> ConfigDict:
    """Return what `get_config(preset)` of a Python file returns.

    Its `from configs import base` finds the nearest folder configs/ above the file,
    wherever the program was started.

    Raises:
        ValueError: the file cannot be read or run, has no get_config, takes no such
            preset, or sets a key that does not exist.
    """
    if not path.is_file():
        raise ValueError(f"no configuration file {str(path)!r}: {_files(path.parent)}")
    try:
        with _importable(path):
            found = imports.recorded(path, lambda: _get_config(path, preset))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    if not isinstance(found, ConfigDict):
        raise ValueError(f"get_config of {path} must return the ConfigDict of base.py")
    return found


def _get_config(path: Path, preset: str) -> Any:
    module = imports.run_path(path, f"configuration_{path.stem}")
    if not hasattr(module, "get_config"):
        raise ValueError("it has no function get_config")
    if preset and not inspect.signature(module.get_config).parameters:
        raise ValueError(f"it has no presets, got {preset!r}")
    return module.get_config(preset) if preset else module.get_config()


@contextlib.contextmanager
def _importable(path: Path) -> Iterator[None]:
    """The project of a configuration file is on Python's path inside the block."""
    roots = [str(x) for x in path.resolve().parents if (x / "configs").is_dir()][:1]
    sys.path[:0] = roots
    try:
        yield
    finally:
        for root in roots:
            sys.path.remove(root)


def help_text(options: config.Config, group: str = "") -> str:
    """Usage, and every key with its type, value, meaning and choices, by groups.

    Args:
        group: its keys alone, and those of the groups in it.
    Raises:
        ValueError: there is no such group.
    """
    groups: dict[str, list[str]] = {}
    for name, kind, field in validation.fields():
        value = attrgetter(name)(options)
        lines = groups.setdefault(name.rpartition(".")[0], [])
        lines.append(f"  --config.{name} ({validation.shown(kind)}, {value!r})")
        lines.append(f"      {field.metadata['meaning']}")
        if choices := validation.choices(field):
            lines.append(f"      one of: {', '.join(filter(None, choices))}")
    if own := _own_lines(options):
        groups[OWN.removesuffix(".")] = own
    chosen = [x for x in groups if not group or f"{x}.".startswith(f"{group}.")]
    if not chosen:
        known = ", ".join(filter(None, groups))
        raise ValueError(f"--help {group}: choose from {known}")
    shown = ["\n".join([f"{x or 'the run'}:", *groups[x]]) for x in chosen]
    if not group:
        shown = [USAGE, "Keys (type, value unless changed): meaning", *shown]
    return "\n\n".join(shown)


def _known(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags, and the words that are none."""
    parser = Parser(prog="train.py", add_help=False, allow_abbrev=False)
    for name in ("config", "workdir", "target", *launch.FLAGS):
        parser.add_argument(f"--{name}")
    parser.add_argument("--allow", action="append", default=[])
    add_imports(parser)
    parser.add_argument("--wait", default=str(launch.WAIT))
    parser.add_argument("--heartbeat", default=str(launch.HEARTBEAT))
    parser.add_argument("--dry_run", action="store_true")
    parser.add_argument("--pack", action="store_true")
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--help", "-h", nargs="?", const="")
    return parser.parse_known_args(words)


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
            raise ValueError(f"{flag} is unknown: choose from {FLAGS}")
        if not equals:
            text = next(words, "--")
            if text.startswith("--"):
                raise ValueError(f"{flag} needs a value: {flag}=VALUE")
        yield flag.removeprefix("--config."), text


def _set(tree: dict[str, Any], key: str, text: str) -> None:
    """Put the value that `text` stands for at a dotted key."""
    kind = _check_known(key)
    *groups, name = key.split(".")
    for group in groups:
        tree = tree[group]
    tree[name] = _value(key, text, kind)


def _own_option(key: str, declared: dict[str, Option]) -> Option:
    """The option that a mechanism declares.

    Raises:
        ValueError: it declares no such option.
    """
    if (name := key.removeprefix(OWN)) not in declared:
        known = ", ".join(f"{OWN}{x}" for x in declared)
        raise ValueError(
            f"config.{key} is unknown: "
            + (f"choose from {known}" if known else "the mechanism declares no options")
        )
    return declared[name]


def _own_lines(options: config.Config) -> list[str]:
    """Help on the options that mechanisms of the table declare."""
    lines, values = [], config.own_options(options.model)
    used = config.mechanisms_of(options.model)
    for mechanism, form in MECHANISMS.items():
        for name, option in form.declared.items():
            value = values[name] if mechanism in used else option.default
            kind = validation.shown(type(option.default))
            lines.append(f"  --config.{OWN}{name} ({kind}, {value!r})")
            lines.append(f"      of {mechanism}: {option.meaning}")
            if option.choices:
                lines.append(f"      one of: {', '.join(option.choices)}")
    return lines


def _check_known(key: str) -> Any:
    """The type of a key.

    Raises:
        ValueError: there is no such key; the message names near ones.
    """
    kinds = {name: kind for name, kind, _ in validation.fields()}
    if key not in kinds:
        group = key.rpartition(".")[0]
        beside = [name for name in kinds if name.rpartition(".")[0] == group]
        near = difflib.get_close_matches(key, kinds, n=3) or beside or list(kinds)
        raise ValueError(f"config.{key} is unknown: choose from {', '.join(near)}")
    return kinds[key]


def _value(key: str, text: str, kind: Any) -> Any:
    plain = typing.get_origin(kind) or kind
    try:
        if plain is bool:
            return TRUTH[text.lower()]
        if plain is tuple:
            item = typing.get_args(kind)[0]
            if item is str:  # names, separated by commas
                return tuple(filter(None, map(str.strip, text.split(","))))
            numbers = ast.literal_eval(text)
            return tuple(item(x) if type(x) is int else x for x in numbers)
        return plain(text)
    except (KeyError, TypeError, ValueError, SyntaxError):
        raise ValueError(
            f"config.{key} must be {validation.shown(kind)}, got {text!r}"
        ) from None


def _files(folder: Path) -> str:
    """The configurations to choose from, those of a folder if it has any."""
    for place in (folder, Path("configs")):
        paths = [path for path in place.glob("*.py") if path.stem != "base"]
        known = [str(p) for p in paths if b"get_config" in p.read_bytes()]
        if known:
            return f"choose from {', '.join(sorted(known))}"
    return f"{folder} has none"
