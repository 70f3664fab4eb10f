"""Pictures of attention maps: of one sentence, or of one image."""

import numpy as np

from symjax import config
from symjax.data.documents import Separate
from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.reading import Inputs, read
from symjax.evaluation.results import Grid, Options, Result

SENTENCE = 48  # tokens at most: more cannot be read from a figure
HIDDEN = "[mask]"


def maps(run: LoadedRun, options: Options) -> Result:
    """A picture of every layer's map of the prompt, or of what is held out first.

    Means over heads; of differential layers also those of the two branches. The tokens
    of an image are patches, named by row and column.

    Raises:
        ValueError: the prompt is empty, or has unknown characters.
    """
    inputs, labels = _sentence(run, options.prompt)
    causal = config.is_causal(run.config.model)
    figures = []
    for index, layer in enumerate(read(run.model(), inputs)):
        pictures = {"": layer.map.mean(axis=0)}
        if layer.lam is not None:
            first, second = layer.branches.mean(axis=0)
            pictures |= {"_branch_1": first, "_branch_2": second}
        for name, picture in pictures.items():
            seen = [row[: t + 1 if causal else None] for t, row in enumerate(picture)]
            values = [row.tolist() + [None] * (len(labels) - len(row)) for row in seen]
            title = f"map_{index}{name}"
            figures.append(Grid(title, "key", "query", labels, labels, values))
    patches = run.config.model.patch > 0
    what = "patches (row, column)" if patches else f"tokens, {' '.join(labels)!r}"
    text = [
        f"maps of {len(labels)} {what}:",
        f"{len(figures)} figures for --out and --report",
    ]
    if options.prompt is not None and run.examples.tokenizer is None:
        text.append("of a held-out row: --prompt needs a model of text")
    return Result({}, text, (), tuple(figures))


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
        ids = (shown.tokens if isinstance(shown, Separate) else shown)[0]
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
