"""Several configurations over several seeds, with equal data and budget, in one table.

python -m symjax.programs.compare --configs configs/gpt.py:tiny,configs/sym.py:tiny \\
    --seeds 0,1,2 [--config.KEY=VALUE ...] [--out runs/compare] [--batches N]
python -m symjax.programs.compare --configs configs/digits.py \\
    --vary model.attention.mechanism=softmax,linear,matrix_function

python -m symjax.programs.compare --workdirs runs/gpt,runs/diff_sym

--configs trains one run for each configuration and seed, as a workdir of train.py below
--out. --vary makes a configuration of each value, and of each pair of values if it is
given twice. Complete runs are not trained again, so the same command continues after an
interruption. Then all runs are evaluated, and compare.md, compare.csv, compare.json,
lambda.csv and PNG curves are written to --out.

--workdirs compares existing runs and trains nothing. Runs of the same step that differ
only in their seed make one row.

Table and curves use the same held-out batches: --batches if it is given, otherwise
--config.evaluate.batches if it is given, otherwise all. Exit codes are those of
train.py.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from symjax.starting import announce

if __name__ == "__main__":
    announce("compare")

from etils import epath

from symjax import figures
from symjax.distributed.exit_codes import print_warning, run_and_exit
from symjax.evaluation import report
from symjax.evaluation.loading import LoadedRun, history, load
from symjax.evaluation.measures.language import losses
from symjax.evaluation.results import Result, Table, announce_if_slow, table
from symjax.figures import Band, Curve, Lines
from symjax.imports import using
from symjax.models.lambdas import lambda_table
from symjax.monitor.metrics import rows_of
from symjax.programs.commandline import Parser, add_imports
from symjax.programs.compared_runs import (
    Workdir,
    group_runs,
    plan_runs,
    split_list,
    train_missing,
)
from symjax.storage import check_writable, resolve, resolve_url
from symjax.training.step import means

DIVISOR = "by n − 1"  # of standard deviations, for texts


class Evaluated(NamedTuple):
    """Measurements of one run.

    Attributes:
        losses: as `measures.language.losses` returns them.
        lambdas: a record for each differential layer.
        speed: median of the tokens per second in metrics.jsonl; None if it has none.
        curve: (step, held-out loss), on the batches of `losses`.
        tokens: number of tokens of training.
        separate: whether one token of every document is not a target, because documents
            are kept apart.
        batches: number of held-out batches that were evaluated.
        all_batches: number of held-out batches in all.
        unit: what losses in nats are per: token, byte, label, ….
        from_checkpoints: whether the curve was measured on the kept checkpoints,
            because training evaluated on another number of batches.
    """

    parameters: int
    losses: dict[str, Any]
    lambdas: list[dict[str, float]]
    speed: float | None
    curve: list[tuple[int, float]]
    tokens: int = 0
    separate: bool = False
    batches: int = 0
    all_batches: int = 0
    unit: str = "token"
    from_checkpoints: bool = False


def main(words: list[str]) -> None:
    """Parse the words of the command line and run the comparison."""
    parser = Parser(
        prog="python -m symjax.programs.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--configs", help="FILE[:preset], separated by commas")
    which.add_argument("--workdirs", help="existing runs, separated by commas")
    add("--vary", action="append", default=[], help="KEY=VALUE,VALUE: a key's values")
    add_imports(parser)
    add("--seeds", help="whole numbers, separated by commas (0)")
    add("--out", default="runs/compare", help="folder of the results (%(default)s)")
    add("--batches", type=int, help="held-out batches; all by default")
    chosen, rest = parser.parse_known_args(words)
    if chosen.batches is not None and chosen.batches < 1:
        raise ValueError(f"--batches must be at least 1, got {chosen.batches}")
    chosen.out = resolve_url(chosen.out)
    with using(chosen.imports):
        run(chosen, rest)


def run(chosen: argparse.Namespace, rest: list[str]) -> None:
    """Train the runs that are not complete, evaluate all and write the comparison.

    Args:
        rest: the words --config.KEY=VALUE.
    """
    if chosen.workdirs is not None:
        check_nothing_to_train(chosen, rest)
        planned = {}
        runs = group_runs(
            [*map(resolve, split_list("--workdirs", chosen.workdirs, str))]
        )
    else:
        planned = plan_runs(chosen, rest)
        runs = {name: [x.workdir for x in seeds] for name, seeds in planned.items()}
    figures.check_figures()
    check_writable(chosen.out, f"--out {chosen.out}")
    train_missing(planned)
    evaluated: dict[str, list[Evaluated]] = {}
    for name, workdirs in runs.items():
        for workdir in workdirs:
            with announce_if_slow(f"{workdir}: compiling and measuring"):
                measured = evaluate(workdir, chosen.batches)
            evaluated.setdefault(name, []).append(measured)
    check_documents(evaluated)
    check_batches(evaluated)
    comparison = compare(evaluated)
    print(report.to_text(comparison))
    text = "\n\n".join(map(report.to_markdown, comparison.tables))
    report.write(f"{text}\n".encode(), chosen.out / "compare.md", "--out")
    values = report.to_json({}, {"compare": comparison})
    report.write(values.encode(), chosen.out / "compare.json", "--out")
    report.write_folder({"compare": comparison}, chosen.out)


def check_nothing_to_train(chosen: argparse.Namespace, rest: list[str]) -> None:
    """Refuse flags on what to train beside --workdirs. Raises: ValueError."""
    flags = {"--vary": chosen.vary, "--seeds": chosen.seeds}
    given = [name for name, value in flags.items() if value]
    if given or rest:
        raise ValueError(
            f"{(given + rest)[0]} is for runs to train: --workdirs compares those that "
            "exist"
        )


def evaluate(workdir: Workdir, batches: int | None = None) -> Evaluated:
    """Measure the newest checkpoint of a run on so many held-out batches, or on all."""
    run = load(workdir)
    rows = rows_of(epath.Path(workdir))
    speeds = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
    measured = losses(run, batches)
    heldout = measured["heldout"]
    curve = curve_of_run(run, rows, heldout["batches"])
    from_checkpoints = not curve
    if from_checkpoints:
        curve = curve_of_checkpoints(run, heldout["batches"])
    return Evaluated(
        run.parameters(),
        measured,
        lambda_table(run.model()),
        statistics.median(speeds) if speeds else None,
        sorted((curve | {run.step: heldout["loss"]}).items()),
        run.step * run.config.batch_size * run.config.model.length,
        _skips_a_token(run),
        heldout["batches"],
        heldout["all_batches"],
        run.examples.unit,
        from_checkpoints,
    )


def _skips_a_token(run: LoadedRun) -> bool:
    """Return whether one token of every document is not a target."""
    text = run.examples.text
    return run.examples.separate and not (text and text.shared)


def curve_of_run(
    run: LoadedRun, rows: list[dict[str, Any]], batches: int
) -> dict[int, float]:
    """Return step → held-out loss, from the evaluations of training on `batches`.

    Args:
        rows: of metrics.jsonl. In older runs they do not say their number of batches;
            then it is that of the configuration.
    """
    shape = run.config.batch_size, run.config.model.length
    total = run.examples.heldout_count(shape)
    usual = min(run.config.evaluate.batches or total, total)
    return {
        row["step"]: row["heldout/loss"]
        for row in rows
        if row["step"] <= run.step
        and row.get("heldout/loss") is not None
        and row.get("heldout/batches", usual) == batches
    }


def curve_of_checkpoints(run: LoadedRun, batches: int) -> dict[int, float]:
    """Return step → held-out loss on `batches`, measured on the earlier checkpoints."""
    shape = run.config.batch_size, run.config.model.length
    curve = {}
    for earlier in history(run, print_warning):
        if earlier.step < run.step:
            rows = run.examples.heldout_batches(shape, batches)
            arrays = earlier.params, earlier.constants
            curve[earlier.step] = means(run.program, *arrays, shape, rows).loss
    return curve


def check_documents(runs: dict[str, list[Evaluated]]) -> None:
    """Refuse to compare joined and separate documents, which have different targets.

    Raises:
        ValueError: naming a run of each.
    """
    names = {seeds[0].separate: name for name, seeds in runs.items()}
    if len(names) > 1:
        raise ValueError(
            f"{names[False]} joins documents and {names[True]} keeps them apart "
            "(data.documents): their losses are means over different tokens"
        )


def check_batches(runs: dict[str, list[Evaluated]]) -> None:
    """Refuse runs that were evaluated on different parts of the held-out examples.

    Raises:
        ValueError: naming two runs and their numbers of batches.
    """
    names = {
        (run.batches, run.all_batches): name
        for name, seeds in runs.items()
        for run in seeds
    }
    if len(names) > 1 and any(count < total for count, total in names):
        (first, first_name), (second, second_name), *_ = names.items()
        raise ValueError(
            f"{first_name} is evaluated on {first[0]} of {first[1]} held-out batches, "
            f"{second_name} on {second[0]} of {second[1]}, since their batches have "
            "other sizes: leave --batches out"
        )


def compare(runs: dict[str, list[Evaluated]]) -> Result:
    """Return tables and curves of means and standard deviations (n − 1) over seeds."""
    rows, lambdas, curves, bands = [], [], {}, {}
    all_runs = list(itertools.chain(*runs.values()))
    unit, where = f"nats/{all_runs[0].unit}", _batches_text(all_runs)
    for name, seeds in runs.items():
        rows.append(_row(name, seeds, unit))
        if len({run.tokens for run in all_runs}) > 1:
            rows[-1]["tokens"] = seeds[0].tokens
        if all("accuracy" in run.losses["heldout"] for run in seeds):
            accuracies = [run.losses["heldout"]["accuracy"] for run in seeds]
            rows[-1]["accuracy"] = statistics.mean(accuracies)
        for layer in zip(*(run.lambdas for run in seeds), strict=True):
            averages = [statistics.mean(x[key] for x in layer) for key in layer[0]]
            lambdas.append((name, *averages))
        curves[name], band = _curve(seeds)
        if band is not None:
            bands[name] = band
    tables = [table("compare", list(rows[0]), rows)]
    if lambdas:
        columns = ("configuration", "layer", "λ₁", "λ₂", "λ_init", "λ")
        tables.append(Table("lambda", columns, lambdas))
    text = [
        f"held-out losses on {where}, table and figure alike: means over seeds",
        f"std: the standard deviation over seeds, {DIVISOR}; - of one seed",
        f"train mode, eval mode: {unit} of training text with and without dropout",
    ]
    text += [
        f"{name}: the figure shows only the kept checkpoints, since the run's own "
        f"evaluations were not on {where}"
        for name, seeds in runs.items()
        if any(run.from_checkpoints for run in seeds)
    ]
    title = "Held-out loss by step"
    if bands:
        title += ": the mean over seeds, and a band of one standard deviation"
    label = f"{unit}, on {where}"
    figure = Lines("heldout", "step", label, curves, title=title, bands=bands)
    values = {
        "unit": unit,
        "batches": all_runs[0].batches,
        "all_batches": all_runs[0].all_batches,
        "spread": f"standard deviation over seeds, {DIVISOR}",
        "configurations": rows,
        "curves": {
            name: {"step": x, "mean": y, "band": bands.get(name)}
            for name, (x, y) in curves.items()
        },
    }
    return Result({"compare": values}, text, tuple(tables), (figure,))


def _row(name: str, seeds: list[Evaluated], unit: str) -> dict[str, Any]:
    """Return a row of the table, means over the seeds of a configuration."""
    heldout = [run.losses["heldout"] for run in seeds]
    train = [run.losses["train"] for run in seeds]
    losses = [x["loss"] for x in heldout]
    speed = _mean(run.speed for run in seeds)
    return {
        "configuration": name,
        "seeds": len(seeds),
        "parameters": seeds[0].parameters,
        f"held-out ({unit})": statistics.mean(losses),
        "std over seeds": statistics.stdev(losses) if len(seeds) > 1 else None,
        **_bits(heldout),
        "train mode": _mean(x.get("loss") for x in train),
        "eval mode": _mean(x.get("loss_eval_mode") for x in train),
        "tokens/s": None if speed is None else round(speed),
    }


def _curve(seeds: list[Evaluated]) -> tuple[Curve, Band | None]:
    """Return the mean curve over seeds, and a band of one standard deviation around it.

    The curve has the steps that all seeds have; a single seed has no band.
    """
    by_seed = [dict(run.curve) for run in seeds]
    steps = [step for step in by_seed[0] if all(step in curve for curve in by_seed)]
    points = [[curve[step] for curve in by_seed] for step in steps]
    center, band = [*map(statistics.mean, points)], None
    if len(seeds) > 1:
        spread = [*map(statistics.stdev, points)]
        band = (
            [mean - width for mean, width in zip(center, spread, strict=True)],
            [mean + width for mean, width in zip(center, spread, strict=True)],
        )
    return ([*map(float, steps)], center), band


def _batches_text(runs: list[Evaluated]) -> str:
    """Return in words the held-out batches that all runs were evaluated on."""
    counts = {(run.batches, run.all_batches) for run in runs}
    if len(counts) > 1:  # batches of several sizes: all of them cover the same text
        return "all held-out batches"
    [(count, total)] = counts
    return f"{'all' if count == total else f'{count} of'} {total} held-out batches"


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean; None if a value is None."""
    numbers = list(values)
    return None if None in numbers else statistics.mean(numbers)  # pyright: ignore


def _bits(heldout: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mean of the bits per byte; {} if the runs are not models of text."""
    bits = [x["bits_per_byte"] for x in heldout if "bits_per_byte" in x]
    return {"bits/byte": statistics.mean(bits)} if bits else {}


if __name__ == "__main__":
    run_and_exit(lambda: main(sys.argv[1:]))
