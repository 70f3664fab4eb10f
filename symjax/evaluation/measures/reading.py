"""Queries, keys, maps and hidden states of every layer of a model for a window.

One way of reading for every mechanism: the map of a layer is what the layer itself
makes of unit vectors as values. The model runs as it is, and its blocks are watched.

A few held-out windows, and what every layer of a model does with each of them.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange, repeat
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import ArrayLike

from symjax import config
from symjax.attention.row_maps import row_map
from symjax.data.generated import NOTHING
from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.results import Options, progress
from symjax.layers.mixer import Mixer
from symjax.layers.parts.table import part_of
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


WINDOWS = 4  # of held-out text that are read, unless --batches says fewer
IMAGES = 32  # likewise; they have few tokens
TRIED = 8  # windows for each that is read, where they should be of one document
LONGEST = 512  # tokens of a window: a map has the square of them, in every head

Row = tuple[Inputs, np.ndarray]  # inputs and targets
Measured = TypeVar("Measured")


class Window(NamedTuple):
    """A held-out row without its padding.

    Attributes:
        tokens: None of an image.
        targets: below 0 where there is none; of a classifier the label.
        visible: the pairs that see each other: causal in a decoder, else all.
    """

    tokens: Int[np.ndarray, "T"] | None
    targets: Int[np.ndarray, "T"]
    visible: Bool[np.ndarray, "T T"]


def by_layer(
    run: LoadedRun,
    options: Options,
    measure: Callable[[Window, Layer], Measured],
    layers: Collection[int] | None = None,
) -> dict[int, list[Measured]]:
    """measure(window, layer) of every window, by the number of the layer.

    Args:
        layers: those that are measured; None: all.
    """
    model, causal = run.model(), config.is_causal(run.config.model)
    found: dict[int, list[Measured]] = {}
    for inputs, targets in progress(heldout_rows(run, options), "windows"):
        seen = read(model, inputs)
        window = _window(inputs, targets, all_pairs(len(seen[0].hidden), causal=causal))
        for index, layer in enumerate(seen):
            if layers is None or index in layers:
                found.setdefault(index, []).append(measure(window, layer))
    return found


def mean_by_layer(
    run: LoadedRun, options: Options, measure: Callable[[Window, Layer], np.ndarray]
) -> list[Float[np.ndarray, "..."]]:
    """Return the mean of a measure over windows, for every layer; NaN is left out.

    For measures whose results have one shape in all windows, and count alike.
    """
    return [
        known_mean(np.stack(found).astype(np.float64))
        for found in by_layer(run, options, measure).values()
    ]


def mean_over_rows(
    run: LoadedRun, options: Options, measure: Callable[[Window, Layer], np.ndarray]
) -> list[Float[np.ndarray, "..."]]:
    """Return the mean of a measure over the rows of all windows, for every layer.

    Windows of an encoder have unequal numbers of tokens, so that a mean of the means of
    windows would be another number.

    Args:
        measure: of a window, numbers of every row [... T]; rows with NaN are left out.
    """
    return [
        known_mean(np.concatenate(found, axis=-1).astype(np.float64), axis=-1)
        for found in by_layer(run, options, measure).values()
    ]


def known_mean(x: ArrayLike, axis: int = 0) -> np.ndarray:
    """The mean of what is not NaN; NaN where nothing else is."""
    x = np.asarray(x)
    known = ~np.isnan(x)
    total, count = np.where(known, x, 0).sum(axis), known.sum(axis)
    return np.where(count, total / np.maximum(count, 1), np.nan)


def heldout_rows(run: LoadedRun, options: Options) -> list[Row]:
    """A few rows spread over what is held out, as long as those of training.

    With their padding. Of a text at most 512 tokens each. 4 of them, or 32 images, or
    `--batches` if that is fewer.
    """
    model = run.config.model
    longest = run.examples.fixed_length or model.length <= LONGEST
    length = model.length if longest else LONGEST
    most = IMAGES if model.patch else WINDOWS
    count = min(options.batches or most, most)
    if run.examples.separate:
        return _of_one_document(run, length, count)
    chosen = [rows(0, 1) for rows in run.examples.heldout_batches((1, length), count)]
    if not model.classes and len(chosen) > 1:  # the last window may not be filled
        chosen = [rows for rows in chosen if _is_filled(*rows)]
    return [(inputs[0], targets[0]) for inputs, targets, _ in chosen]


def _of_one_document(run: LoadedRun, length: int, count: int) -> list[Row]:
    """Windows inside a document, the first of each stretch that has one; where there
    are none, windows as they come."""
    rows = run.examples.heldout_batches((1, length), TRIED * count)
    drawn = [row(0, 1) for row in rows]
    inside = [row for row in drawn if not row[0].segment_ids.any() and row[2].all()]
    chosen = inside or drawn
    step = -(-len(chosen) // count)
    return [(inputs.tokens[0], targets[0]) for inputs, targets, _ in chosen[::step]]


def _is_filled(inputs: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> bool:
    """Whether a row of text has neither padding nor repeated tokens in its place."""
    return bool((inputs >= 0).all() and (weights[targets >= 0] > 0).all())


def _window(inputs: Inputs, targets: np.ndarray, visible: np.ndarray) -> Window:
    if inputs.ndim > 1:
        return Window(None, targets, visible)
    there = inputs >= 0
    if len(targets) == len(inputs):
        targets = targets[there]
    return Window(inputs[there], targets, visible)


def all_pairs(count: int, *, causal: bool) -> Bool[np.ndarray, "T T"]:
    """The pairs of so many tokens that see each other."""
    pairs = np.ones((count, count), bool)
    return np.tril(pairs) if causal else pairs


def by_keys(
    run: LoadedRun, options: Options, measure: Callable[[Layer], np.ndarray]
) -> tuple[Int[np.ndarray, " n"], list[Float[np.ndarray, " n"]]]:
    """How many keys rows see, and the mean of a measure of such rows in every layer.

    Row t of a decoder sees t keys. All rows of an encoder see the same keys, so that
    it reads the first 1, 2, 4, … tokens of its windows and all of them; images whole.

    Args:
        measure: of a layer, a number a row [T].
    """
    if config.is_causal(run.config.model):
        found = mean_by_layer(run, options, lambda _, layer: measure(layer))
        return np.arange(1, len(found[0]) + 1), found
    model, rows = run.model(), heldout_rows(run, options)
    if run.config.model.patch:
        cuts = {run.config.model.length: rows}
    else:
        longest = max(int((inputs >= 0).sum()) for inputs, _ in rows)
        sizes = [2**i for i in range(longest.bit_length()) if 2**i < longest]
        cuts = {n: _first_tokens(rows, n) for n in (*sizes, longest)}
    values = []  # [sizes, layers]
    for some in progress(cuts.values(), "number of keys"):
        found = [[measure(x).mean() for x in read(model, row)] for row, _ in some]
        values.append(np.mean(found, axis=0))
    return np.array(list(cuts)), list(np.stack(values, axis=1))


def _first_tokens(rows: list[Row], count: int) -> list[Row]:
    """The rows that have so many tokens, the others of them hidden."""
    places = np.arange(len(rows[0][0]))
    return [
        (np.where(places < count, inputs, NOTHING), targets)
        for inputs, targets in rows
        if (inputs >= 0).sum() >= count
    ]
