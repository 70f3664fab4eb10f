"""What a model has learned, read from its weights."""

import numpy as np
from flax import nnx

from symjax.evaluation.asked import Asked
from symjax.evaluation.finding import Finding, Table
from symjax.evaluation.trained import Trained
from symjax.layers import Attention
from symjax.models.decoder import Decoder


def lambdas(trained: Trained, asked: Asked) -> Finding:
    """The table of λ; empty where the attention is not differential V1."""
    rows = lambda_table(trained.model())
    if not rows:
        text = ["λ: none, the attention is not differential"]
        return Finding({"lambda": []}, text)
    columns = ("layer", "λ₁", "λ₂", "λ_init", "λ")
    table = Table("lambda", columns, [tuple(row.values()) for row in rows])
    return Finding({"lambda": rows}, [], (table,))


def lambda_table(model: Decoder) -> list[dict[str, float]]:
    """λ₁, λ₂, λ_init and λ = λ₁ − λ₂ + λ_init of each layer with differential V1."""
    rows = []
    modules = sorted(nnx.iter_modules(model), key=lambda found: found[0])
    layers = [layer for _, layer in modules if isinstance(layer, Attention)]
    for index, layer in enumerate(layers):
        if layer.differential != "v1":
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
