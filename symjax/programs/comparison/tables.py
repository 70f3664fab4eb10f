"""Tables, figures and JSON of the measurements of all configurations."""

import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from symjax.evaluation.results import Cell, Result, Table, table
from symjax.figures import Band, Curve, Dots, Lines, Spread
from symjax.programs.comparison.matched import Match
from symjax.programs.comparison.measured import Evaluated
from symjax.programs.comparison.paired import CONFIDENCE, Difference, paired_difference
from symjax.programs.comparison.tuned import PARTS, Choice

DIVISOR = "by n − 1"  # the divisor of standard deviations, in words
PERCENT = f"{100 * CONFIDENCE:.0f} %"
INTERVAL = f"{PERCENT} interval of Student's t"


class Fairness(NamedTuple):
    """Conditions of a comparison.

    Attributes:
        baseline: the configuration that differences are taken from.
        matches: the feed-forward sizes of --match.
        choices: the values of --tune.
    """

    baseline: str
    matches: Sequence[Match] = ()
    choices: Sequence[Choice] = ()

    def lines(self) -> list[str]:
        """Return the conditions in words."""
        lines = [f"matched: {match}" for match in self.matches]
        lines += [f"tuned: {choice}" for choice in self.choices]
        if self.choices:
            lines.append(
                f"tuned values have the least loss on 1/{PARTS} of the held-out rows, "
                "first seed; held-out losses are measured on the other rows"
            )
        return lines


def compare(runs: dict[str, list[Evaluated]], fairness: Fairness) -> Result:
    """Return the comparison: tables, figures, and lines that explain the numbers.

    Numbers are means over seeds; standard deviations have the divisor n − 1.
    """
    rows, lambdas, curves, bands = [], [], {}, {}
    all_runs = list(itertools.chain(*runs.values()))
    unit, where = f"nats/{all_runs[0].unit}", _batches_text(all_runs)
    where += " of the rows not used to tune" if fairness.choices else ""
    tuned = {choice.name: choice.value for choice in fairness.choices}
    for name, seeds in runs.items():
        rows.append(_row(name, seeds, unit))
        if tuned:
            rows[-1]["tuned"] = tuned[name]
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
    loss = f"held-out ({unit})"
    paired = [*_differences(runs, fairness.baseline, loss)]
    differences = [_record(*difference) for difference in paired]
    measured = _task_records(runs)
    tables = [table("compare", list(rows[0]), rows)]
    if differences:
        tables.append(table("differences", list(differences[0]), differences))
    if measured:
        tables.append(_task_table(measured))
    if lambdas:
        columns = ("configuration", "layer", "λ₁", "λ₂", "λ_init", "λ")
        tables.append(Table("lambda", columns, lambdas))
    values = {
        "unit": unit,
        "batches": all_runs[0].batches,
        "all_batches": all_runs[0].all_batches,
        "spread": f"standard deviation over seeds, {DIVISOR}",
        "baseline": fairness.baseline,
        "interval": f"{INTERVAL}, of the differences by seed",
        "matched": [match._asdict() for match in fairness.matches],
        "tuned": [choice._asdict() for choice in fairness.choices],
        "configurations": rows,
        "differences": differences,
        "tasks": measured,
        "curves": {
            name: {"step": x, "mean": y, "band": bands.get(name)}
            for name, (x, y) in curves.items()
        },
    }
    text = _lines(runs, fairness, unit, where)
    drawn: tuple[Lines | Dots, ...] = (_figure(curves, bands, f"{unit}, on {where}"),)
    if differences:
        label = f"held-out loss − that of {fairness.baseline}, {unit}"
        by_name = {name: found for name, measure, found in paired if measure == loss}
        drawn += (_difference_figure(by_name, label),)
    return Result({"compare": values}, text, tuple(tables), drawn)


def _lines(
    runs: dict[str, list[Evaluated]], fairness: Fairness, unit: str, where: str
) -> list[str]:
    """Return lines that say how the numbers were measured."""
    lines = [
        f"held-out losses on {where}, table and figure alike: means over seeds",
        f"std: the standard deviation over seeds, {DIVISOR}; - for a single seed",
        f"train mode, eval mode: {unit} of training examples with and without dropout",
    ]
    if len(runs) > 1:
        lines.append(
            f"differences: configuration − {fairness.baseline}, paired by seed, the "
            f"mean with the {INTERVAL}"
        )
    lines += fairness.lines()
    lines += [
        f"{name}: the figure shows only the kept checkpoints, since the run's own "
        f"evaluations were not on {where}"
        for name, seeds in runs.items()
        if any(run.from_checkpoints for run in seeds)
    ]
    remarks: dict[str, list[str]] = {}  # line → configurations
    for name, seeds in runs.items():
        for line in dict.fromkeys(line for run in seeds for line in run.remarks):
            remarks.setdefault(line, []).append(name)
    return lines + [f"{', '.join(names)}: {x}" for x, names in remarks.items()]


def _differences(
    runs: dict[str, list[Evaluated]], baseline: str, loss: str
) -> Iterator[tuple[str, str, Difference]]:
    """Yield (configuration, measure, its difference from the baseline).

    The baseline itself is left out, and so is a measure that the configuration or the
    baseline does not have.
    """
    by_name = {
        name: {run.seed: run.measures(loss) for run in seeds}
        for name, seeds in runs.items()
    }
    labels = _labels(run.measures(loss) for seeds in runs.values() for run in seeds)
    for name, label in itertools.product(runs, labels):
        if name == baseline:
            continue
        values, reference = (
            {seed: measures.get(label) for seed, measures in by_name[x].items()}
            for x in (name, baseline)
        )
        if found := paired_difference(values, reference):
            yield name, label, found


def _record(name: str, label: str, found: Difference) -> dict[str, Any]:
    """Return a row of the table of differences."""
    row = {"configuration": name, "measure": label, "difference": found.mean}
    ends = {f"{PERCENT} from": found.low, f"{PERCENT} to": found.high}
    return row | ends | {"seeds": len(found.by_seed)}


def _difference_figure(differences: dict[str, Difference], label: str) -> Dots:
    """Return the figure of the differences in held-out loss."""
    rows = {
        name: Spread(found.by_seed, found.mean, found.low, found.high)
        for name, found in differences.items()
    }
    title = "Held-out loss: seeds, their mean"
    if any(found.low is not None for found in differences.values()):
        title += f", its {PERCENT} interval"
    return Dots("differences", label, rows, title)


def _task_records(runs: dict[str, list[Evaluated]]) -> list[dict[str, Any]]:
    """Return the mean and standard deviation of every headline number of the tasks.

    Both are None if a run of the configuration lacks the number. The list is empty if
    no run has headline numbers.
    """
    labels = _labels(run.headlines for seeds in runs.values() for run in seeds)
    records = []
    for name, seeds in runs.items() if labels else ():
        record: dict[str, Any] = {"configuration": name}
        for label in labels:
            numbers = [run.headlines.get(label) for run in seeds]
            known = [x for x in numbers if x is not None]
            complete = len(known) == len(numbers)
            record[label] = {
                "mean": statistics.mean(known) if complete else None,
                "std": statistics.stdev(known) if complete and len(known) > 1 else None,
            }
        records.append(record)
    return records


def _task_table(records: list[dict[str, Any]]) -> Table:
    """Return a table of the records, with columns for means and standard deviations."""
    name, *labels = records[0]
    columns = [name, *(x for label in labels for x in (label, f"± {label}"))]
    rows: list[list[Cell]] = [
        [x[name], *(cell for label in labels for cell in x[label].values())]
        for x in records
    ]
    return Table("tasks", columns, rows)


def _labels(numbers: Iterable[dict[str, Any]]) -> list[str]:
    """Return the keys of several dicts, each once, in the order of their appearance."""
    return list(dict.fromkeys(itertools.chain(*numbers)))


def _figure(curves: dict[str, Curve], bands: dict[str, Band], label: str) -> Lines:
    """Return the figure of the held-out losses by step."""
    title = "Held-out loss by step"
    if bands:
        title += ": the mean over seeds, and a band of one standard deviation"
    return Lines("heldout", "step", label, curves, title=title, bands=bands)


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
    if len(counts) > 1:  # batch sizes differ, but all cover the same examples
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
