"""Pictures of the attention maps of every layer, for one sentence or one image.

A map is the mean over the heads of a layer; row t shows the weights a_ts with which the
query t reads the keys s. There are no numbers, only figures (`--out`, `--report`).
"""

import numpy as np

from symjax import config
from symjax.data.documents import tokens_of
from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.measures.reading import Layer, read
from symjax.evaluation.measures.windows import Inputs, visible_pairs
from symjax.evaluation.results import Options, Result
from symjax.figures import Grid, Panels
from symjax.models.build import attentions

LONGEST = 48  # the most tokens, since smaller labels cannot be read in a figure
HIDDEN = "[mask]"
QUANTILE = 0.98  # fraction of the weights that the scale of colours covers


def maps(run: LoadedRun, options: Options) -> Result:
    """Draw the attention map of every layer for the prompt, or for a held-out row.

    A differential layer has three pictures in one scale of colours: both branches, and
    their difference A₁ − λA₂. The tokens of an image are its patches, named by row and
    column.

    Raises:
        ValueError: the prompt is empty, or has unknown characters.
    """
    inputs, labels = _sentence(run, options.prompt)
    causal = config.is_causal(run.config.model)
    names = [layer.mixer.mechanism for layer in attentions(run.model())]
    figures = []
    for index, layer in enumerate(read(run.model(), inputs)):
        figure = layer_map(layer, names[index], labels, causal=causal)
        title = f"Layer {index}: {figure.title}"
        figures.append(figure._replace(name=f"map_{index}", title=title))
    patches = run.config.model.patch > 0
    what = "patches (row, column)" if patches else f"tokens, {' '.join(labels)!r}"
    text = [
        f"maps of {len(labels)} {what}:",
        f"{len(figures)} figures for --out and --report",
    ]
    if options.prompt is not None and run.examples.tokenizer is None:
        text.append("of a held-out row: --prompt needs a model of text")
    return Result({}, text, (), tuple(figures))


def layer_map(
    layer: Layer, mechanism: str, labels: list[str], *, causal: bool
) -> Grid | Panels:
    """Draw the mean map of a layer's heads; if differential, also that of each branch.

    Args:
        mechanism: name of the mechanism, for the title.
        labels: names of the tokens.
        causal: whether later keys are hidden from a query; they are grey.
    """
    grids = [_grid("A", layer.map.mean(axis=0), labels, causal)]
    heads = f"the mean of {len(layer.map)} heads" if len(layer.map) > 1 else "one head"
    title = f"{mechanism} attention, {heads}"
    if layer.lam is not None:
        pictures = (*layer.branches.mean(axis=0), layer.map.mean(axis=0))
        lam = float(np.mean(layer.lam))
        names = "first branch, A₁", "second branch, A₂", f"A₁ − λA₂, λ = {lam:.2f}"
        grids = [
            _grid(name, picture, labels, causal)
            for name, picture in zip(names, pictures, strict=True)
        ]
        title = f"differential {title}"
    limit = _color_limit(np.array([grid.values for grid in grids]))
    grids = [grid._replace(limit=limit) for grid in grids]
    if len(grids) == 1:
        return grids[0]._replace(title=title)
    return Panels("map", title, tuple(grids), signed=True)


def _grid(title: str, picture: np.ndarray, labels: list[str], causal: bool) -> Grid:
    visible = visible_pairs(len(labels), causal=causal)
    values = np.where(visible, picture.astype(np.float64), np.nan)
    return Grid(
        "map", "key", "query", labels, labels, values, title, unit="attention weight"
    )


def _color_limit(values: np.ndarray) -> float:
    """Return the largest weight of the scale of colours, which 2 % of weights exceed.

    The first rows see few keys, so their weights are large. A scale up to the largest
    weight would show all other rows in almost one colour.
    """
    sizes = np.abs(values[~np.isnan(values)])
    return float(np.quantile(sizes, QUANTILE)) or float(sizes.max())


def _sentence(run: LoadedRun, prompt: str | None) -> tuple[Inputs, list[str]]:
    """Return the inputs of the figures, and the labels of their tokens."""
    model, tokenizer = run.config.model, run.examples.tokenizer
    longest = min(LONGEST, model.length)
    if prompt is not None and tokenizer is not None:
        ids = tokenizer.encode(prompt)[:longest]
        if not len(ids):
            raise ValueError("--prompt is empty: give text to look at")
    else:
        rows = next(run.examples.heldout_batches((1, model.length), 1))
        ids = tokens_of(rows(0, 1)[0])[0]
    if model.patch:
        rows, columns = (size // model.patch for size in model.image[:2])
        return ids, [f"{y},{x}" for y in range(rows) for x in range(columns)]
    if tokenizer is None:
        return ids, [str(x) for x in ids]
    ids = ids[ids >= 0][:longest]
    single = (tokenizer.decode(ids[i : i + 1]) for i in range(len(ids)))
    labels = list(map(_label, single))
    for position in np.flatnonzero(ids == tokenizer.vocabulary):
        labels[position] = HIDDEN
    return ids, labels


def _label(token: str) -> str:
    return token if token.isprintable() and token.strip() else repr(token)[1:-1]
