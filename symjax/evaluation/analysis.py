"""What a model has learned, read from its weights."""

import numpy as np

from symjax.evaluation.asked import Asked
from symjax.evaluation.finding import Finding, Lines, Table
from symjax.evaluation.inside import mean_by_layer
from symjax.evaluation.reading import Layer, attentions
from symjax.evaluation.trained import Trained, history
from symjax.models.build import Model


def lambdas(trained: Trained, asked: Asked) -> Finding:
    """The table of λ by layer, and where several checkpoints are kept, by step.

    Differential V1 has one λ a layer; of V2, where it is a token's own, the mean over
    held-out tokens. Empty where the attention is not differential.
    """
    if trained.options.model.attention.differential == "v2":
        return _lambdas_of_tokens(trained, asked)
    rows = lambda_table(trained.any_model())
    if not rows:
        text = ["λ: none, the attention is not differential"]
        return Finding({"lambda": []}, text)
    columns = ("layer", "λ₁", "λ₂", "λ_init", "λ")
    table = Table("lambda", columns, [tuple(row.values()) for row in rows])
    text: list[str] = []
    steps = {
        at.step: [row["lambda"] for row in lambda_table(at.any_model())]
        for at in history(trained, text.append)
    }
    if len(steps) < 2:
        return Finding({"lambda": rows}, text, (table,))
    names = [f"layer {row['layer']}" for row in rows]
    by_step = [(step, *found) for step, found in steps.items()]
    series = {
        name: (list(map(float, steps)), [found[i] for found in steps.values()])
        for i, name in enumerate(names)
    }
    tables = (table, Table("lambda_by_step", ("step", *names), by_step))
    lines = Lines("lambda_by_step", "step", "λ", series)
    return Finding({"lambda": rows}, text, tables, (lines,))


def _lambdas_of_tokens(trained: Trained, asked: Asked) -> Finding:
    rows = []
    found = mean_by_layer(trained, asked, lambda _, layer: _mean_lambda(layer))
    for layer, heads in enumerate(found):
        if not np.isnan(heads).any():
            least, largest = float(heads.min()), float(heads.max())
            row = {"layer": layer, "lambda": float(heads.mean())}
            rows.append(row | {"least_head": least, "largest_head": largest})
    columns = ("layer", "mean λ", "least head", "largest head")
    table = Table("lambda", columns, [tuple(row.values()) for row in rows])
    text = ["λ of differential V2 is a token's own: means over held-out tokens"]
    return Finding({"lambda": rows}, text, (table,))


def _mean_lambda(layer: Layer) -> np.ndarray:
    """Of every head; NaN in a layer without λ."""
    return np.full(1, np.nan) if layer.lam is None else layer.lam.mean(axis=0)


def lambda_table(model: Model) -> list[dict[str, float]]:
    """λ₁, λ₂, λ_init and λ = λ₁ − λ₂ + λ_init of each layer with differential V1."""
    rows = []
    layers = {id(layer): layer for layer in attentions(model)}  # one that is repeated
    for index, layer in enumerate(layers.values()):
        if layer.mixer.differential != "v1":
            continue
        first = _exponential(layer.lambda_query_1, layer.lambda_key_1)
        second = _exponential(layer.lambda_query_2, layer.lambda_key_2)
        rows.append(
            {
                "layer": index,
                "lambda_1": first,
                "lambda_2": second,
                "lambda_initial": layer.lambda_initial,
                "lambda": first - second + layer.lambda_initial,
            }
        )
    return rows


def _exponential(query, key) -> float:
    vectors = (np.asarray(x[...], np.float64) for x in (query, key))
    return float(np.exp(np.dot(*vectors)))
