"""Statistics of FAVOR++ and FAVOR#: measured in a model, stored as its constants."""

from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from symjax.attention import Statistics, favor_statistics
from symjax.layers.segments import positions_of
from symjax.models.build import Model, attentions


def fit_statistics(model: Model, inputs: Any) -> None:
    """Fit the statistics of FAVOR++ and FAVOR# to the queries and keys of `inputs`.

    A new model has the statistics of queries and keys with independent entries of
    variance 1. Fitted statistics estimate softmax with less variance. They are
    constants of the model: training, evaluation and decoding only read them, and
    checkpoints store them.

    One forward pass measures all layers, with the statistics that the model has before
    the call. A universal model is measured in its first step.

    Args:
        model: it is changed in place.
        inputs: token ids [B T] or images. The model may not be evaluated on them, since
            statistics of a text tell earlier tokens about later ones. In rows of an
            encoder, repetitions of the text replace the padding.
    Raises:
        ValueError: no layer of the model has such features.
    """
    inputs = np.asarray(inputs)
    if inputs.ndim == 2:
        inputs = _repeated_texts(inputs)
    graph, arrays = nnx.split(model)
    measured = _measure(graph, arrays, inputs)
    if not measured:
        raise ValueError(
            "fit_statistics: no layer of the model has "
            "model.attention.features favor++ or favor#"
        )
    layers = attentions(model)
    for index, statistics in measured.items():
        layers[index].statistics_a[...] = statistics.a
        layers[index].statistics_b[...] = statistics.b


def _repeated_texts(tokens: np.ndarray) -> np.ndarray:
    """Return rows of token ids with padding (below 0) replaced by the text again."""
    count = np.maximum((tokens >= 0).sum(axis=1, keepdims=True), 1)
    return np.take_along_axis(tokens, np.arange(tokens.shape[1])[None] % count, axis=1)


@partial(jax.jit, static_argnums=0)
def _measure(graph: nnx.GraphDef, arrays: Any, inputs: Any) -> dict[int, Statistics]:
    """Return the statistics of each layer's first call, by index in `attentions`."""
    model = nnx.merge(graph, arrays)
    calls: list[int] = []  # the id of the layer of each call
    measured: dict[int, Statistics] = {}

    def watch(layer: Any, x: jax.Array, *_: Any) -> None:
        if id(layer) not in calls and hasattr(layer, "statistics_a"):
            query, key, _ = layer.project(x, positions_of(x, None))
            statistics = favor_statistics(query, key, kind=layer.chosen.features)
            measured[len(calls)] = statistics
        calls.append(id(layer))

    model(inputs, watch=watch)
    return measured
