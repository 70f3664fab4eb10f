"""The runs that `compare` compares: planned from configurations, or existing ones.

With --configs, `plan_runs` plans one run for each configuration, --vary value, --tune
value and seed, and `train_missing` trains a run that is not complete. With --workdirs,
`group_runs` groups existing runs that differ only in their seed.
"""

import argparse
import itertools
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from etils import epath

from symjax import config
from symjax.checkpoints.checkpoint import Checkpoints
from symjax.data.sources.table import TEXT_SOURCES
from symjax.programs.commandline import Command, Parser, parse
from symjax.storage import in_bucket
from symjax.training import loop
from symjax.training.preflight import saved_meta, saved_options

Workdir = Path | epath.Path
# Name of a configuration → values of the tuned keys, or "" → a command for each seed.
Plan = dict[str, dict[str, list[Command]]]


def plan_runs(chosen: argparse.Namespace, rest: list[str]) -> Plan:
    """Return the runs to train, by configuration, tuned value and seed.

    Args:
        rest: the words --config.KEY=VALUE, which apply to every run.
    Raises:
        ValueError: a run is refused, or the runs cannot be compared.
    """
    varied = [_values("--vary", text) for text in chosen.vary]
    tuned = [_values("--tune", text) for text in chosen.tune]
    check_words(rest, [values[0].partition("=")[0] for values in (*varied, *tuned)])
    files = split_list("--configs", chosen.configs, str)
    rest = [*rest, *agree_on_batches(chosen, rest)]
    seeds = split_list("--seeds", chosen.seeds or "0", int)
    words = [*(f"--import={word}" for word in chosen.imports), *rest]
    plan = parse_runs(files, varied, tuned, seeds, words, chosen.out)
    options = {
        " with ".join(filter(None, (name, value))): commands[0].config
        for name, values in plan.items()
        for value, commands in values.items()
    }
    check_equal(options, part=chosen.batches is not None, tuned=bool(tuned))
    return plan


def agree_on_batches(chosen: argparse.Namespace, rest: list[str]) -> list[str]:
    """Return the words that make training evaluate on the batches of the final table.

    If --config.evaluate.batches is given without --batches, `chosen.batches` is set to
    its value.
    """
    flag = "--config.evaluate.batches"
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, dest="batches")
    batches = parser.parse_known_args(rest)[0].batches or ""
    if chosen.batches is None and batches.isdecimal():  # `parse` refuses other values
        chosen.batches = int(batches) or None
    return [f"{flag}={chosen.batches or 0}"]


def train_missing(command: Command) -> None:
    """Train a run unless it is complete."""
    folder = command.workdir / "checkpoints"
    if command.config.steps not in Checkpoints(folder).steps():
        loop.run(command.config, command.workdir)


def group_runs(workdirs: list[Workdir]) -> dict[str, list[Workdir]]:
    """Group existing runs that differ only in their seed, and name each group.

    The end -seedN of `init_from` may differ with the seed too: seed 0 may begin with
    FOLDER-seed0, and seed 1 with FOLDER-seed1.

    Raises:
        ValueError: a run is missing or given twice, or the runs have different targets,
            so that their losses cannot be compared.
    """
    metas, paths = {}, set()
    for workdir in workdirs:
        path = str(workdir) if in_bucket(workdir) else os.path.realpath(workdir)
        if path in paths:
            raise ValueError(f"--workdirs: {workdir} is given twice")
        paths.add(path)
        metas[workdir] = _read_meta(workdir)
    (first, first_meta), *others = metas.items()
    for workdir, meta in others:
        if _targets(meta) != _targets(first_meta):
            raise ValueError(
                f"{first} and {workdir} are judged by different targets "
                f"({_source(first_meta)} and {_source(meta)}): their losses cannot be "
                "compared"
            )
    groups: dict[str, dict[int, Workdir]] = {}  # name → seed → workdir
    configs: dict[str, dict[str, Any]] = {}  # name → the configuration of its runs
    for workdir, meta in metas.items():
        seed = meta["config"]["seed"]
        config_of_run = {**meta["config"], "seed": None, "step": meta["step"]}
        begins = config_of_run.get("init_from") or ""
        config_of_run["init_from"] = begins.removesuffix(f"-seed{seed}")
        fitting = (
            name
            for name, group in groups.items()
            if configs[name] == config_of_run and seed not in group
        )
        name = next(fitting, None) or _name(workdir, groups)
        configs[name] = config_of_run
        groups.setdefault(name, {})[seed] = workdir
    return {name: list(seeds.values()) for name, seeds in groups.items()}


def split_list(flag: str, text: str, kind: Callable) -> list[Any]:
    """Return the different items of a comma-separated list.

    Args:
        kind: `str` or `int`, applied to every item.
    Raises:
        ValueError: an item is not of this kind, or the list is empty.
    """
    words = filter(None, map(str.strip, text.split(",")))
    try:
        values = list(dict.fromkeys(map(kind, words)))
    except ValueError:
        raise ValueError(
            f"{flag} must be {kind.__name__}s with commas, got {text!r}"
        ) from None
    if not values:
        raise ValueError(f"{flag} is empty")
    return values


def check_words(rest: list[str], varied: list[str]) -> None:
    """Refuse keys that other flags set, and flags that this program does not have.

    Args:
        rest: the words that are not flags of this program.
        varied: the keys of --vary and --tune.
    Raises:
        ValueError: naming the word.
    """
    flags = [word.partition("=")[0] for word in rest if word.startswith("--")]
    for flag in flags:
        if not flag.startswith("--config."):
            raise ValueError(f"{flag} is unknown: see --help")
    if "seed" in varied or "--config.seed" in flags:
        raise ValueError("seeds are given by --seeds, not as config.seed")
    for key in varied:
        if varied.count(key) > 1 or f"--config.{key}" in flags:
            raise ValueError(
                f"config.{key} is given twice: --vary or --tune gives its values"
            )


def parse_runs(
    files: list[str],
    varied: list[list[str]],
    tuned: list[list[str]],
    seeds: list[int],
    rest: list[str],
    out: Workdir,
) -> Plan:
    """Return the commands of all runs.

    Args:
        varied: the words KEY=VALUE of each key of --vary. Every combination of one
            word per key makes a configuration.
        tuned: the words of each key of --tune. Every combination of them is trained
            with the first seed.
        rest: words for every run.
    Raises:
        ValueError: train.py would refuse a run, or two configurations have the same
            name.
    """
    plan: Plan = {}
    for file, *values in itertools.product(files, *varied):
        path, _, preset = file.partition(":")
        parts = [Path(path).stem, *filter(None, [preset]), *map(_short, values)]
        name = "-".join(parts)
        if name in plan:
            raise ValueError(f"two configurations have the same name {name}")
        plan[name] = {}
        for choice in itertools.product(*tuned):
            label = ", ".join(map(_short, choice))
            folder = "-".join([name, *map(_short, choice)])
            keys = (f"--config.{value}" for value in (*values, *choice))
            words = ["--config", file, *rest, *keys]
            plan[name][label] = [
                parse(
                    [*words, f"--config.seed={n}", f"--workdir={out / folder}-seed{n}"]
                )
                for n in seeds
            ]
    return plan


def check_equal(
    options: dict[str, config.Config], *, part: bool = False, tuned: bool = False
) -> None:
    """Refuse runs that train on different data or on different numbers of tokens.

    Args:
        part: whether only some of the held-out batches may be evaluated. Then the runs
            must also have the same batch size.
        tuned: whether the held-out rows are divided (`tuned.split`). Then the rows of
            all runs must have the same length.
    Raises:
        ValueError: naming two configurations and their difference.
    """

    def budget(chosen: config.Config) -> dict[str, Any]:
        tokens = chosen.steps * chosen.batch_size * chosen.model.length
        values = {"data": chosen.data, "steps · batch_size · model.length": tokens}
        if part:
            values["batch_size, the unit of --batches,"] = chosen.batch_size
        if tuned:
            values["model.length, by which --tune divides the held-out rows,"] = (
                chosen.model.length
            )
        return values

    (first, reference), *others = options.items()
    for name, other in others:
        for what, value in budget(reference).items():
            if value != budget(other)[what]:
                raise ValueError(
                    f"{first} and {name} differ in {what} ({value} and "
                    f"{budget(other)[what]}): set it for all with --config.KEY=VALUE"
                )


def check_run(command: Command) -> None:
    """Refuse a workdir that holds another run.

    Raises:
        ValueError: its run has another configuration, or another number of steps. The
            learning rate schedule depends on that number.
    """
    meta = saved_meta(command.config, command.workdir)
    if meta is None:
        return
    saved = saved_options(meta, command.workdir)
    if saved.steps != command.config.steps:
        raise ValueError(
            f"{command.workdir} holds a run of {saved.steps} steps, not "
            f"{command.config.steps}: use another --out"
        )


def _values(flag: str, text: str) -> list[str]:
    """Return the words KEY=VALUE of one --vary or --tune.

    Raises:
        ValueError: the key or the values are missing.
    """
    key, equals, values = text.partition("=")
    if not key or not equals:
        raise ValueError(f"{flag} must be KEY=VALUE,VALUE, got {text!r}")
    return [f"{key}={value}" for value in split_list(f"{flag} {key}", values, str)]


def _short(word: str) -> str:
    """Shorten `model.attention.mechanism=linear` to `mechanism=linear`."""
    key, _, value = word.partition("=")
    return f"{key.rpartition('.')[2]}={value}"


def _read_meta(workdir: Workdir) -> dict[str, Any]:
    """Return the meta of the newest checkpoint. Raises: ValueError: there is none."""
    if not workdir.is_dir():
        raise ValueError(f"no workdir {str(workdir)!r}: train.py makes one")
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        return checkpoints.read_meta()


def _name(workdir: Workdir, taken: Collection[str]) -> str:
    """Return the folder's name without its seed, or the path if that name is taken."""
    name = re.sub(r"-seed\d+$", "", workdir.absolute().name)
    return name if name not in taken else str(workdir)


def _targets(meta: dict[str, Any]) -> tuple[Any, ...]:
    """Return what determines the targets of a loss: data, tokenizer, kind of model."""
    language = (meta.get("examples") or {}).get("language")
    model = meta["config"]["model"]
    return meta["data"]["sha256"], language, model["kind"] == "encoder"


def _source(meta: dict[str, Any]) -> str:
    """Describe the data and the kind of the model in a few words."""
    data, kind = meta["config"]["data"], meta["config"]["model"]["kind"]
    tokens = data["tokenizer"] if data["source"] in TEXT_SOURCES else "no tokenizer"
    return f"{data['source']} {meta['data']['sha256'][:8]}, {tokens}, {kind}"
