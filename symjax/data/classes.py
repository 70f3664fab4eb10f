"""Where labelled examples come from: one function a source.

The data set has a held-out split, or a fifth of every label is held out, by a hash.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from symjax import config
from symjax.data import hub, sources, splits

SOURCES = ("packages", "digits")  # those whose examples always have labels


class Source(NamedTuple):
    """
    Attributes:
        contents: texts, or images uint8 [height, width, channels], all of one size.
        labels: of each, a place in `names`.
        held: of each, whether it is held out.
        names: of the labels.
        white: the largest value of a pixel; 0: these are texts.
        facts: plain values that identify the examples beside their content.
    """

    contents: list[Any]
    labels: list[int]
    held: list[bool]
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
    paths = {name: path for package in files.values() for name, path in package.items()}
    texts = [sources.read(path, "data.source=packages") for path in paths.values()]
    labels = [i for i, name in enumerate(names) for _ in files[name]]
    held = splits.stratified(map(splits.sha256, paths), labels)
    return Source(texts, labels, held, names, 0, {})


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
    held = splits.stratified(map(splits.sha256, images), labels)
    return Source(images, labels, held, list(map(str, found.target_names)), 16, {})


def _hub(options: config.Data) -> Source:
    train, heldout, names, facts = hub.load_labelled(options)
    contents, labels = train
    white = 255 if isinstance(contents[0], np.ndarray) else 0
    if heldout is None:
        held = splits.stratified(map(splits.sha256, contents), labels)
    else:
        held = [False] * len(labels) + [True] * len(heldout[1])
        contents, labels = contents + heldout[0], labels + heldout[1]
    return Source(contents, labels, held, names, white, facts)
