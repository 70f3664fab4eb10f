"""Several configurations over several seeds, with equal data and budget, in one table.

python -m symjax.evaluation.compare --configs configs/gpt.py:tiny,configs/sym.py:tiny \\
    --seeds 0,1,2 [--config.KEY=VALUE ...] [--out runs/compare] [--batches N]
python -m symjax.evaluation.compare --configs configs/digits.py \\
    --vary model.attention.mechanism=softmax,linear,matrix_function

python -m symjax.evaluation.compare --workdirs runs/gpt,runs/diff_sym

--vary makes a configuration of each value, and of each pair where it is given twice.
Every run is a workdir of train.py below --out, and is trained only as far as it is not
yet: the same command resumes after an interruption. Then every run is evaluated, and
compare.md, compare.csv, lambda.csv and PNG curves are written. --workdirs compares runs
that exist, and trains nothing; those of one step that differ in their seed alone are
one row. Exit codes are those of train.py.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from etils import epath

from symjax import figures
from symjax.evaluation import report
from symjax.evaluation.compared_runs import Workdir, existing, items, plan, train
from symjax.evaluation.language import losses
from symjax.evaluation.loading import load
from symjax.evaluation.results import Result, Table, table
from symjax.evaluation.weights import lambda_table
from symjax.figures import Lines
from symjax.files import check_writable
from symjax.places import anywhere, place
from symjax.training.commandline import Parser
from symjax.training.exit_codes import run_and_exit
from symjax.training.metrics import rows_of


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
        planned = {}
        runs = existing([*map(place, items("--workdirs", chosen.workdirs, str))])
    else:
        planned = plan(chosen, rest)
        runs = {name: [x.workdir for x in some] for name, some in planned.items()}
    figures.check_figures()
    check_writable(chosen.out, f"--out {chosen.out}")
    train(planned)
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


def check_alone(chosen: argparse.Namespace, rest: list[str]) -> None:
    """Raises: ValueError: a flag says what to train, beside --workdirs."""
    flags = {"--vary": chosen.vary, "--seeds": chosen.seeds}
    given = [name for name, value in flags.items() if value]
    if given or rest:
        raise ValueError(
            f"{(given + rest)[0]} is for runs to train: --workdirs compares those that "
            "exist"
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


if __name__ == "__main__":
    run_and_exit(lambda: main(sys.argv[1:]))
