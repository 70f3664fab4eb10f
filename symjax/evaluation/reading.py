"""Queries, keys, maps and hidden states of every layer of a model for a window.

One way of reading for every mechanism: the map of a layer is what the layer itself
makes of unit vectors as values. The model runs as it is, and its blocks are watched.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange, repeat
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.row_maps import row_map
from symjax.layers.mechanisms import part_of
from symjax.layers.mixer import Mixer
from symjax.layers.sharded import Operand
from symjax.models.build import Model
from symjax.models.build import attentions as attentions

# The tokens of a row, below 0 where there are none, or an image.
Inputs = Int[np.ndarray, "T"] | Float[np.ndarray, "height width channels"]


class Layer(NamedTuple):
    """What one layer does with one window of T tokens, those of an image its patches.

    P is 2 for the branches of a differential head, 1 otherwise. Heads that share keys
    or values each have their own here.

    Attributes:
        query, key: rotated, before any feature map.
        scores: q·k scaled, without the bias of positions; 0 where hidden. None for
            mechanisms that never form them.
        products: φ(q)·φ(k) of linear and cosine layers, which their sum divides; 0
            where hidden.
        branches: the map of each branch.
        map: of the head: that of its branch, or A₁ − λA₂.
        lam: λ of every token and head; None if not differential.
        hidden: the residual stream after the layer.
    """

    query: Float[np.ndarray, "N P T H"]
    key: Float[np.ndarray, "N P T H"]
    value: Float[np.ndarray, "N T V"]
    scores: Float[np.ndarray, "N P T T"] | None
    products: Float[np.ndarray, "N P T T"] | None
    branches: Float[np.ndarray, "N P T T"]
    map: Float[np.ndarray, "N T T"]
    lam: Float[np.ndarray, "T N"] | None
    hidden: Float[np.ndarray, "T D"]


def read(model: Model, inputs: Inputs) -> list[Layer]:
    """What every layer does with a window. Memory O(N T²) a layer.

    Pads are left out: no token sees them, and what they see is of no use.
    """
    graph, weights = nnx.split(model)
    found = _read(graph, weights, jnp.asarray(inputs)[None])
    layers = jax.tree.map(lambda x: np.asarray(x[0], np.float32), found)
    if inputs.ndim > 1 or (inputs >= 0).all():
        return layers
    return [_without_pads(layer, inputs >= 0) for layer in layers]


def _without_pads(layer: Layer, there: Bool[np.ndarray, "T"]) -> Layer:
    found = {}
    for name, x in layer._asdict().items():
        if x is not None:
            found[name] = np.compress(there, x, axis=-2)
            if name in ("scores", "products", "branches", "map"):  # of pairs
                found[name] = np.compress(there, found[name], axis=-1)
    return layer._replace(**found)


@partial(jax.jit, static_argnums=0)
def _read(graph: nnx.GraphDef, weights: Any, inputs: Array) -> list[Layer]:
    model, found = nnx.merge(graph, weights), []
    model(inputs, watch=lambda *seen: found.append(_layer(*seen)))
    return found


def _layer(layer: Any, x: Array, padding_mask: Array | None, hidden: Array) -> Layer:
    """The `Layer` of an `Attention` or a `GatedBlock` for its input x."""
    positions = jnp.arange(x.shape[1])[None]
    lengths = layer.rotate.lengths(positions, padding_mask)
    operands = layer.operands(x, positions, lengths=lengths)
    if padding_mask is not None:
        operands["mask"] = Operand(padding_mask[:, None, None], "B")
    query, key, value = layer.project(x, positions, lengths=lengths)
    kind, lam = layer.mixer.differential, None
    if kind != "none":
        lam = operands["lam"].array
        lam = jnp.broadcast_to(lam, (*x.shape[:2], layer.mixer.sizes.heads))
    heads, length = layer.mixer.sizes.heads, x.shape[1]
    units = jnp.eye(length)[None, :, None]
    units = jnp.broadcast_to(units, (1, length, value.shape[2], length))
    operands["value"] = operands["value"]._replace(array=units)
    scores = None
    if layer.mixer.form.keys and layer.mixer.form.state is None:
        scores = _branches(partial(_scores, layer.mixer), operands, kind)
    # Traced here; `read` gives them out as numpy arrays.
    return Layer._make(
        (
            _each_head(query, heads, kind),
            _each_head(key, heads, kind),
            repeat(value, "b t k v -> b (k g) t v", g=heads // value.shape[2]),
            scores,
            _products(layer.mixer, operands, kind),
            _branches(partial(_map, layer.mixer), operands, kind),
            _map(layer.mixer, operands),
            lam,
            hidden,
        )
    )


def _each_head(x: Array, heads: int, kind: str) -> Array:
    """Queries or keys [B T Nk H] as [B N P T H], shared ones repeated."""
    if x.shape[2] < 2 * heads and kind == "v2":  # both branches share their key
        x = jnp.repeat(x, 2, axis=2)
    branches = 1 if kind == "none" else 2
    own = rearrange(x, "b t (k p) h -> b k p t h", p=branches)
    return repeat(own, "b k p t h -> b (k g) p t h", g=heads // own.shape[1])


def _branches(read: Callable, operands: dict[str, Operand], kind: str) -> Array:
    """read(operands) [B N T T] for every branch: λ = 0 gives the first, and with
    branches swapped the second."""
    if kind == "none":
        return read(operands)[:, :, None]
    lam = operands["lam"]
    first = operands | {"lam": lam._replace(array=jnp.zeros_like(lam.array))}
    own = ("BTN",) if kind == "v2" else ("BTN", "BSK", "BTK")
    swapped = {
        name: operand._replace(array=_swap(operand.array))
        for name, operand in first.items()
        if operand.axes in own and name not in ("lam", "value")
    }
    return jnp.stack([read(first), read(first | swapped)], axis=2)


def _swap(x: Array) -> Array:
    """Heads 2n and 2n + 1 in each other's place."""
    pairs = x.reshape(*x.shape[:2], -1, 2, *x.shape[3:])
    return jnp.flip(pairs, axis=3).reshape(x.shape)


def _map(mixer: Mixer, operands: dict[str, Operand]) -> Array:
    return jnp.swapaxes(mixer(operands), 1, 2)


def _scores(mixer: Mixer, operands: dict[str, Operand]) -> Array:
    """The engine's own scores: the map of a mechanism whose weights are its scores."""
    names = ("window", "length_base", "mask_self")
    options: dict[str, Any] = {name: x for name, x in mixer.options if name in names}
    query, key = operands["query"].array, operands["key"].array
    if "lam" in operands:
        shape = (*query.shape[:2], query.shape[2] // 2)
        options["lam"] = jnp.broadcast_to(operands["lam"].array, shape)
        options["shared_keys"] = mixer.differential == "v2"
    if "mask" in operands:
        options["mask"] = operands["mask"].array
    return row_map(_itself, query, key, is_causal=mixer.causal, **options)


def _products(mixer: Mixer, operands: dict[str, Operand], kind: str) -> Array | None:
    features = part_of(mixer.mechanism).features
    if features is None:
        return None
    maps = features(dict(mixer.options))
    query, key = (
        _each_head(of(operands[name].array, None).weights(), mixer.sizes.heads, kind)
        for of, name in ((maps.query, "query"), (maps.key, "key"))
    )
    products = jnp.einsum("bnpth,bnpsh->bnpts", query, key)
    return jnp.tril(products) if mixer.causal else products


def _itself(scores: Array, visible: Array | None) -> Array:
    return scores if visible is None else jnp.where(visible, scores, 0)
