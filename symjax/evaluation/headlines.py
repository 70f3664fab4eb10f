"""Headline numbers of the evaluation tasks, for tables of several runs.

A task measures many numbers by layer, length or depth. `HEADLINES` chooses a few of
them for the comparison of runs. Numbers by layer become means over the layers, unless a
label says otherwise. Tasks that only show text or pictures have none.
"""

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from symjax.data.rearranged import ARRANGEMENTS
from symjax.evaluation.results import Result

Headlines = dict[str, float | None]


def headlines(task: str, result: Result) -> Headlines:
    """Return the headline numbers of a result by label; {} if the task did not apply.

    A number is None if it is not known, for instance a slope over too few keys.
    """
    return HEADLINES[task](result) if result.tables else {}


def _mean(rows: Iterable[Any], key: str) -> float | None:
    """Return the mean of row[key] over the rows that have it; None if none has."""
    known = [row[key] for row in rows if row.get(key) is not None]
    return statistics.mean(known) if known else None


def _none(_: Result) -> Headlines:
    return {}


def _loss(result: Result) -> Headlines:
    return {"perplexity": result.values["heldout"]["perplexity"]}


def _lambda(result: Result) -> Headlines:
    return {"λ": _mean(result.values["lambda"], "lambda")}


def _accuracy(name: str) -> Callable[[Result], Headlines]:
    """Return the function that reads the headlines of a generated task.

    The headlines are the mean accuracy of the rows, and the accuracy of the last row:
    that of the most pairs, the deepest lists, or the last position.
    """

    def read(result: Result) -> Headlines:
        rows = result.values[name]
        last = f"{name} accuracy, last row"
        return {f"{name} accuracy": _mean(rows, "accuracy"), last: rows[-1]["accuracy"]}

    return read


def _needle(result: Result) -> Headlines:
    grid = result.values["needle"]["grid"]
    return {"needle accuracy": statistics.mean(x for row in grid for x in row)}


def _sets(result: Result) -> Headlines:
    """Return the accuracies for the largest number of samples, the last row."""
    row = result.values["sets"][-1]
    return {
        f"majority of {row['samples']} {x}": row[x] for x in ("as drawn", "in order")
    }


def _order(result: Result) -> Headlines:
    found = result.values["order"]
    accuracy = {"accuracy over orders": found["together"]["mean"]}
    return accuracy | {"answers changed by order": found["changed"]}


def _length(result: Result) -> Headlines:
    """Return the loss at each window length, with the log-n scaling of training."""
    found = {}
    for tokens, variants in result.values["length"].items():
        name = next(x for x in ("trained", "off", "none") if x in variants)
        found[f"loss at {tokens} tokens"] = variants[name]["loss"]
    return found


def _position(result: Result) -> Headlines:
    row = result.values["position"][-1]
    return {f"loss at places {row['from']} to {row['to']}": row["loss"]}


def _noise(result: Result) -> Headlines:
    """Return shares of the map A, means over layers, without those of its branches."""
    rows = [row for row in result.values["noise"] if row["map"] == "A"]
    return {f"share on the {x}": _mean(rows, x) for x in ("answer", "context")}


def _self_share(result: Result) -> Headlines:
    return {"share on itself": _mean(result.values["self_share"], "mean")}


def _dilution(result: Result) -> Headlines:
    rows = [row["within"] for row in result.values["dilution"]]
    return {"share on the last 16": _mean(rows, "16")}


def _entropy(result: Result) -> Headlines:
    rows = result.values["entropy"]
    longest = [list(row["entropy"].values())[-1:] for row in rows]
    return {
        "entropy slope": _mean(rows, "slope"),
        "entropy of the last row": statistics.mean(x for row in longest for x in row),
    }


def _support(result: Result) -> Headlines:
    """Return the share of keys with a weight, and the sparsity of the map A."""
    maps = [row for row in result.values["sparsity"] if row["map"] == "A"]
    return {
        "share of keys with a weight": _mean(result.values["support"], "share"),
        "share on the 16 largest": _mean(maps, "top_16"),
        "Hoyer sparsity": _mean(maps, "hoyer"),
    }


def _rank(result: Result) -> Headlines:
    """Return the effective rank of the map of a layer: A, or A₁ − λA₂."""
    maps = {row["layer"]: row for row in result.values["rank"]}  # the last row of each
    return {"effective rank of the map": _mean(maps.values(), "effective")}


def _spectrum(result: Result) -> Headlines:
    """Return numbers of the map A or A₁ − λA₂, of tokens, and of Markov chains.

    They are σ₁/σ₂ of the map, the mean cosine and the stable rank of the tokens after
    the last layer, and the error of detailed balance.
    """
    found = result.values["spectrum"]
    tokens, chains = found["tokens"], found["chains"]
    maps = [x for x in found["matrices"] if x["matrix"] in ("A", "A₁ − λA₂")]
    return {
        "σ₁/σ₂ of the map": _mean(maps, "ratio"),
        "cosine of tokens, last layer": tokens[-1]["cosine"],
        "stable rank of tokens, last layer": tokens[-1]["stable_rank"],
        "error of detailed balance": _mean(chains, "balance_error"),
    }


def _symmetry(result: Result) -> Headlines:
    rows = result.values["symmetry"]
    return {f"{x} of W_q W_kᵀ": _mean(rows, x) for x in ("symmetry", "direction")}


def _outliers(result: Result) -> Headlines:
    names = {"logit": "largest |score|", "hidden": "largest |hidden|"}
    return {
        label: max(
            (row["top_1"] for row in result.values["outliers"][name]), default=None
        )
        for name, label in names.items()
    }


def _approximation(result: Result) -> Headlines:
    """Return the errors of the layers' own features, and the least of random features.

    Errors of own features are None if no layer uses features.
    """
    found = result.values["approximation"]
    errors = {f"error of own {x}": _mean(found["own"], x) for x in ("map", "output")}
    least = min(row["output"] for row in found["random"])
    return errors | {"least error of output, random features": least}


def _gradients(result: Result) -> Headlines:
    """Return the largest derivative, and the mean cosine of branches over layers."""
    largest = max((row["largest"] for row in result.values["gradients"]), default=None)
    cosine = _mean(result.values["branches"], "cosine")
    return {"largest |∂a/∂z|": largest, "cosine of g₁ and g₂": cosine}


def _speed(result: Result) -> Headlines:
    """Return "÷ softmax" of each work at the longest length, whose rows come last."""
    columns, rows = result.tables[0].columns, result.tables[0].rows
    work, ratio = columns.index("work"), columns.index("÷ softmax")
    return {f"{row[work]} ÷ softmax": row[ratio] for row in rows}  # pyright: ignore


def _dimension(result: Result) -> Headlines:
    sizes = result.values["dimension"]["head_sizes"]
    return {"head size ÷ 8 ln n": min(sizes) / result.values["dimension"]["needed"]}


HEADLINES: dict[str, Callable[[Result], Headlines]] = {
    "loss": _loss,
    "lambda": _lambda,
    "mqar": _accuracy("mqar"),
    "needle": _needle,
    **{name: _accuracy(name) for name in ARRANGEMENTS},
    "sets": _sets,
    "listops": _accuracy("listops"),
    "order": _order,
    "sample": _none,
    "length": _length,
    "position": _position,
    "noise": _noise,
    "self_share": _self_share,
    "dilution": _dilution,
    "entropy": _entropy,
    "support": _support,
    "rank": _rank,
    "spectrum": _spectrum,
    "outliers": _outliers,
    "maps": _none,
    "approximation": _approximation,
    "gradients": _gradients,
    "speed": _speed,
    "symmetry": _symmetry,
    "dimension": _dimension,
}
