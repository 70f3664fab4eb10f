"""A few held-out windows, and what every layer of a model does with each of them."""

from collections.abc import Callable, Collection
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike

from symjax import config
from symjax.data.generated import NOTHING
from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.reading import Inputs, Layer, read
from symjax.evaluation.results import Options, progress

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
