"""λ of the layers of a model with differential attention."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from symjax.models.build import Model, attentions


def lambda_table(model: Model) -> list[dict[str, float]]:
    """Return λ₁, λ₂, λ_init and λ = λ₁ − λ₂ + λ_init of each layer with V1.

    λ₁ is exp(λ_q1·λ_k1) of the learned vectors, and λ₂ likewise.
    """
    # A universal model repeats one layer, which has one row.
    layers = {id(layer): layer for layer in attentions(model)}
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


def mean_lambdas(model: Model, inputs: Any) -> dict[int, float]:
    """Return the mean λ of each layer of differential V2, by the layer's index.

    The mean is over heads and tokens. Each row counts as one document, also if it holds
    several. A universal model has a mean for each step.
    """
    graph, weights = nnx.split(model)
    return {
        layer: float(x) for layer, x in _mean_lambdas(graph, weights, inputs).items()
    }


@partial(jax.jit, static_argnums=0)
def _mean_lambdas(graph: nnx.GraphDef, weights: Any, inputs: Any) -> dict[int, Any]:
    model, means = nnx.merge(graph, weights), []

    def watch(layer: Any, x: jax.Array, *_: Any) -> None:
        project = getattr(layer, "lambda_projection", None)
        mean = None
        if project is not None:
            mean = jax.nn.sigmoid(project(x)).mean(dtype=jnp.float32)
        means.append(mean)

    model(inputs, watch=watch)
    return {layer: mean for layer, mean in enumerate(means) if mean is not None}
