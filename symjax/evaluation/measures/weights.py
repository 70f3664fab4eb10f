"""λ of differential layers (task `lambda`), and the sizes of heads (`dimension`)."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from symjax.evaluation.loading import LoadedRun, history
from symjax.evaluation.measures.reading import Layer, mean_over_rows
from symjax.evaluation.results import Options, Result, Table, table
from symjax.figures import Lines
from symjax.models.build import attentions
from symjax.models.lambdas import lambda_table
from symjax.monitor.metrics import LAMBDA, rows_of


def lambdas(run: LoadedRun, options: Options) -> Result:
    """Measure λ of A₁ − λA₂ by layer, and how it changed over the steps of training.

    Differential V1 has one λ per layer: λ = λ₁ − λ₂ + λ_init. V2 has one for every
    token and head, so the table has means over held-out tokens. The steps are those of
    the evaluations during training. If these logged no λ, λ of V1 is read from the kept
    checkpoints. The result is empty if the attention is not differential.
    """
    if run.config.model.attention.differential == "v2":
        return _lambdas_v2(run, options)
    rows = lambda_table(run.model())
    if not rows:
        return Result({"lambda": []}, ["λ: none, the attention is not differential"])
    tables = [table("lambda", ("layer", "λ₁", "λ₂", "λ_init", "λ"), rows)]
    text: list[str] = []
    layers, now = zip(*((row["layer"], row["lambda"]) for row in rows), strict=True)
    steps = _logged(run, layers) | {run.step: now}
    if len(steps) < 2:  # no λ was logged, or averaged weights (--ema) are measured
        steps = {
            at.step: [row["lambda"] for row in lambda_table(at.model())]
            for at in history(run, text.append)
        }
    if len(steps) < 2:
        return Result({"lambda": rows}, text, tuple(tables))
    by_step, lines = _by_step(layers, steps, "λ of every layer")
    return Result({"lambda": rows}, text, (*tables, by_step), (lines,))


def _logged(run: LoadedRun, layers: Sequence[int]) -> dict[int, Sequence[float]]:
    """Return step → λ of these layers, as logged by the evaluations during training."""
    if run.ema:
        return {}
    names = [f"{LAMBDA}{layer}" for layer in layers]
    by_step = {
        row["step"]: [row[name] for name in names]
        for row in rows_of(run.workdir)
        if row["step"] <= run.step and all(row.get(x) is not None for x in names)
    }
    return dict(sorted(by_step.items()))


def _by_step(
    layers: Sequence[int], steps: Mapping[int, Sequence[float]], title: str
) -> tuple[Table, Lines]:
    """Return the table and the figure of λ by step."""
    names = [f"layer {layer}" for layer in layers]
    rows = [(step, *lambdas) for step, lambdas in steps.items()]
    x = list(map(float, steps))
    curves = {n: (x, list(y)) for n, *y in zip(names, *steps.values(), strict=True)}
    lines = Lines("lambda_by_step", "step", "λ", curves, title=title)
    return Table("lambda_by_step", ("step", *names), rows), lines


def _lambdas_v2(run: LoadedRun, options: Options) -> Result:
    """Measure λ of differential V2 by layer and head: means over held-out tokens."""

    def measure(_, layer: Layer) -> np.ndarray:
        """Return λ of every head and token [N T]; NaN in a layer without λ."""
        return np.full((1, 1), np.nan) if layer.lam is None else layer.lam.T

    rows = []
    for layer, heads in enumerate(mean_over_rows(run, options, measure)):
        if not np.isnan(heads).any():
            least, largest = float(heads.min()), float(heads.max())
            row = {"layer": layer, "lambda": float(heads.mean())}
            rows.append(row | {"least_head": least, "largest_head": largest})
    columns = ("layer", "mean λ", "least head", "largest head")
    text = ["differential V2 has one λ per token: means over held-out tokens"]
    tables = (table("lambda", columns, rows),)
    layers = [row["layer"] for row in rows]
    steps = _logged(run, layers)
    if len(steps) < 2:
        return Result({"lambda": rows}, text, tables)
    text.append("by step: means over the first held-out batch, logged during training")
    title = "Mean λ of every layer on the first held-out batch"
    by_step, lines = _by_step(layers, steps, title)
    return Result({"lambda": rows}, text, (*tables, by_step), (lines,))


def dimension(run: LoadedRun, options: Options) -> Result:
    """Compare the head sizes of the model with the rule of thumb 8 ln n.

    By the rule, queries and keys of size 8 ln n can tell n tokens apart, so a head of
    size H can tell e^(H/8) tokens apart.
    """
    length = run.config.model.length
    layers = attentions(run.model())
    sizes = sorted({layer.mixer.sizes.head_size for layer in layers})
    lengths = sorted({length, 64, 256, 512, 1024, 4096, 16384, 65536})
    rows = [(n, round(needed_dimension(n), 1)) for n in lengths]
    shown = ", ".join(map(str, sizes))
    reach = ", ".join(f"{math.exp(size / 8):,.0f}" for size in sizes)
    text = [
        f"by the rule 8 ln n, heads of size {shown} can tell {reach} tokens apart;",
        f"the {length} tokens of training need size {needed_dimension(length):.0f}",
    ]
    values = {"head_sizes": sizes, "length": length, "needed": needed_dimension(length)}
    tables = (Table("dimension", ("tokens", "8 ln n"), rows),)
    return Result({"dimension": values}, text, tables)


def needed_dimension(tokens: int) -> float:
    """Return 8 ln n, the size of queries and keys that can tell n tokens apart.

    Source: Su Jianlin 2020, spaces.ac.cn/archives/7695.
    """
    return 8 * math.log(tokens)
