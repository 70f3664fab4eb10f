"""Sizes of attention scores, hidden states and derivatives of attention weights.

    outliers   the largest |q·k| scores and |hidden states|: values far above the median
               make a model hard to quantise
    gradients  |∂a/∂z| of an attention weight a by its score z, at most 1/4 in softmax;
               unbounded derivatives are reported to make training unstable; and how the
               gradients through the two branches of a differential layer agree

Scores and derivatives are those of all heads, branches and visible pairs of a few
held-out windows.
"""

import numpy as np
from jaxtyping import Float

from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.measures.branches import compared_branches
from symjax.evaluation.measures.reading import Layer, by_layer
from symjax.evaluation.measures.windows import Window
from symjax.evaluation.results import Options, Result, Table, table
from symjax.layers.parts.table import part_of
from symjax.models.build import attentions

TOPS = (1, 2, 3, 10, 100)
LABELS = {"logit": "|score|", "hidden": "|hidden|"}  # in tables, by key of the JSON
BOUND = 0.25  # the largest derivative a (1 − a) of a softmax weight


def outliers(run: LoadedRun, options: Options) -> Result:
    """Measure the 1st, 2nd, 3rd, 10th, 100th largest |score| and |hidden|, by layer.

    The table also has the medians. Scores are scaled q·k of visible pairs ("logit" in
    the JSON). Hidden states are the residual stream after the layer. Differential
    attention is reported to have smaller outliers than softmax attention.

    Source: Ye et al. 2024, arXiv:2410.05258, table 5.
    """

    def measure(window: Window, layer: Layer) -> dict[str, np.ndarray]:
        sizes = {"hidden": np.abs(layer.hidden).ravel()}
        if layer.scores is not None:
            sizes["logit"] = np.abs(layer.scores[..., window.visible]).ravel()
        return sizes

    measured = by_layer(run, options, measure)
    rows = {
        name: [
            {"layer": index, **largest(np.concatenate([x[name] for x in windows]))}
            for index, windows in measured.items()
            if name in windows[0]
        ]
        for name in LABELS
    }
    columns = ("of", "layer", *(f"top-{n}" for n in TOPS), "median")
    cells = [(LABELS[name], *row.values()) for name in rows for row in rows[name]]
    text = [] if rows["logit"] else ["attention scores: none, no layer computes them"]
    return Result({"outliers": rows}, text, (Table("outliers", columns, cells),))


def largest(sizes: np.ndarray) -> dict[str, float | None]:
    """Return the median and, for each n of `TOPS`, the n-th largest (or None)."""
    ordered = np.sort(sizes)[::-1]
    tops = {
        f"top_{n}": float(ordered[n - 1]) if n <= len(ordered) else None for n in TOPS
    }
    return tops | {"median": float(np.median(ordered))}


def gradients(run: LoadedRun, options: Options) -> Result:
    """Measure |∂a/∂z| of a weight and its own score in softmax, linear, cosine layers.

    In softmax attention ∂a/∂z = a (1 − a), which is at most 1/4. In linear attention
    a = z/D with z = φ(q)·φ(k) and D the sum of z over the row, so ∂a/∂z = (1 − a)/D,
    which is unbounded for features close to zero. The table has the largest value, the
    mean and the 99 % quantile over all pairs, heads and branches of a layer.

    Differential layers of any mechanism have a second table, of `compared_branches`.

    Source: Qin et al. 2022, arXiv:2210.10340, section 3.1.
    """
    names = [layer.mixer.mechanism for layer in attentions(run.model())]
    parts = [part_of(name) for name in names]
    measurable = [i for i, x in enumerate(parts) if x.exponential or x.features]
    others = sorted({x for i, x in enumerate(names) if i not in measurable})
    text = [f"gradients: not known for {', '.join(others)}"] if others else []
    if measurable:
        text.append(
            "|∂a/∂z| of a weight and its own score, over all pairs, heads, branches"
        )

    def measure(window: Window, layer: Layer) -> np.ndarray:
        return np.abs(derivatives(layer)[..., window.visible]).ravel()

    rows = []
    found = by_layer(run, options, measure, measurable) if measurable else {}
    for index, windows in found.items():
        sizes = np.concatenate(windows)
        row = {"layer": index, "mechanism": names[index]}
        row |= {"largest": float(sizes.max()), "mean": float(sizes.mean())}
        row["quantile_99"] = float(np.quantile(sizes, 0.99))
        rows.append(row | {"bound": BOUND if parts[index].exponential else None})
    columns = ("layer", "mechanism", "largest", "mean", "99 % below", "bound")
    tables = [table("gradients", columns, rows)] if rows else []
    if branches := compared_branches(run, options):
        columns = ("layer", "cosine of g₁ and g₂", "|g₂| ÷ |g₁|")
        tables.append(table("gradients_branches", columns, branches))
    return Result({"gradients": rows, "branches": branches}, text, tuple(tables))


def derivatives(layer: Layer) -> Float[np.ndarray, "N P T T"]:
    """Return ∂a/∂z of every pair; 0 in rows of linear attention whose sum is 0."""
    weights = layer.branches.astype(np.float64)
    if layer.products is None:
        return weights * (1 - weights)
    total = layer.products.astype(np.float64).sum(axis=-1, keepdims=True)
    inverse = np.where(total == 0, 0, 1 / np.where(total == 0, 1, total))
    return (1 - weights) * inverse
