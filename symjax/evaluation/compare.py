"""Several configurations over several seeds, with equal data and budget, in one table.

python -m symjax.evaluation.compare --configs configs/gpt.py:tiny,configs/sym.py:tiny \\
    --seeds 0,1,2 [--config.KEY=VALUE ...] [--out runs/compare] [--batches N]
python -m symjax.evaluation.compare --configs configs/digits.py \\
    --vary model.attention.mechanism=softmax,linear,matrix_function

python -m symjax.evaluation.compare --workdirs runs/gpt,runs/diff_sym

--vary makes a configuration of each value, and of each pair where it is given twice.
Every run is a workdir of train.py below --out, and is trained only as far as it is not
yet: the same command goes on after an interruption. Then every run is evaluated, and
compare.md, compare.csv, lambda.csv and PNG curves are written. --workdirs compares runs
that exist, and trains nothing; those of one step that differ in their seed alone are
one row. Exit codes are those of train.py.
"""

import argparse
import itertools
import re
import statistics
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from symjax import config, figures
from symjax.data.sources import TEXT_SOURCES
from symjax.evaluation import report
from symjax.evaluation.language import losses
from symjax.evaluation.loading import load
from symjax.evaluation.results import Result, Table, table
from symjax.evaluation.weights import lambda_table
from symjax.figures import Lines
from symjax.files import check_writable
from symjax.places import anywhere, place
from symjax.training import loop
from symjax.training.checkpoint import Checkpoints
from symjax.training.commandline import Command, Parser, parse
from symjax.training.exit_codes import run_and_exit
from symjax.training.metrics import rows_of
from symjax.training.preflight import saved_meta, saved_options

Workdir = Path | epath.Path


class Evaluated(NamedTuple):
    """One finished run."""

    parameters: int
    losses: dict[str, Any]
    lambdas: list[dict[str, float]]
    # tokens a second, the median of the lines of metrics.jsonl; None: it is not there
    speed: float | None
    curve: list[tuple[int, float]]  # step, held-out loss
    tokens: int = 0  # that it was trained on
    separate: bool = False  # documents do not see each other, nor are guessed from one


def main(words: list[str]) -> None:
    parser = Parser(
        prog="python -m symjax.evaluation.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--configs", help="files with presets, between commas")
    which.add_argument("--workdirs", help="runs that exist, between commas")
    add("--vary", action="append", default=[], help="KEY=VALUE,VALUE of a config")
    add("--seeds", help="whole numbers, between commas (0)")
    add("--out", default="runs/compare", help="folder (%(default)s)")
    add("--batches", type=int, help="held-out batches to evaluate; all by default")
    chosen, rest = parser.parse_known_args(words)
    if chosen.batches is not None and chosen.batches < 1:
        raise ValueError(f"--batches must be at least 1, got {chosen.batches}")
    chosen.out = anywhere(chosen.out)
    if chosen.workdirs is not None:
        check_alone(chosen, rest)
        runs = existing([*map(place, _items("--workdirs", chosen.workdirs, str))])
        check_writable(chosen.out, f"--out {chosen.out}")
    else:
        runs = trained(chosen, rest)
    evaluated = {
        name: [evaluate(workdir, chosen.batches) for workdir in some]
        for name, some in runs.items()
    }
    check_documents(evaluated)
    found = compare(evaluated)
    print(report.to_text(found))
    text = "\n\n".join(map(report.to_markdown, found.tables))
    report.write(f"{text}\n".encode(), chosen.out / "compare.md", "--out")
    report.write_folder({"compare": found}, chosen.out)


def trained(chosen: argparse.Namespace, rest: list[str]) -> dict[str, list[Workdir]]:
    """The workdirs of configurations, a seed each, trained as far as they are not yet.

    Args:
        rest: words of a configuration.
    Raises:
        ValueError: something is refused, before anything is trained.
    """
    varied = [_values(text) for text in chosen.vary]
    check_words(rest, [values[0].partition("=")[0] for values in varied])
    files = _items("--configs", chosen.configs, str)
    seeds = _items("--seeds", chosen.seeds or "0", int)
    runs = commands(files, varied, seeds, rest, chosen.out)
    check_equal({name: some[0].config for name, some in runs.items()})
    figures.check_figures()
    for command in itertools.chain(*runs.values()):
        check_run(command)
    check_writable(chosen.out, f"--out {chosen.out}")
    # Seed by seed, so that all configurations meet the same conditions.
    for command in itertools.chain(*zip(*runs.values(), strict=True)):
        _train(command)
    return {name: [x.workdir for x in some] for name, some in runs.items()}


def check_alone(chosen: argparse.Namespace, rest: list[str]) -> None:
    """Raises: ValueError: a flag says what to train, beside --workdirs."""
    flags = {"--vary": chosen.vary, "--seeds": chosen.seeds}
    given = [name for name, value in flags.items() if value]
    if given or rest:
        raise ValueError(
            f"{(given + rest)[0]} is for runs to train: --workdirs compares those that "
            "exist"
        )


def existing(workdirs: list[Workdir]) -> dict[str, list[Workdir]]:
    """Runs by name; those of one step that differ in their seed alone are one.

    Raises:
        ValueError: there is no run, or one twice; runs have other examples or tokens,
            so that their losses cannot be compared.
    """
    metas = {workdir: _meta(workdir) for workdir in workdirs}
    if len(metas) < len(workdirs):
        twice = next(x for x in workdirs if workdirs.count(x) > 1)
        raise ValueError(f"--workdirs: {twice} stands twice")
    (first, one), *others = metas.items()
    for workdir, other in others:
        if _judged(other) != _judged(one):
            raise ValueError(
                f"{first} and {workdir} are judged by different targets "
                f"({_source(one)} and {_source(other)}): their losses cannot be "
                "compared"
            )
    found: dict[str, list[Workdir]] = {}
    seen: list[tuple[dict[str, Any], set[int], str]] = []  # of a row: a run, its seeds
    for workdir, meta in metas.items():
        seed = meta["config"]["seed"]
        alike = {**meta["config"], "seed": None, "step": meta["step"]}
        rows = (row for row in seen if row[0] == alike and seed not in row[1])
        row = next(rows, None) or (alike, set(), _name(workdir, found))
        if row not in seen:
            seen.append(row)
        row[1].add(seed)
        found.setdefault(row[2], []).append(workdir)
    figures.check_figures()
    return found


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


def check_equal(options: dict[str, config.Config]) -> None:
    """Refuse to compare runs that read other data, or another number of tokens.

    Raises:
        ValueError: naming two configurations and what they differ in.
    """

    def budget(one: config.Config) -> dict[str, Any]:
        tokens = one.steps * one.batch_size * one.model.length
        return {"data": one.data, "steps · batch_size · model.length": tokens}

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


def evaluate(workdir: Workdir, batches: int | None = None) -> Evaluated:
    run = load(workdir)
    rows = rows_of(epath.Path(workdir))
    speeds = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
    return Evaluated(
        run.parameters(),
        losses(run, batches),
        lambda_table(run.model()),
        statistics.median(speeds) if speeds else None,
        [
            (row["step"], row["heldout/loss"])
            for row in rows
            if row.get("heldout/loss") is not None
        ],
        run.step * run.config.batch_size * run.config.model.length,
        run.examples.separate,
    )


def check_documents(runs: dict[str, list[Evaluated]]) -> None:
    """Raises: ValueError: some keep documents apart, whose first token is no target."""
    found = {some[0].separate: name for name, some in runs.items()}
    if len(found) > 1:
        raise ValueError(
            f"{found[False]} joins documents and {found[True]} keeps them apart "
            "(data.documents): their losses are means over different tokens"
        )


def compare(runs: dict[str, list[Evaluated]]) -> Result:
    """Means over the seeds; the spread is their standard deviation."""
    rows, lambdas, curves = [], [], {}
    for name, seeds in runs.items():
        heldout = [run.losses["heldout"] for run in seeds]
        train = [run.losses["train"] for run in seeds]
        losses = [x["loss"] for x in heldout]
        speed = _mean(run.speed for run in seeds)
        row = {
            "configuration": name,
            "seeds": len(seeds),
            "parameters": seeds[0].parameters,
            "held-out": statistics.mean(losses),
            "spread": statistics.stdev(losses) if len(seeds) > 1 else None,
            **_bits(heldout),
            "train mode": _mean(x.get("loss") for x in train),
            "eval mode": _mean(x.get("loss_eval_mode") for x in train),
            "tokens/s": None if speed is None else round(speed),
        }
        if len({run.tokens for run in itertools.chain(*runs.values())}) > 1:
            row["tokens"] = seeds[0].tokens
        if all("accuracy" in x for x in heldout):
            row["accuracy"] = statistics.mean(x["accuracy"] for x in heldout)
        rows.append(row)
        for layer in zip(*(run.lambdas for run in seeds), strict=True):
            means = [statistics.mean(x[key] for x in layer) for key in layer[0]]
            lambdas.append((name, *means))
        found = [dict(run.curve) for run in seeds]
        steps = [step for step in found[0] if all(step in curve for curve in found)]
        means = [statistics.mean(curve[step] for curve in found) for step in steps]
        curves[name] = list(map(float, steps)), means
    tables = [table("compare", list(rows[0]), rows)]
    if lambdas:
        columns = ("configuration", "layer", "λ₁", "λ₂", "λ_init", "λ")
        tables.append(Table("lambda", columns, lambdas))
    title = "Held-out loss by step, the mean of the seeds"
    figure = Lines("heldout", "step", "held-out loss", curves, title=title)
    return Result({}, [], tuple(tables), (figure,))


def _mean(values: Iterable[float | None]) -> float | None:
    """None if one of them is not known."""
    known = list(values)
    return None if None in known else statistics.mean(known)  # pyright: ignore


def _bits(heldout: list[dict[str, Any]]) -> dict[str, float]:
    """Of models that write text; the others have none."""
    found = [x["bits_per_byte"] for x in heldout if "bits_per_byte" in x]
    return {"bits/byte": statistics.mean(found)} if found else {}


def _train(command: Command) -> None:
    """As far as it is not yet."""
    folder = command.workdir / "checkpoints"
    if command.config.steps not in Checkpoints(folder).steps():
        loop.run(command.config, command.workdir)


def _values(text: str) -> list[str]:
    """Raises: ValueError: there is no key, or no value."""
    key, equals, values = text.partition("=")
    if not key or not equals:
        raise ValueError(f"--vary must be KEY=VALUE,VALUE, got {text!r}")
    return [f"{key}={value}" for value in _items(f"--vary {key}", values, str)]


def _short(word: str) -> str:
    """`mechanism=linear` of `model.attention.mechanism=linear`."""
    key, _, value = word.partition("=")
    return f"{key.rpartition('.')[2]}={value}"


def _items(flag: str, text: str, kind: Callable) -> list[Any]:
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


if __name__ == "__main__":
    run_and_exit(lambda: main(sys.argv[1:]))
