"""An attention layer of any choices whose weights are not the initial ones."""

import jax
import numpy as np
from flax import nnx

from symjax import config
from symjax.layers import Attention

WIDTH, TIME = 24, 11
ATTENTION = config.Attention.__dataclass_fields__


def layer_of(**choice) -> Attention:
    """Return a layer whose weights are not the initial ones."""
    chosen = {name: choice.pop(name) for name in [*choice] if name in ATTENTION}
    sizes = {"width": WIDTH, "heads": 3, **choice}
    options = config.Model(**sizes, attention=config.Attention(**chosen))
    layer = Attention(options, 0, rngs=nnx.Rngs(0))
    graph, weights = nnx.split(layer, nnx.Param)
    rng = np.random.default_rng(0)
    noise = jax.tree.map(lambda x: x + 0.2 * rng.normal(size=x.shape), weights)
    return nnx.merge(graph, jax.tree.map(lambda x: x.astype("f4"), noise))
