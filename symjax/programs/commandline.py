"""Command line of train.py: `parse` makes a `Command` of its words.

`parse` runs the configuration file (`load_config`), changes the keys that
--config.KEY=VALUE names, and validates the result. Errors are ValueErrors of one line,
which names the word and, for an unknown name, the choices. The other programs use
`Parser` and `add_imports` too.
"""

import argparse
import ast
import difflib
import os
import typing
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from etils import epath

from symjax import config, imports, storage, validation
from symjax.attention import MECHANISMS, Option
from symjax.distributed import launch
from symjax.monitor.profile import steps_of
from symjax.programs.configuration_file import choices_in, load_config
from symjax.validation import default

USAGE = """\
python train.py --config configs/NAME.py[:preset] [--config.KEY=VALUE ...]
symjax-train, the same from any directory

  --config FILE[:preset]   the configuration; configs/base.py names the presets
  --config.KEY=VALUE       change one key, for instance --config.model.depth=6
  --workdir DIR            folder of the run (default runs/NAME or runs/NAME-preset),
                           also in a bucket: gs://BUCKET/FOLDER;
                           the same command run again resumes the run
  --import FILE|MODULE     first run a file (my_mechanism.py) or a module, which adds
                           mechanisms, feature maps or decays; may be repeated.
                           Checkpoints store its source. "stored" runs the source in
                           the checkpoint, "show" prints it
  --allow KEY,KEY          keys in which a resumed run may differ from its checkpoint,
                           for instance optimizer.learning_rate,batch_size; "imports"
                           lets the source of --import differ
  --verify                 first compare all of the run's data with its hashes
  --pack                   pack the run's data into the folder data.cache and exit;
                           needs no accelerator. Training then reads the packed data
  --dry_run                print the model, its cost and its memory without training
  --target MACHINE         with --dry_run: compile for another machine, v5e-N, v5p-N,
                           v6e-N (TPUs) or h200-N, with its compiler; the machine is
                           not needed
  --coordinator HOST:PORT --processes N --process I
                           this is process I of N, and process 0 is on HOST; not needed
                           with torchrun, Slurm, Open MPI and TPU pods
  --wait SECONDS           how long to wait for the other processes to start (300)
  --heartbeat SECONDS      silence after which a process counts as dead, and jax ends
                           the others (20)
  --help [GROUP]           this text, with the values that --config gives; or only
                           the keys of one group, for instance --help model

The first signal (Ctrl-C, SIGTERM) saves a checkpoint after the current step and ends
the run, a second one exits at once. With several processes SIGTERM saves, and Ctrl-C
exits at once. Exit codes: 0 complete; 1 a loss or gradient is not finite, a gradient
is a spike, out of memory, or another process failed; 2 bad input; 130 and 143
interrupted by Ctrl-C and SIGTERM; 134 ended by jax because another process died or did
not start.
"""
OPTIONS = "model.attention.options."  # prefix of the keys that mechanisms declare
BOOLEANS = {
    **dict.fromkeys(("true", "1", "yes"), True),
    **dict.fromkeys(("false", "0", "no"), False),
}
FLAGS = (
    "--config, --config.KEY, --workdir, --dry_run, --target, --coordinator, "
    "--processes, --process, --wait, --heartbeat, --import, --allow, --pack, "
    "--verify, --help"
)


class Command(NamedTuple):
    """Meaning of a command line of train.py.

    Attributes:
        help: the group of keys whose help is wanted, "" for all; None without --help.
        target: the machine that a dry run compiles for.
        verify: first compare the data with its hashes.
        allow: keys that may differ from those of the checkpoint.
        pack: pack the data and exit.
    """

    config: config.Config
    workdir: epath.Path
    dry_run: bool
    help: str | None
    target: str | None = None
    verify: bool = False
    allow: tuple[str, ...] = ()
    pack: bool = False


class Parser(argparse.ArgumentParser):
    """argparse with ValueErrors, so that all bad input ends a program in one way."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(words: list[str]) -> Command:
    """Return the command of the words after `python train.py`.

    Raises:
        ValueError: a key, value, file, preset or word is unknown or not allowed; the
            message is one line.
    """
    flags, rest = _parse_flags(words)
    if flags.config is None and flags.help is None:
        raise ValueError(f"--config FILE is needed: {choices_in(Path('configs'))}")
    if flags.workdir == "":
        raise ValueError("--workdir is empty: give a folder, or leave it out")
    path, _, preset = (flags.config or "").partition(":")
    name = Path(path).stem + (f"-{preset}" if preset else "")
    workdir = storage.resolve(flags.workdir or Path("runs", name))
    with imports.using(flags.imports):
        return _command(flags, rest, Path(path), preset, workdir)


def parse_imports(words: list[str]) -> list[str]:
    """Return the values of --import. Raises: ValueError: a flag lacks its value."""
    return _parse_flags(words)[0].imports


def add_imports(parser: argparse.ArgumentParser) -> None:
    """Add the flag --import, which is parsed to the attribute `imports`."""
    parser.add_argument(
        "--import",
        action="append",
        default=[],
        dest="imports",
        metavar="FILE",
        help="first run this file or module, which adds mechanisms; stored: run the "
        "source that a run stores; show: print that source; may be repeated",
    )


def _command(
    flags: argparse.Namespace,
    rest: list[str],
    path: Path,
    preset: str,
    workdir: epath.Path,
) -> Command:
    """Return the command of the flags and of the words --config.KEY=VALUE.

    Options that mechanisms declare (`OPTIONS`) are set last, because the mechanisms
    depend on the other keys.

    Args:
        rest: the words that are no flags.
    """
    _run_stored_imports(workdir, flags.imports)
    if flags.config is None:
        tree = default().to_dict()
    else:
        tree = load_config(path, preset).to_dict()
    overrides = list(_overrides(rest))
    for key, text in overrides:
        if not key.startswith(OPTIONS):
            _set_key(tree, key, text)
    if origin := tree.get("init_from"):
        _run_stored_imports(origin, flags.imports)
    if flags.target is not None and not flags.dry_run:
        raise ValueError(f"--target {flags.target!r} is for --dry_run: give both")
    if flags.dry_run and (flags.pack or flags.verify):
        other = "--pack" if flags.pack else "--verify"
        raise ValueError(f"--dry_run packs and checks no data: leave {other} out")
    declared = config.declared_options(validation.from_dict(tree).model)
    for key, text in overrides:
        if key.startswith(OPTIONS):
            kind = type(_declared_option(key, declared).default)
            chosen = tree["model"]["attention"]["options"]
            chosen[key.removeprefix(OPTIONS)] = _parse_value(key, text, kind)
    options = validation.from_dict(tree)
    steps_of(options.log.profile, options.steps)
    if options.init_from:
        try:
            storage.resolve(options.init_from)
        except ValueError as error:
            raise ValueError(f"init_from: {error}") from None
    allow = tuple(filter(None, map(str.strip, ",".join(flags.allow).split(","))))
    for key in allow:
        if key.startswith(OPTIONS):
            _declared_option(key, declared)
        elif key != "imports":
            _type_of_key(key)
    return Command(
        options,
        workdir,
        flags.dry_run,
        flags.help,
        flags.target,
        flags.verify,
        allow,
        flags.pack,
    )


def _run_stored_imports(workdir: str | epath.Path, words: list[str]) -> None:
    """Run or print the source that a run stores, if --import stored or show is given.

    Call it before the configuration is checked, since the configuration may use
    mechanisms that the source adds.

    Args:
        words: the values of --import.
    """
    if {imports.STORED, imports.SHOW} & {*words}:
        from symjax.training.preflight import require_stored  # it loads Orbax

        require_stored(storage.resolve(workdir))


def parse_launch(words: list[str]) -> launch.Launch | None:
    """Return the position of this process among several; None if it runs alone.

    The position comes from the flags, or from the environment variables of a launcher.
    A dry run, packing and the help always run alone.

    Raises:
        ValueError: the flags or variables contradict each other.
    """
    flags, _ = _parse_flags(words)
    if flags.help is not None or flags.dry_run or flags.pack:
        return None
    wait = launch.number("--wait", flags.wait)
    heartbeat = launch.number("--heartbeat", flags.heartbeat)
    process = launch.launch(flags, os.environ)
    return process and process._replace(wait=wait, heartbeat=heartbeat)


def help_text(options: config.Config, group: str = "") -> str:
    """Return the usage, and every key with type, value, meaning and choices.

    Args:
        group: show only the keys of this group and of the groups in it; "" shows all.
    Raises:
        ValueError: there is no such group.
    """
    groups: dict[str, list[str]] = {}
    for name, kind, field in validation.fields():
        value = attrgetter(name)(options)
        lines = groups.setdefault(name.rpartition(".")[0], [])
        lines.append(f"  --config.{name} ({validation.type_name(kind)}, {value!r})")
        lines.append(f"      {field.metadata['meaning']}")
        if choices := validation.choices(field):
            lines.append(f"      one of: {', '.join(filter(None, choices))}")
    if lines := _declared_lines(options):
        groups[OPTIONS.removesuffix(".")] = lines
    chosen = [x for x in groups if not group or f"{x}.".startswith(f"{group}.")]
    if not chosen:
        choices = ", ".join(filter(None, groups))
        raise ValueError(f"--help {group}: choose from {choices}")
    shown = ["\n".join([f"{x or 'the run'}:", *groups[x]]) for x in chosen]
    if not group:
        shown = [USAGE, "Keys (type, value unless changed): meaning", *shown]
    return "\n\n".join(shown)


def _parse_flags(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags, and the words that are no flags (--config.KEY=VALUE)."""
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
    """Yield (key, text) of --config.KEY=VALUE and of --config.KEY VALUE."""
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


def _set_key(tree: dict[str, Any], key: str, text: str) -> None:
    """Set a dotted key of the configuration to the value of a text."""
    kind = _type_of_key(key)
    *groups, name = key.split(".")
    for group in groups:
        tree = tree[group]
    tree[name] = _parse_value(key, text, kind)


def _declared_option(key: str, declared: dict[str, Option]) -> Option:
    """Return the option that a mechanism declares under a key.

    Raises:
        ValueError: no mechanism of the model declares this key.
    """
    if (name := key.removeprefix(OPTIONS)) not in declared:
        keys = ", ".join(f"{OPTIONS}{x}" for x in declared)
        raise ValueError(
            f"config.{key} is unknown: "
            + (f"choose from {keys}" if keys else "the mechanism declares no options")
        )
    return declared[name]


def _declared_lines(options: config.Config) -> list[str]:
    """Return the help on the options that mechanisms declare themselves."""
    lines, values = [], config.own_options(options.model)
    used = config.mechanisms_of(options.model)
    for mechanism, form in MECHANISMS.items():
        for name, option in form.declared.items():
            value = values[name] if mechanism in used else option.default
            kind = validation.type_name(type(option.default))
            lines.append(f"  --config.{OPTIONS}{name} ({kind}, {value!r})")
            lines.append(f"      of {mechanism}: {option.meaning}")
            if option.choices:
                lines.append(f"      one of: {', '.join(option.choices)}")
    return lines


def _type_of_key(key: str) -> Any:
    """Return the type of a key.

    Raises:
        ValueError: there is no such key; the message names similar keys.
    """
    kinds = {name: kind for name, kind, _ in validation.fields()}
    if key not in kinds:
        group = key.rpartition(".")[0]
        in_group = [name for name in kinds if name.rpartition(".")[0] == group]
        near = difflib.get_close_matches(key, kinds, n=3) or in_group or list(kinds)
        raise ValueError(f"config.{key} is unknown: choose from {', '.join(near)}")
    return kinds[key]


def _parse_value(key: str, text: str, kind: Any) -> Any:
    """Return the value of a text for a key of type `kind`.

    Raises:
        ValueError: the text is no such value; the message names the key.
    """
    plain = typing.get_origin(kind) or kind
    try:
        if plain is bool:
            return BOOLEANS[text.lower()]
        if plain is tuple:
            item = typing.get_args(kind)[0]
            if item is str:  # names, separated by commas
                return tuple(filter(None, map(str.strip, text.split(","))))
            numbers = ast.literal_eval(text)
            return tuple(item(x) if type(x) is int else x for x in numbers)
        return plain(text)
    except (KeyError, TypeError, ValueError, SyntaxError):
        raise ValueError(
            f"config.{key} must be {validation.type_name(kind)}, got {text!r}"
        ) from None
