"""What happens inside a model while it reads held-out windows.

The same for encoders: they read a row with its pads, which are then left out.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from tqdm import tqdm

from symjax import config
from symjax.data.generated import NOTHING
from symjax.evaluation.asked import Asked
from symjax.evaluation.reading import Inputs, Layer, read
from symjax.evaluation.trained import Trained
from symjax.models.build import Model
from symjax.models.encoder import Encoder

WINDOWS = 4  # of held-out text that are read, unless --batches says fewer
IMAGES = 32  # likewise; they have few tokens
LONGEST = 512  # tokens of a window: a map has the square of them, in every head


class Window(NamedTuple):
    """What is held out, and what every layer does with it.

    Attributes:
        tokens: those that exist; None of an image.
        targets: below 0 where nothing is asked; of a classifier the label.
        layers: what each does.
        visible: the pairs that see each other: causal in a decoder, else all.
    """

    tokens: Int[np.ndarray, "T"] | None
    targets: Int[np.ndarray, "T"]
    layers: list[Layer]
    visible: Bool[np.ndarray, "T T"]


def windows(trained: Trained, asked: Asked) -> Iterator[Window]:
    """A few windows spread over what is held out, as long as those of training.

    Of a text at most 512 tokens each. 4 of them, or 32 images, or `--batches` if that
    is fewer.
    """
    model = trained.any_model()
    for row in tqdm(_chosen(trained, asked), "windows", leave=False, disable=None):
        yield _window(model, *row)


def _chosen(trained: Trained, asked: Asked) -> list[tuple[Inputs, np.ndarray]]:
    """Inputs and targets of the rows to read."""
    corpus, model = trained.corpus, trained.options.model
    length = model.length if corpus.fixed_length else min(model.length, LONGEST)
    most = IMAGES if model.patch else WINDOWS
    count = min(asked.batches or most, most)
    chosen = [rows(0, 1) for rows in corpus.heldout_batches((1, length), count)]
    if not model.classes and len(chosen) > 1:  # the last window may not be filled
        chosen = [rows for rows in chosen if _is_filled(*rows)]
    return [(inputs[0], targets[0]) for inputs, targets, _ in chosen]


def _is_filled(inputs: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> bool:
    """Whether a row of text has neither pads nor tokens that stand in for pads."""
    return bool((inputs >= 0).all() and (weights[targets >= 0] > 0).all())


def _window(model: Model, inputs: Inputs, targets: np.ndarray) -> Window:
    layers = read(model, inputs)
    visible = all_pairs(len(layers[0].hidden), causal=not isinstance(model, Encoder))
    there = inputs >= 0
    if inputs.ndim > 1:
        return Window(None, targets, layers, visible)
    if len(targets) == len(inputs):
        targets = targets[there]
    return Window(inputs[there], targets, layers, visible)


def all_pairs(count: int, *, causal: bool) -> Bool[np.ndarray, "T T"]:
    """The pairs of so many tokens that see each other."""
    pairs = np.ones((count, count), bool)
    return np.tril(pairs) if causal else pairs


def by_keys(
    trained: Trained, asked: Asked, measure: Callable[[Layer], np.ndarray]
) -> tuple[Int[np.ndarray, " n"], list[Float[np.ndarray, " n"]]]:
    """How many keys rows see, and the mean of a measure of such rows in every layer.

    Row t of a decoder sees t keys. All rows of an encoder see the same keys, so that
    it reads the first 1, 2, 4, … tokens of its windows and all of them; images whole.

    Args:
        measure: of a layer, a number a row [T].
    """
    if config.is_causal(trained.options.model):
        found = mean_by_layer(trained, asked, lambda _, layer: measure(layer))
        return np.arange(1, len(found[0]) + 1), found
    model, rows = trained.any_model(), _chosen(trained, asked)
    if trained.options.model.patch:
        cuts = {trained.options.model.length: rows}
    else:
        longest = max(int((inputs >= 0).sum()) for inputs, _ in rows)
        sizes = [2**i for i in range(longest.bit_length()) if 2**i < longest]
        cuts = {n: _first_tokens(rows, n) for n in (*sizes, longest)}
    values = []  # [sizes, layers]
    for some in tqdm(cuts.values(), "number of keys", leave=False, disable=None):
        found = [[measure(x).mean() for x in read(model, row)] for row, _ in some]
        values.append(np.mean(found, axis=0))
    return np.array(list(cuts)), list(np.stack(values, axis=1))


def _first_tokens(
    rows: list[tuple[Inputs, np.ndarray]], count: int
) -> list[tuple[Inputs, np.ndarray]]:
    """The rows that have so many tokens, the others of them hidden."""
    places = np.arange(len(rows[0][0]))
    return [
        (np.where(places < count, inputs, NOTHING), targets)
        for inputs, targets in rows
        if (inputs >= 0).sum() >= count
    ]


def mean_by_layer(
    trained: Trained, asked: Asked, measure: Callable[[Window, Layer], np.ndarray]
) -> list[np.ndarray]:
    """The mean of a measure over windows, for every layer; NaN is left out."""
    found = [
        [np.asarray(measure(window, layer), np.float64) for layer in window.layers]
        for window in windows(trained, asked)
    ]
    return [_mean(np.stack(layer)) for layer in zip(*found, strict=True)]


def _mean(x: np.ndarray) -> np.ndarray:
    known = ~np.isnan(x)
    total = np.where(known, x, 0).sum(axis=0)
    return np.where(known.any(axis=0), total / np.maximum(known.sum(axis=0), 1), np.nan)
