"""Queries, keys, attention maps and hidden states of every layer on held-out windows.

`read(model, inputs)` runs a model on one window and returns a `Layer` for each of its
layers. Attention maps are computed in one way for every mechanism: the layer attends
with unit vectors as values, so that row t of its output is row t of its map.

The measures of this package are functions of one `Window` and one `Layer`. `by_layer`
calls such a function for every layer on a few windows (`windows.heldout_rows`). Three
functions return averages of a measure:

    mean_by_layer     over windows of one length
    mean_over_rows    over the rows of windows of any length
    mean_by_keys      separately for each number of keys
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from einops import repeat
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import ArrayLike

from symjax import config
from symjax.data.generated import NOTHING
from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.measures.windows import (
    Inputs,
    Row,
    Window,
    heldout_rows,
    visible_pairs,
    window_of,
)
from symjax.evaluation.results import Options, progress
from symjax.layers.mixer import Mixer
from symjax.layers.parts.table import part_of
from symjax.layers.sharded import Operand
from symjax.models.attention_maps import (
    branches_of,
    by_branch,
    each_branch,
    in_own_pairs,
    map_of,
    operands_of,
    scores_of_branches,
)
from symjax.models.build import Model, attentions

PAIRED = ("scores", "products", "branches", "map")  # fields of `Layer` [... T T]

Measured = TypeVar("Measured")


class Layer(NamedTuple):
    """Queries, keys, maps and outputs of one layer on one window of T tokens.

    The tokens of an image are its patches. P is the number of branches of a head: 2 in
    differential attention, 1 otherwise. Keys and values that several heads share are
    repeated for each head.

    Attributes:
        query, key: after the rotation by positions, before any feature map.
        scores: scaled q·k, times the factor of log-n scaling or `length_scale`, without
            biases and forget gates; 0 at hidden pairs. None for mechanisms that compute
            no scores.
        products: φ(q)·φ(k) of linear and cosine layers before the division by the sum
            of their row, 0 at hidden pairs; None for other mechanisms.
        branches: the map of each branch.
        map: the map of the head: A, or A₁ − λA₂.
        lam: λ of every token and head; None if the layer is not differential.
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


def by_layer(
    run: LoadedRun,
    options: Options,
    measure: Callable[[Window, Layer], Measured],
    layers: Collection[int] | None = None,
) -> dict[int, list[Measured]]:
    """Return measure(window, layer) for every window, by the index of the layer.

    Args:
        layers: indices of the layers to measure; None means all.
    """
    model = run.model()
    results: dict[int, list[Measured]] = {}
    for inputs, targets in progress(heldout_rows(run, options), "windows"):
        layers_read = read(model, inputs)
        visible = visible_by_layer(model, len(layers_read[0].hidden))
        for index, layer in enumerate(layers_read):
            if layers is None or index in layers:
                window = window_of(inputs, targets, visible[index])
                results.setdefault(index, []).append(measure(window, layer))
    return results


def visible_by_layer(model: Model, count: int) -> list[Bool[np.ndarray, "T T"]]:
    """Return, for each layer, the pairs of `count` tokens that it may use."""
    found = []
    for layer in attentions(model):
        options = dict(layer.mixer.options)
        pairs = visible_pairs(
            count,
            causal=layer.mixer.causal,
            window=options.get("window"),
            mask_self=options.get("mask_self", False),
        )
        found.append(pairs)
    return found


def mean_by_layer(
    run: LoadedRun, options: Options, measure: Callable[[Window, Layer], np.ndarray]
) -> list[Float[np.ndarray, "..."]]:
    """Return the mean of a measure over windows, for every layer.

    Args:
        measure: returns arrays of one shape for all windows; NaN is left out.
    """
    return [
        nan_mean(np.stack(results).astype(np.float64))
        for results in by_layer(run, options, measure).values()
    ]


def mean_over_rows(
    run: LoadedRun, options: Options, measure: Callable[[Window, Layer], np.ndarray]
) -> list[Float[np.ndarray, "..."]]:
    """Return the mean of a measure over the rows of all windows, for every layer.

    Every row has the same weight, even if the windows of an encoder differ in length.

    Args:
        measure: returns an array [... T] with a number for each row; NaN is left out.
    """
    return [
        nan_mean(np.concatenate(results, axis=-1).astype(np.float64), axis=-1)
        for results in by_layer(run, options, measure).values()
    ]


def mean_by_keys(
    run: LoadedRun, options: Options, measure: Callable[[Layer], np.ndarray]
) -> tuple[Int[np.ndarray, " n"], list[Float[np.ndarray, " n"]]]:
    """Return numbers of keys, and the mean of a measure at each number, by layer.

    In a decoder the number of keys of a row is its position, counted from 1, even if
    `model.attention.window` or `mask_self` hides some of these keys. All rows of an
    encoder see the same keys, so its held-out texts are read several times: cut to
    their first 1, 2, 4, … tokens, and whole. Images are only read whole.

    Args:
        measure: returns an array [T] with a number for each row.
    """
    if config.is_causal(run.config.model):
        means = mean_by_layer(run, options, lambda _, layer: measure(layer))
        return np.arange(1, len(means[0]) + 1), means
    model, rows = run.model(), heldout_rows(run, options)
    if run.config.model.patch:
        rows_by_keys = {run.config.model.length: rows}
    else:
        longest = max(int((inputs >= 0).sum()) for inputs, _ in rows)
        sizes = [2**i for i in range(longest.bit_length()) if 2**i < longest]
        rows_by_keys = {n: _first_tokens(rows, n) for n in (*sizes, longest)}
    means = []  # [numbers of keys, layers]
    for cut in progress(rows_by_keys.values(), "number of keys"):
        of_rows = [[measure(x).mean() for x in read(model, row)] for row, _ in cut]
        means.append(np.mean(of_rows, axis=0))
    return np.array(list(rows_by_keys)), list(np.stack(means, axis=1))


def _first_tokens(rows: list[Row], count: int) -> list[Row]:
    """Return the rows of at least `count` tokens, with the later tokens as padding."""
    positions = np.arange(len(rows[0][0]))
    return [
        (np.where(positions < count, inputs, NOTHING), targets)
        for inputs, targets in rows
        if (inputs >= 0).sum() >= count
    ]


def nan_mean(x: ArrayLike, axis: int = 0) -> np.ndarray:
    """Return the mean of the numbers that are not NaN; NaN where all are NaN."""
    x = np.asarray(x)
    known = ~np.isnan(x)
    total, count = np.where(known, x, 0).sum(axis), known.sum(axis)
    return np.where(count, total / np.maximum(count, 1), np.nan)


def read(model: Model, inputs: Inputs) -> list[Layer]:
    """Return a `Layer` for every layer of a model on one window, without padding.

    The model is not changed. Memory O(N T²) per layer.
    """
    graph, weights = nnx.split(model)
    traced = _read_layers(graph, weights, jnp.asarray(inputs)[None])
    layers = jax.tree.map(lambda x: np.asarray(x[0], np.float32), traced)
    if inputs.ndim > 1 or (inputs >= 0).all():
        return layers
    return [_without_padding(layer, inputs >= 0) for layer in layers]


def _without_padding(layer: Layer, exists: Bool[np.ndarray, "T"]) -> Layer:
    arrays = {}
    for name, x in layer._asdict().items():
        if x is not None:
            arrays[name] = np.compress(exists, x, axis=-2)
            if name in PAIRED:
                arrays[name] = np.compress(exists, arrays[name], axis=-1)
    return layer._replace(**arrays)


@partial(jax.jit, static_argnums=0)
def _read_layers(graph: nnx.GraphDef, weights: Any, inputs: Array) -> list[Layer]:
    model, layers = nnx.merge(graph, weights), []
    model(inputs, watch=lambda *values: layers.append(_layer(*values)))
    return layers


def _layer(layer: Any, x: Array, padding_mask: Array | None, hidden: Array) -> Layer:
    """Return the traced `Layer` [B ...] of an `Attention` or a `GatedBlock`.

    Args:
        x: the input of the layer.
        hidden: the residual stream after it.
    """
    operands = operands_of(layer, x, padding_mask)
    positions = jnp.arange(x.shape[1])[None]
    lengths = layer.rotate.lengths(positions, padding_mask)
    query, key, value = layer.project(x, positions, lengths=lengths)
    mixer, lam = layer.mixer, None
    heads, kind = mixer.sizes.heads, mixer.differential
    if kind != "none":
        lam = jnp.broadcast_to(operands["lam"].array, (*x.shape[:2], heads))
    query, key = by_branch(mixer, query, key, value.shape[2])
    mixer, operands = in_own_pairs(mixer, operands)
    # The arrays are traced here; `read` turns them into numpy arrays.
    return Layer._make(
        (
            query,
            key,
            repeat(value, "b t k v -> b (k g) t v", g=heads // value.shape[2]),
            scores_of_branches(mixer, operands),
            _products(mixer, operands, kind),
            each_branch(partial(map_of, mixer), operands, kind),
            map_of(mixer, operands),
            lam,
            hidden,
        )
    )


def _products(mixer: Mixer, operands: dict[str, Operand], kind: str) -> Array | None:
    """Return φ(q)·φ(k) [B N P T T]; None for mechanisms without feature maps."""
    features = part_of(mixer.mechanism).features
    if features is None:
        return None
    maps = features(dict(mixer.options))
    query, key = (
        branches_of(of(operands[name].array, None).weights(), mixer.sizes.heads, kind)
        for of, name in ((maps.query, "query"), (maps.key, "key"))
    )
    products = jnp.einsum("bnpth,bnpsh->bnpts", query, key)
    return jnp.tril(products) if mixer.causal else products
