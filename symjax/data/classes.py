"""Where labelled examples come from: one function a source.

Which ones are held out is no matter of chance: the data set says so, or of every label
the same share is, by a hash.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from symjax import config
from symjax.data import hub, sources, splits

SOURCES = ("packages", "digits")  # those whose examples always have labels


class Split(NamedTuple):
    """
    Attributes:
        contents: texts, or images uint8 [height, width, channels], all of one size.
        labels: of each, a place in the names of the source.
    """

    contents: list[Any]
    labels: list[int]


class Source(NamedTuple):
    """
    Attributes:
        names: of the labels.
        white: the largest value of a pixel; 0: these are texts.
        facts: plain values that identify the examples beside their content.
    """

    train: Split
    heldout: Split
    names: list[str]
    white: int
    facts: dict[str, Any]


def has_labels(options: config.Data) -> bool:
    return options.source in SOURCES or bool(options.label)


def load(options: config.Data) -> Source:
    """The labelled examples of a configured source.

    Raises:
        ValueError: the source cannot give any for these options.
    """
    sources.check_keys(options)
    if options.source == "packages":
        return _packages()
    if options.source == "digits":
        return _digits()
    return _hub(options)


def _packages() -> Source:
    """Files of the standard library; the label is the package that a file is in."""
    files = sources.packages()
    names = list(files)
    paths = [(name, path) for name in names for path in files[name].items()]
    texts = [sources.read(path, "data.source=packages") for _, (_, path) in paths]
    labels = [names.index(name) for name, _ in paths]
    held = splits.stratified([splits.sha256(name) for _, (name, _) in paths], labels)
    return Source(*_split(texts, labels, held), names, 0, {})


def _digits() -> Source:
    """The 1797 digits of scikit-learn, 8 × 8 pixels of 17 shades.

    Raises:
        ValueError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError(
            "data.source=digits needs scikit-learn: pip install 'symjax[digits]'"
        ) from error
    found: Any = load_digits()
    images = list(found.images.astype(np.uint8)[..., None])
    labels = [int(label) for label in found.target]
    held = splits.stratified([splits.sha256_of(x) for x in images], labels)
    names = [str(name) for name in found.target_names]
    return Source(*_split(images, labels, held), names, 16, {})


def _hub(options: config.Data) -> Source:
    train, heldout, names, facts = hub.load_labelled(options)
    white = 255 if isinstance(train[0][0], np.ndarray) else 0
    if heldout is None:
        contents, labels = train
        keys = [splits.sha256_of(x) if white else splits.sha256(x) for x in contents]
        held = splits.stratified(keys, labels)
        return Source(*_split(contents, labels, held), names, white, facts)
    return Source(Split(*train), Split(*heldout), names, white, facts)


def _split(
    contents: list[Any], labels: list[int], held: list[bool]
) -> tuple[Split, Split]:
    """(train, heldout)."""

    def those(side: bool) -> Split:
        chosen = [i for i, here in enumerate(held) if here == side]
        return Split([contents[i] for i in chosen], [labels[i] for i in chosen])

    return those(False), those(True)
