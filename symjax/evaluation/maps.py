"""What attention looks like: the maps of one sentence."""

import numpy as np

from symjax.data.corpus import Corpus
from symjax.evaluation.asked import Asked
from symjax.evaluation.finding import Finding, Grid
from symjax.evaluation.inside import read
from symjax.evaluation.trained import Trained

SENTENCE = 48  # tokens at most: more cannot be read from a figure


def maps(trained: Trained, asked: Asked) -> Finding:
    """A picture of every layer's map of the prompt, or of the first held-out tokens.

    Means over heads; of differential layers also those of the two branches.

    Raises:
        ValueError: the prompt is empty, or has unknown characters.
    """
    ids, labels = _sentence(trained, asked.prompt)
    figures = []
    for index, layer in enumerate(read(trained.model(), ids)):
        pictures = {"": layer.map.mean(axis=0)}
        if layer.lam is not None:
            first, second = layer.branches.mean(axis=0)
            pictures |= {"_branch_1": first, "_branch_2": second}
        for name, picture in pictures.items():
            seen = [row[: t + 1].tolist() for t, row in enumerate(picture)]
            values = [row + [None] * (len(ids) - len(row)) for row in seen]
            title = f"map_{index}{name}"
            figures.append(Grid(title, "key", "query", labels, labels, values))
    text = [
        f"maps of {len(ids)} tokens, {' '.join(labels)!r}:",
        f"{len(figures)} figures for --out and --report",
    ]
    return Finding({}, text, (), tuple(figures))


def _sentence(trained: Trained, prompt: str | None) -> tuple[np.ndarray, list[str]]:
    """The tokens to read, and what they are called in a figure."""
    corpus, length = trained.corpus, trained.options.model.length
    if not isinstance(corpus, Corpus):
        (ids,), *_ = next(corpus.heldout_batches((1, length), 1))(0, 1)
        return ids, [str(x) for x in ids]
    ids = corpus.heldout[: min(SENTENCE, length)]
    if prompt is not None:
        ids = corpus.tokenizer.encode(prompt)[: min(SENTENCE, length)]
    if not len(ids):
        raise ValueError("--prompt is empty: give text to look at")
    single = (corpus.tokenizer.decode(ids[i : i + 1]) for i in range(len(ids)))
    return ids, list(map(_shown, single))


def _shown(token: str) -> str:
    return token if token.isprintable() and token.strip() else repr(token)[1:-1]
