"""A small attention layer whose weights are not the initial ones."""

import jax
import numpy as np
from flax import nnx

from symjax import config
from symjax.layers import Attention

WIDTH, HEADS, TIME = 24, 3, 11


def layer_of(decay: str, mechanism: str = "decay", **chosen) -> Attention:
    attention = config.Attention(mechanism=mechanism, decay=decay, **chosen)
    options = config.Model(width=WIDTH, heads=HEADS, attention=attention)
    layer = Attention(options, 0, rngs=nnx.Rngs(0))
    graph, weights = nnx.split(layer, nnx.Param)
    rng = np.random.default_rng(0)
    noise = jax.tree.map(lambda x: x + 0.2 * rng.normal(size=x.shape), weights)
    return nnx.merge(graph, jax.tree.map(lambda x: x.astype("f4"), noise))


def inputs() -> np.ndarray:
    return np.random.default_rng(3).normal(size=(2, TIME, WIDTH)).astype("f4")


def weight(part, *names: str) -> np.ndarray:
    for name in names:
        part = getattr(part, name)
    return np.asarray(part[...], np.float64)
