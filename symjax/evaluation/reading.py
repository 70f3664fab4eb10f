"""What one layer of a model does with a window: queries, keys, maps, hidden states.

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

from symjax.attention import ScoreMechanism
from symjax.attention.features import PLAIN, UNIT
from symjax.attention.rows import row_map
from symjax.layers import Attention, GatedBlock, UniversalBlock
from symjax.layers.forms import form_of
from symjax.models.build import Model

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


def attentions(model: Model) -> list[Attention | GatedBlock]:
    """The attention of every layer; that of a universal model as often as it steps."""
    found: list[Attention | GatedBlock] = []
    for block in model.blocks:
        if isinstance(block, UniversalBlock):
            found += [block.block.attention] * block.depth
        else:
            found.append(block if isinstance(block, GatedBlock) else block.attention)
    return found


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
    def kept(x: Any, *axes: int) -> Any:
        if x is None:
            return None
        for axis in axes:
            x = np.compress(there, x, axis=axis)
        return x

    pairs = ("scores", "products", "branches", "map")
    found = {name: kept(getattr(layer, name), -2, -1) for name in pairs}
    found |= {name: kept(getattr(layer, name), -2) for name in ("query", "key")}
    value, hidden = kept(layer.value, -2), kept(layer.hidden, 0)
    return layer._replace(value=value, hidden=hidden, lam=kept(layer.lam, 0), **found)


@partial(jax.jit, static_argnums=0)
def _read(graph: nnx.GraphDef, weights: Any, inputs: Array) -> list[Layer]:
    model, found = nnx.merge(graph, weights), []
    model.remat, model.period = "none", 0  # one block after another
    watched = []
    for block in model.blocks:
        if isinstance(block, UniversalBlock):
            block.remat = "none"
            watching: Any = block
            watching.block = nnx.static(_Watched(block.block, found))
            watched.append(block.__call__)
        else:
            watched.append(_Watched(block, found))
    model.blocks = nnx.static(watched)
    model(inputs)
    return found


class _Watched:
    """A block that also writes down what its attention does."""

    def __init__(self, block: Any, found: list[Layer]):
        self.block, self.found = block, found

    def __call__(
        self, x: Array, padding_mask: Array | None = None, **options: Any
    ) -> Array:
        hidden = self.block(x, padding_mask, **options)
        if isinstance(self.block, GatedBlock):
            layer, y = self.block, self.block.norm(x)
        else:
            layer, y = self.block.attention, self.block.attention_norm(x)
        self.found.append(_layer(layer, y, padding_mask, hidden))
        return hidden


def _layer(layer: Any, x: Array, padding_mask: Array | None, hidden: Array) -> Layer:
    """What an `Attention` or a `GatedBlock` makes of x."""
    positions = jnp.arange(x.shape[1])[None]
    arrays = layer.arrays(x, positions)
    if padding_mask is not None:
        arrays["mask"] = (padding_mask[:, None, None], "B")
    query, key = arrays["query"][0], arrays["key"][0]
    kind, lam = "none", None
    if isinstance(layer, Attention):
        query, key, _ = layer.project(x, positions)
        kind = layer.differential
    if kind != "none":
        lam = arrays["lam"][0]
        lam = jnp.broadcast_to(lam, (*x.shape[:2], layer.sizes.heads))
    value = arrays["value"][0]
    heads = query.shape[2] // (1 if lam is None else 2)
    length = x.shape[1]
    units = jnp.broadcast_to(
        jnp.eye(length)[None, :, None], (1, length, value.shape[2], length)
    )
    arrays["value"] = (units, arrays["value"][1])
    scores = None
    if _has_scores(layer):
        scores = _branches(partial(_scores, layer), arrays, kind)
    # Traced here; `read` gives them out as numpy arrays.
    return Layer._make(
        (
            _each_head(query, heads, kind),
            _each_head(key, heads, kind),
            repeat(value, "b t k v -> b (k g) t v", g=heads // value.shape[2]),
            scores,
            _products(layer, arrays, heads, kind),
            _branches(partial(_map, layer), arrays, kind),
            _map(layer, arrays),
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


def _branches(read: Callable, arrays: dict[str, Any], kind: str) -> Array:
    """read(arrays) [B N T T] for every branch: λ = 0 leaves the first, and after they
    have changed places the second."""
    if kind == "none":
        return read(arrays)[:, :, None]
    lam, axes = arrays["lam"]
    first = arrays | {"lam": (jnp.zeros_like(lam), axes)}
    names = ("query",) if kind == "v2" else ("query", "key", "log_decay")
    swapped = {
        name: (_swap(first[name][0]), first[name][1]) for name in names if name in first
    }
    return jnp.stack([read(first), read(first | swapped)], axis=2)


def _swap(x: Array) -> Array:
    """Heads 2n and 2n + 1 in each other's place."""
    pairs = x.reshape(*x.shape[:2], -1, 2, *x.shape[3:])
    return jnp.flip(pairs, axis=3).reshape(x.shape)


def _map(layer: Attention | GatedBlock, arrays: dict[str, Any]) -> Array:
    return jnp.swapaxes(layer.mix(arrays), 1, 2)


def _has_scores(layer: Attention | GatedBlock) -> bool:
    if isinstance(layer, GatedBlock):
        return layer.mechanism == "gau"
    return isinstance(form_of(layer.mechanism).attend, ScoreMechanism)


def _scores(layer: Any, arrays: dict[str, Any]) -> Array:
    """The engine's own scores: the map of a mechanism whose weights are its scores."""
    options: dict[str, Any] = {
        name: x for name, x in layer.options if name in ("length_base", "mask_self")
    }
    query, key = arrays["query"][0], arrays["key"][0]
    if "lam" in arrays:
        shape = (*query.shape[:2], query.shape[2] // 2)
        options["lam"] = jnp.broadcast_to(arrays["lam"][0], shape)
        options["shared_keys"] = layer.differential == "v2"
    if "mask" in arrays:
        options["mask"] = arrays["mask"][0]
    return row_map(_itself, query, key, is_causal=layer.causal, **options)


def _products(
    layer: Attention | GatedBlock, arrays: dict[str, Any], heads: int, kind: str
) -> Array | None:
    if layer.mechanism not in ("linear", "cosine"):
        return None
    maps = UNIT
    if layer.mechanism == "linear":
        maps = PLAIN[dict(layer.options).get("features", "elu")]
    query = _each_head(maps.query(arrays["query"][0], None).weights(), heads, kind)
    key = _each_head(maps.key(arrays["key"][0], None).weights(), heads, kind)
    products = jnp.einsum("bnpth,bnpsh->bnpts", query, key)
    return jnp.tril(products) if layer.causal else products


def _itself(scores: Array, visible: Array | None) -> Array:
    return scores if visible is None else jnp.where(visible, scores, 0)
