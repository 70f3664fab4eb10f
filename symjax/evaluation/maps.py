"""What attention looks like: the maps of one sentence."""

import numpy as np

from symjax.evaluation.asked import Asked
from symjax.evaluation.finding import Finding, Grid
from symjax.evaluation.inside import read
from symjax.evaluation.trained import Trained

SENTENCE = 48  # tokens at most: more cannot be read from a figure


def maps(trained: Trained, asked: Asked) -> Finding:
    """A picture of every layer's map of the prompt, or of the first held-out tokens.

    Means over heads; of differential layers also those of the two branches.
    """
    tokenizer = trained.corpus.tokenizer
    ids = trained.corpus.heldout
    if asked.prompt is not None:
        ids = tokenizer.encode(asked.prompt)
    ids = np.asarray(ids)[: min(SENTENCE, trained.options.model.length)]
    if not len(ids):
        raise ValueError("--prompt is empty: give text to look at")
    labels = [_shown(tokenizer.decode(ids[i : i + 1])) for i in range(len(ids))]
    figures = []
    for index, layer in enumerate(read(trained.model(), ids)):
        pictures = {"": layer.map.mean(axis=0)}
        if layer.lam is not None:
            first, second = layer.branches.mean(axis=0)
            pictures |= {"_branch_1": first, "_branch_2": second}
        for name, picture in pictures.items():
            seen = np.where(np.tri(len(ids)) > 0, picture, np.nan).tolist()
            values = [[None if x != x else x for x in row] for row in seen]
            title = f"map_{index}{name}"
            figures.append(Grid(title, "key", "query", labels, labels, values))
    sentence = tokenizer.decode(ids)
    text = [f"maps of {sentence!r}: {len(figures)} figures (--out, --report)"]
    return Finding({}, text, (), tuple(figures))


def _shown(token: str) -> str:
    return token if token.isprintable() and token.strip() else repr(token)[1:-1]
