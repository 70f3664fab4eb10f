"""Pictures of attention maps: of one sentence, or of one image."""

import numpy as np

from symjax import config
from symjax.data.documents import tokens_of
from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.measures.reading import (
    Inputs,
    Layer,
    all_pairs,
    attentions,
    read,
)
from symjax.evaluation.results import Options, Result
from symjax.figures import Grid, Panels

SENTENCE = 48  # tokens at most: more cannot be read from a figure
HIDDEN = "[mask]"
WITHIN = 0.98  # of the weights have a colour of their own


def maps(run: LoadedRun, options: Options) -> Result:
    """A picture of every layer's map of the prompt, or of what is held out first.

    Means over heads. Of differential layers the two branches and their difference side
    by side, in one scale of colours. The tokens of an image are patches, named by row
    and column.

    Raises:
        ValueError: the prompt is empty, or has unknown characters.
    """
    inputs, labels = _sentence(run, options.prompt)
    causal = config.is_causal(run.config.model)
    names = [layer.mixer.mechanism for layer in attentions(run.model())]
    figures = []
    for index, layer in enumerate(read(run.model(), inputs)):
        named = layer_map(layer, names[index], labels, causal=causal)
        title = f"Layer {index}: {named.title}"
        figures.append(named._replace(name=f"map_{index}", title=title))
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
    """The map of a layer, a mean over heads; of a differential one three maps.

    Args:
        mechanism: its name, for the title.
        labels: names of the tokens.
        causal: keys behind the query are left out.
    """
    known = [_grid("A", layer.map.mean(axis=0), labels, causal)]
    heads = f"the mean of {len(layer.map)} heads" if len(layer.map) > 1 else "one head"
    title = f"{mechanism} attention, {heads}"
    if layer.lam is not None:
        pictures = (*layer.branches.mean(axis=0), layer.map.mean(axis=0))
        lam = float(np.mean(layer.lam))
        names = "first branch, A₁", "second branch, A₂", f"A₁ − λA₂, λ = {lam:.2f}"
        known = [
            _grid(name, picture, labels, causal)
            for name, picture in zip(names, pictures, strict=True)
        ]
        title = f"differential {title}"
    limit = _limit(np.array([grid.values for grid in known]))
    known = [grid._replace(limit=limit) for grid in known]
    if len(known) == 1:
        return known[0]._replace(title=title)
    return Panels("map", title, tuple(known), signed=True)


def _grid(title: str, picture: np.ndarray, labels: list[str], causal: bool) -> Grid:
    visible = all_pairs(len(labels), causal=causal)
    values = np.where(visible, picture.astype(np.float64), np.nan)
    return Grid(
        "map", "key", "query", labels, labels, values, title, unit="attention weight"
    )


def _limit(values: np.ndarray) -> float:
    """The size that few weights exceed: those of the first rows, which see few keys,
    would leave no colour for all others."""
    sizes = np.abs(values[~np.isnan(values)])
    return float(np.quantile(sizes, WITHIN)) or float(sizes.max())


def _sentence(run: LoadedRun, prompt: str | None) -> tuple[Inputs, list[str]]:
    """The inputs, and the names of their tokens in a figure."""
    model, tokenizer = run.config.model, run.examples.tokenizer
    longest = min(SENTENCE, model.length)
    if prompt is not None and tokenizer is not None:
        ids = tokenizer.encode(prompt)[:longest]
        if not len(ids):
            raise ValueError("--prompt is empty: give text to look at")
    else:
        rows = next(run.examples.heldout_batches((1, model.length), 1))
        shown = rows(0, 1)[0]
        ids = tokens_of(shown)[0]
    if model.patch:
        rows, columns = (size // model.patch for size in model.image[:2])
        return ids, [f"{y},{x}" for y in range(rows) for x in range(columns)]
    if tokenizer is None:
        return ids, [str(x) for x in ids]
    ids = ids[ids >= 0][:longest]
    single = (tokenizer.decode(ids[i : i + 1]) for i in range(len(ids)))
    labels = list(map(_shown, single))
    for place in np.flatnonzero(ids == tokenizer.vocabulary):
        labels[place] = HIDDEN
    return ids, labels


def _shown(token: str) -> str:
    return token if token.isprintable() and token.strip() else repr(token)[1:-1]
