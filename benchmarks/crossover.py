"""Speed relative to softmax by length, and the length from which a model is faster.

    python -m benchmarks.crossover --out runs/crossover [--lengths 512,1024,2048]
        [--models performer,gated]

The models are one layer of `configs/gpt.py:tiny` with the attention of a model of
benchmarks.answers: width 128, with 4 heads of 32.
The task `speed` of eval.py measures them, with random weights and one row of tokens.
The model and the same model with softmax run in turn. The works that are measured are
the prefill of the row, a training step on it, and the decoding of its last 16 tokens.
The column `÷ softmax` is the speed of the model divided by that of softmax; above 1 the
model is faster.

Every line is printed and added to OUT/crossover.csv when it is measured. Lines that the
file has are not measured again. At the end the crossover lengths are printed, and a
figure for each work is written to OUT/WORK.png.
"""

import argparse
import csv
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.answers import MODELS, keys_of
from benchmarks.arguments import numbers
from benchmarks.trainings import ROOT
from symjax.distributed.exit_codes import run_and_exit
from symjax.evaluation.measures.speed import LENGTHS, compare_with_softmax, crossover
from symjax.figures import Lines, check_figures, png
from symjax.programs.commandline import parse

COMPARED = "differential,linear,performer,decay,gated,delta"
MODEL = "--config", f"{ROOT}/configs/gpt.py:tiny"
SIZES = "--config.model.depth=1", "--config.model.vocabulary=256"
COLUMNS = "model", "work", "tokens", "tokens/s", "÷ softmax", "MiB", "MiB ÷ softmax"


def main(words: list[str]) -> None:
    """Measure the lines that are not in OUT, and draw all lines."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.crossover",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="a folder")
    add("--lengths", type=numbers, default=",".join(map(str, LENGTHS)))
    add("--models", default=COMPARED, help="names of benchmarks.answers (%(default)s)")
    chosen = parser.parse_args(words)
    models = chosen.models.split(",")
    if unknown := sorted(set(models) - set(MODELS)):
        parser.error(f"model {unknown[0]!r} is unknown: {', '.join(MODELS)}")
    lengths = sorted(map(int, chosen.lengths.split(",")))
    if lengths[0] < 1:
        parser.error("a length is at least 1")
    check_figures()
    chosen.out.mkdir(parents=True, exist_ok=True)
    file = chosen.out / "crossover.csv"
    rows = read(file)
    known = {(row["model"], int(row["tokens"])) for row in rows}
    for length in lengths:
        for model in models:
            if (model, length) not in known:
                rows += measure(model, length, file)
    draw(rows, chosen.out)


def read(file: Path) -> list[dict[str, Any]]:
    """Return the lines of an earlier call; none if there was none."""
    if not file.exists():
        return []
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def measure(model: str, length: int, file: Path) -> list[dict[str, Any]]:
    """Return the lines of a model and length, printed and added to the file."""
    words = [*MODEL, *SIZES, *(f"--config.{key}" for key in keys_of(model))]
    cells = compare_with_softmax(parse(words).config, length)
    rows = [dict(zip(COLUMNS, (model, *cell), strict=True)) for cell in cells]
    new = not file.exists()
    with file.open("a", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        name, work, tokens, rate, ratio, *_ = row.values()
        print(f"{name:14}{work:10}{tokens:>7}{rate:>11.0f}{ratio:>8.2f}", flush=True)
    return rows


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """Print the crossover lengths, and write a figure for each work."""
    curves: dict[str, dict[str, dict[int, float]]] = defaultdict(dict)
    for row in rows:
        curve = curves[row["work"]].setdefault(row["model"], {})
        curve[int(row["tokens"])] = float(row["÷ softmax"])
    for work, found in curves.items():
        series = {
            model: (sorted(curve), [curve[n] for n in sorted(curve)])
            for model, curve in found.items()
        }
        for model, (lengths, ratios) in series.items():
            print(f"{work}, {model}: faster from {crossover(lengths, ratios)} tokens")
        label = "tokens/s ÷ those of softmax"
        title = f"{work.capitalize()}: speed relative to softmax"
        lines = Lines(work, "tokens of a row", label, series, True, title, log_y=True)
        (out / f"{work}.png").write_bytes(png(lines))


if __name__ == "__main__":
    run_and_exit(lambda: main(sys.argv[1:]))
