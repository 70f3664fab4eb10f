"""λ of the layers of a model with differential attention."""

import numpy as np

from symjax.models.build import Model, attentions


def lambda_table(model: Model) -> list[dict[str, float]]:
    """λ₁, λ₂, λ_init and λ = λ₁ − λ₂ + λ_init of each layer with differential V1."""
    layers = {id(layer): layer for layer in attentions(model)}  # one that is repeated
    rows = []
    for index, layer in enumerate(layers.values()):
        if layer.mixer.differential == "v1":
            first = _exponential(layer.lambda_query_1, layer.lambda_key_1)
            second = _exponential(layer.lambda_query_2, layer.lambda_key_2)
            row = {"layer": index, "lambda_1": first, "lambda_2": second}
            row["lambda_initial"] = layer.lambda_initial
            rows.append(row | {"lambda": first - second + layer.lambda_initial})
    return rows


def _exponential(query, key) -> float:
    vectors = (np.asarray(x[...], np.float64) for x in (query, key))
    return float(np.exp(np.dot(*vectors)))
