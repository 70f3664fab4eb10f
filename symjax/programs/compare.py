"""Several configurations over several seeds, with equal data and budget, in one table.

python -m symjax.programs.compare --configs configs/gpt.py:tiny,configs/sym.py:tiny \\
    --seeds 0,1,2 [--config.KEY=VALUE ...] [--out runs/compare] [--batches N]
python -m symjax.programs.compare --configs configs/digits.py \\
    --vary model.attention.mechanism=softmax,linear,matrix_function

python -m symjax.programs.compare --workdirs runs/gpt,runs/diff_sym

--vary makes a configuration of each value, and of each pair where it is given twice.
Every run is a workdir of train.py below --out, and is trained only as far as it is not
yet: the same command resumes after an interruption. Then every run is evaluated, and
compare.md, compare.csv, compare.json, lambda.csv and PNG curves are written. Table and
curves are of the same held-out batches: all, or --batches, or else evaluate.batches
where --config gives it. --workdirs compares runs that exist, and trains nothing; those
of one step that differ in their seed alone are one row. Exit codes are those of
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
from symjax.programs.compared_runs import Workdir, existing, items, plan, train
from symjax.storage import check_writable, resolve, resolve_url
from symjax.training.step import means

DIVISOR = "by n − 1"


class Evaluated(NamedTuple):
    """One finished run.

    Attributes:
        speed: tokens a second, the median of the lines of metrics.jsonl; None if there
            are none.
        curve: (step, held-out loss), on the batches of `losses`.
        tokens: that it was trained on.
        separate: documents do not see each other, and their first inputs, which may
            be their first tokens, are no targets.
        batches: held-out batches that it was evaluated on.
        all_batches: held-out batches that there are.
        unit: of the losses: nats per this.
        from_checkpoints: the curve has the checkpoints kept, because the evaluations
            during training were on another number of batches.
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
    parser = Parser(
        prog="python -m symjax.programs.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--configs", help="files with presets, between commas")
    which.add_argument("--workdirs", help="runs that exist, between commas")
    add("--vary", action="append", default=[], help="KEY=VALUE,VALUE of a config")
    add_imports(parser)
    add("--seeds", help="whole numbers, between commas (0)")
    add("--out", default="runs/compare", help="folder (%(default)s)")
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
        rest: words of a configuration.
    """
    if chosen.workdirs is not None:
        check_alone(chosen, rest)
        planned = {}
        runs = existing([*map(resolve, items("--workdirs", chosen.workdirs, str))])
    else:
        planned = plan(chosen, rest)
        runs = {name: [x.workdir for x in some] for name, some in planned.items()}
    figures.check_figures()
    check_writable(chosen.out, f"--out {chosen.out}")
    train(planned)
    evaluated = {
        name: [_announced(workdir, chosen.batches) for workdir in some]
        for name, some in runs.items()
    }
    check_documents(evaluated)
    check_batches(evaluated)
    found = compare(evaluated)
    print(report.to_text(found))
    text = "\n\n".join(map(report.to_markdown, found.tables))
    report.write(f"{text}\n".encode(), chosen.out / "compare.md", "--out")
    values = report.to_json({}, {"compare": found})
    report.write(values.encode(), chosen.out / "compare.json", "--out")
    report.write_folder({"compare": found}, chosen.out)


def check_alone(chosen: argparse.Namespace, rest: list[str]) -> None:
    """Raises: ValueError: a flag says what to train, beside --workdirs."""
    flags = {"--vary": chosen.vary, "--seeds": chosen.seeds}
    given = [name for name, value in flags.items() if value]
    if given or rest:
        raise ValueError(
            f"{(given + rest)[0]} is for runs to train: --workdirs compares those that "
            "exist"
        )


def _announced(workdir: Workdir, batches: int | None) -> Evaluated:
    with announce_if_slow(f"{workdir}: compiling and measuring"):
        return evaluate(workdir, batches)


def evaluate(workdir: Workdir, batches: int | None = None) -> Evaluated:
    run = load(workdir)
    rows = rows_of(epath.Path(workdir))
    speeds = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
    found = losses(run, batches)
    heldout = found["heldout"]
    curve = curve_of_run(run, rows, heldout["batches"])
    from_checkpoints = not curve
    if from_checkpoints:
        curve = curve_of_checkpoints(run, heldout["batches"])
    return Evaluated(
        run.parameters(),
        found,
        lambda_table(run.model()),
        statistics.median(speeds) if speeds else None,
        sorted((curve | {run.step: heldout["loss"]}).items()),
        run.step * run.config.batch_size * run.config.model.length,
        _leaves_out(run),
        heldout["batches"],
        heldout["all_batches"],
        run.examples.unit,
        from_checkpoints,
    )


def _leaves_out(run: LoadedRun) -> bool:
    """Return whether a token of every document is no target."""
    text = run.examples.text
    return run.examples.separate and not (text and text.shared)


def curve_of_run(
    run: LoadedRun, rows: list[dict[str, Any]], batches: int
) -> dict[int, float]:
    """Return step → held-out loss, of the evaluations on so many batches.

    Args:
        rows: of metrics.jsonl. Older ones do not say on how many batches they were,
            which the configuration does.
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
    """Return step → held-out loss on so many batches, of the checkpoints before."""
    shape = run.config.batch_size, run.config.model.length
    found = {}
    for at in history(run, print_warning):
        if at.step < run.step:
            rows = run.examples.heldout_batches(shape, batches)
            found[at.step] = means(
                run.program, at.params, at.constants, shape, rows
            ).loss
    return found


def check_documents(runs: dict[str, list[Evaluated]]) -> None:
    """Raises: ValueError: some leave out a token of every document, others do not."""
    found = {some[0].separate: name for name, some in runs.items()}
    if len(found) > 1:
        raise ValueError(
            f"{found[False]} joins documents and {found[True]} keeps them apart "
            "(data.documents): their losses are means over different tokens"
        )


def check_batches(runs: dict[str, list[Evaluated]]) -> None:
    """Raises: ValueError: some runs were evaluated on other parts of what is held
    out."""
    found = {
        (run.batches, run.all_batches): name for name, x in runs.items() for run in x
    }
    if len(found) > 1 and any(count < total for count, total in found):
        (first, one), (second, other), *_ = ((x, found[x]) for x in found)
        raise ValueError(
            f"{one} is evaluated on {first[0]} of {first[1]} held-out batches, {other} "
            f"on {second[0]} of {second[1]}, since their batches have other sizes: "
            "leave --batches out"
        )


def compare(runs: dict[str, list[Evaluated]]) -> Result:
    """Means over the seeds, and their standard deviation (n − 1)."""
    rows, lambdas, curves, bands = [], [], {}, {}
    every = list(itertools.chain(*runs.values()))
    unit, where = f"nats/{every[0].unit}", _batches(every)
    for name, seeds in runs.items():
        rows.append(_row(name, seeds, unit))
        if len({run.tokens for run in every}) > 1:
            rows[-1]["tokens"] = seeds[0].tokens
        if all("accuracy" in run.losses["heldout"] for run in seeds):
            found = [run.losses["heldout"]["accuracy"] for run in seeds]
            rows[-1]["accuracy"] = statistics.mean(found)
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
        "batches": every[0].batches,
        "all_batches": every[0].all_batches,
        "spread": f"standard deviation over seeds, {DIVISOR}",
        "configurations": rows,
        "curves": {
            name: {"step": x, "mean": y, "band": bands.get(name)}
            for name, (x, y) in curves.items()
        },
    }
    return Result({"compare": values}, text, tuple(tables), (figure,))


def _row(name: str, seeds: list[Evaluated], unit: str) -> dict[str, Any]:
    """One line of the table."""
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
    """The mean over seeds at the steps that all have, and one standard deviation
    around it; None of one seed."""
    found = [dict(run.curve) for run in seeds]
    steps = [step for step in found[0] if all(step in curve for curve in found)]
    points = [[curve[step] for curve in found] for step in steps]
    center, band = [*map(statistics.mean, points)], None
    if len(seeds) > 1:
        spread = [*map(statistics.stdev, points)]
        band = (
            [mean - width for mean, width in zip(center, spread, strict=True)],
            [mean + width for mean, width in zip(center, spread, strict=True)],
        )
    return ([*map(float, steps)], center), band


def _batches(runs: list[Evaluated]) -> str:
    """The held-out batches that all runs were evaluated on, in words."""
    counts = {(run.batches, run.all_batches) for run in runs}
    if len(counts) > 1:  # of several sizes, which cover the same text
        return "all held-out batches"
    [(count, total)] = counts
    return f"{'all' if count == total else f'{count} of'} {total} held-out batches"


def _mean(values: Iterable[float | None]) -> float | None:
    """None if one of them is not known."""
    known = list(values)
    return None if None in known else statistics.mean(known)  # pyright: ignore


def _bits(heldout: list[dict[str, Any]]) -> dict[str, float]:
    """Of models that write text; the others have none."""
    found = [x["bits_per_byte"] for x in heldout if "bits_per_byte" in x]
    return {"bits/byte": statistics.mean(found)} if found else {}


if __name__ == "__main__":
    run_and_exit(lambda: main(sys.argv[1:]))
