"""The runs that `compare` puts side by side: of configurations, or that exist."""

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


def plan(chosen: argparse.Namespace, rest: list[str]) -> dict[str, list[Command]]:
    """The runs of configurations by name, a seed each.

    Args:
        rest: words of a configuration.
    Raises:
        ValueError: one of them is refused.
    """
    varied = [_values(text) for text in chosen.vary]
    check_words(rest, [values[0].partition("=")[0] for values in varied])
    files = items("--configs", chosen.configs, str)
    rest = [*rest, *with_batches(chosen, rest)]
    seeds = items("--seeds", chosen.seeds or "0", int)
    words = [*(f"--import={word}" for word in chosen.imports), *rest]
    runs = commands(files, varied, seeds, words, chosen.out)
    options = {name: some[0].config for name, some in runs.items()}
    check_equal(options, part=chosen.batches is not None)
    for command in itertools.chain(*runs.values()):
        check_run(command)
    return runs


def with_batches(chosen: argparse.Namespace, rest: list[str]) -> list[str]:
    """The words that let runs evaluate on the batches of the table as they train.

    Sets chosen.batches where only evaluate.batches of the configuration is given.
    """
    flag = "--config.evaluate.batches"
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, dest="batches")
    given = parser.parse_known_args(rest)[0].batches or ""
    if chosen.batches is None and given.isdecimal():  # or else `parse` refuses it
        chosen.batches = int(given) or None
    return [f"{flag}={chosen.batches or 0}"]


def train(runs: dict[str, list[Command]]) -> None:
    """As far as they are not yet; seed by seed, so that all configurations meet the
    same conditions."""
    for command in itertools.chain(*zip(*runs.values(), strict=True)):
        folder = command.workdir / "checkpoints"
        if command.config.steps not in Checkpoints(folder).steps():
            loop.run(command.config, command.workdir)


def existing(workdirs: list[Workdir]) -> dict[str, list[Workdir]]:
    """Runs by name; those of one step that differ in their seed alone are one.

    Raises:
        ValueError: there is no run, or one twice; runs have other examples or tokens,
            so that their losses cannot be compared.
    """
    metas, places = {}, set()
    for workdir in workdirs:
        real = str(workdir) if in_bucket(workdir) else os.path.realpath(workdir)
        if real in places:
            raise ValueError(f"--workdirs: {workdir} is given twice")
        places.add(real)
        metas[workdir] = _meta(workdir)
    (first, one), *others = metas.items()
    for workdir, other in others:
        if _judged(other) != _judged(one):
            raise ValueError(
                f"{first} and {workdir} are judged by different targets "
                f"({_source(one)} and {_source(other)}): their losses cannot be "
                "compared"
            )
    found: dict[str, dict[int, Workdir]] = {}  # name → seed → workdir
    alike: dict[str, dict[str, Any]] = {}  # name → the configuration of its runs
    for workdir, meta in metas.items():
        own = {**meta["config"], "seed": None, "step": meta["step"]}
        seed = meta["config"]["seed"]
        rows = (x for x in found if alike[x] == own and seed not in found[x])
        name = next(rows, None) or _name(workdir, found)
        alike[name] = own
        found.setdefault(name, {})[seed] = workdir
    return {name: list(seeds.values()) for name, seeds in found.items()}


def items(flag: str, text: str, kind: Callable) -> list[Any]:
    """Raises: ValueError: an item is none of the kind, or there are none."""
    words = filter(None, map(str.strip, text.split(",")))
    try:
        found = list(dict.fromkeys(map(kind, words)))
    except ValueError:
        raise ValueError(
            f"{flag} must be {kind.__name__}s with commas, got {text!r}"
        ) from None
    if not found:
        raise ValueError(f"{flag} is empty")
    return found


def check_words(rest: list[str], varied: list[str]) -> None:
    """Refuse what a run has from elsewhere, or what only train.py can do.

    Args:
        rest: the words that are not flags of this command.
        varied: the keys of --vary.
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
            raise ValueError(f"config.{key} is given twice: --vary gives its values")


def commands(
    files: list[str],
    varied: list[list[str]],
    seeds: list[int],
    rest: list[str],
    out: Workdir,
) -> dict[str, list[Command]]:
    """The runs by name of their configuration, a run a seed.

    Args:
        varied: of each key, the words KEY=VALUE; one of each goes into a configuration.
    Raises:
        ValueError: what train.py would refuse; two configurations of one name.
    """
    found: dict[str, list[Command]] = {}
    for file, *values in itertools.product(files, *varied):
        path, _, preset = file.partition(":")
        parts = [Path(path).stem, *filter(None, [preset]), *map(_short, values)]
        name = "-".join(parts)
        if name in found:
            raise ValueError(f"{name} is there twice")
        words = ["--config", file, *rest, *(f"--config.{value}" for value in values)]
        found[name] = [
            parse([*words, f"--config.seed={n}", "--workdir", f"{out / name}-seed{n}"])
            for n in seeds
        ]
    return found


def check_equal(options: dict[str, config.Config], *, part: bool = False) -> None:
    """Refuse to compare runs that read other data, or another number of tokens.

    Args:
        part: they are evaluated on some of the held-out batches, which are of the same
            text where they have one size.
    Raises:
        ValueError: naming two configurations and what they differ in.
    """

    def budget(one: config.Config) -> dict[str, Any]:
        tokens = one.steps * one.batch_size * one.model.length
        found = {"data": one.data, "steps · batch_size · model.length": tokens}
        if part:
            found["batch_size, which --batches counts,"] = one.batch_size
        return found

    (first, one), *others = options.items()
    for name, other in others:
        for what, value in budget(one).items():
            if value != budget(other)[what]:
                raise ValueError(
                    f"{first} and {name} differ in {what} ({value} and "
                    f"{budget(other)[what]}): set it for all with --config.KEY=VALUE"
                )


def check_run(command: Command) -> None:
    """Refuse a workdir in which other runs have been.

    Raises:
        ValueError: it is of another configuration, or of another number of steps,
            which a schedule depends on.
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


def _values(text: str) -> list[str]:
    """Raises: ValueError: there is no key, or no value."""
    key, equals, values = text.partition("=")
    if not key or not equals:
        raise ValueError(f"--vary must be KEY=VALUE,VALUE, got {text!r}")
    return [f"{key}={value}" for value in items(f"--vary {key}", values, str)]


def _short(word: str) -> str:
    """`mechanism=linear` of `model.attention.mechanism=linear`."""
    key, _, value = word.partition("=")
    return f"{key.rpartition('.')[2]}={value}"


def _meta(workdir: Workdir) -> dict[str, Any]:
    """Raises: ValueError: there is no checkpoint."""
    if not workdir.is_dir():
        raise ValueError(f"no workdir {str(workdir)!r}: train.py makes one")
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        return checkpoints.read_meta()


def _name(workdir: Workdir, taken: Collection[str]) -> str:
    """That of the folder, without its seed; the path where another has this name."""
    name = re.sub(r"-seed\d+$", "", workdir.absolute().name)
    return name if name not in taken else str(workdir)


def _judged(meta: dict[str, Any]) -> tuple[Any, ...]:
    """What a loss is a mean over: examples, their tokens, and what is asked of them."""
    language = (meta.get("examples") or {}).get("language")
    model = meta["config"]["model"]
    return meta["data"]["sha256"], language, model["kind"] == "encoder"


def _source(meta: dict[str, Any]) -> str:
    """In a few words."""
    data, kind = meta["config"]["data"], meta["config"]["model"]["kind"]
    tokens = data["tokenizer"] if data["source"] in TEXT_SOURCES else "no tokenizer"
    return f"{data['source']} {meta['data']['sha256'][:8]}, {tokens}, {kind}"
