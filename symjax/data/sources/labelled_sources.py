"""Sources of labelled examples: packages, digits, and hub with `data.label`.

If a data set has a held-out split, this split is used. If it has none, a fifth of the
examples of every label is held out by a hash.
"""

from __future__ import annotations

import importlib.util
import re
from typing import Any, NamedTuple

import numpy as np

from symjax import config
from symjax.data.sources import hub, local_files, splits, table
from symjax.data.sources.columns import check_column, is_text
from symjax.data.sources.formats import UnusableData
from symjax.data.sources.left_out import LeftOut
from symjax.data.sources.opening import message_name
from symjax.data.sources.texts import read_pieces
from symjax.optional import needed

NUMBER_PATTERN = r"-?\d+(\.\d+)?"
SOURCES = ("packages", "digits")  # sources whose examples always have labels


class LabelledSource(NamedTuple):
    """Labelled examples.

    Attributes:
        contents: texts, or images uint8 [height, width, channels] of one size.
        labels: the label of each example, an index of `names`.
        held: for each example, whether it is held out.
        names: the names of the labels.
        white: the pixel value of white; 0 for texts.
        facts: plain values that identify the examples in addition to their content.
    """

    contents: list[Any]
    labels: list[int]
    held: list[bool]
    names: list[str]
    white: int
    facts: dict[str, Any]


def has_labels(options: config.Data) -> bool:
    """Return whether the examples of a source have labels."""
    return options.source in SOURCES or bool(options.label)


def load(options: config.Data) -> LabelledSource:
    """Load the labelled examples of a source.

    Raises:
        ValueError: the source has no labelled examples for these options.
    """
    table.check_keys(options)
    if options.source == "packages":
        return _packages()
    if options.source == "digits":
        return _digits()
    return _from_dataset(options)


def _packages() -> LabelledSource:
    """Files of the standard library, each labelled with its package."""
    files = local_files.packages()
    names = list(files)
    paths = {name: path for package in files.values() for name, path in package.items()}
    key = "data.source=packages"
    texts = ["".join(read_pieces(path, key)) for path in paths.values()]
    labels = [i for i, name in enumerate(names) for _ in files[name]]
    held = splits.stratified(map(splits.sha256, paths), labels)
    return LabelledSource(texts, labels, held, names, 0, {})


def _digits() -> LabelledSource:
    """The 1797 digits of scikit-learn, 8 × 8 pixels of 17 shades.

    Raises:
        ValueError: scikit-learn is not installed.
    """
    line = "data.source=digits needs scikit-learn: pip install scikit-learn"
    found = needed("sklearn.datasets", line).load_digits()
    images = list(found.images.astype(np.uint8)[..., None])
    labels = [int(label) for label in found.target]
    held = splits.stratified(map(splits.sha256, images), labels)
    return LabelledSource(
        images, labels, held, list(map(str, found.target_names)), 16, {}
    )


def _from_dataset(options: config.Data) -> LabelledSource:
    """Texts or images of a data set with their labels.

    A validation or test split is held out as in `hub.load`, or else a fifth of each
    label. Rows without content or label are left out and counted. Images have 1 or 3
    channels.

    Raises:
        ValueError: as in `hub.load`; the label column does not exist, a held-out label
            is not in training, images have several sizes, or Pillow is missing.
    """
    columns = options.column, options.label
    left_out = LeftOut()

    def examples(rows: Any, split: str) -> tuple[Any, ...]:
        return _examples(rows, *columns, split, left_out)

    found, facts, _ = hub.read_splits(options, examples)
    left_out.say(message_name(options))
    names = next(iter(found.values()))[2]  # the labels of training
    numbers = {name: number for number, name in enumerate(names)}
    contents, labels, held = [], [], []
    for side, (split, (split_contents, split_labels, _)) in enumerate(found.items()):
        if unknown := sorted(set(split_labels) - set(names)):
            raise ValueError(
                f"{message_name(options)} has label {unknown[0]!r} in split {split!r} "
                f"only, training has {', '.join(names)}"
            )
        contents += split_contents
        labels += [numbers[label] for label in split_labels]
        held += [bool(side)] * len(split_labels)
    shapes = {x.shape for x in contents if isinstance(x, np.ndarray)}
    if len(shapes) > 1:
        one, other = sorted(shapes)[:2]
        raise ValueError(
            f"{message_name(options)} has images of several sizes: {one} and {other}"
        )
    if len(found) == 1:
        label_of_each = [names[label] for label in labels]
        held = splits.stratified(map(splits.sha256, contents), label_of_each)
    facts["label"] = options.label
    return LabelledSource(contents, labels, held, names, 255 if shapes else 0, facts)


def _examples(
    rows: Any, column: str, label: str, split: str, left_out: LeftOut
) -> tuple[Any, ...]:
    """Return contents, the label of each, and all labels in order; () for no rows."""
    import datasets

    for key, name in (("column", column), ("label", label)):
        check_column(key, name, rows.column_names)
    kind, labels = rows.features[column], rows.features[label]
    images = isinstance(kind, datasets.Image)
    if not images and not is_text(kind):
        raise UnusableData(
            f"data.column {column!r} holds no text or images, but {kind}"
        )
    if images and importlib.util.find_spec("PIL") is None:
        raise UnusableData(
            f"data.column {column!r} holds images, which need Pillow: "
            "pip install pillow"
        )
    names = list(getattr(labels, "names", ()))
    if images:
        rows = rows.cast_column(column, datasets.Image(decode=False))
    pairs = []
    both = zip(rows[column], rows[label], strict=True)
    for number, (content, value) in enumerate(both, 1):
        row = f"row {number} of {split!r}"
        if not content:
            left_out.add(f"rows without content in {column!r}", row)
        elif value is None or value == "" or (names and value < 0):
            left_out.add(f"rows without label in {label!r}", row)
        else:
            pairs.append((_pixels(content, row) if images else content, value))
    if not pairs:
        return ()
    for _, value in pairs:
        if not isinstance(value, str | int | float):
            kind = type(value).__name__
            raise UnusableData(f"data.label {label!r} holds no labels, but {kind}")
    contents, values = map(list, zip(*pairs, strict=True))
    if names:
        return contents, [names[value] for value in values], names
    return (
        contents,
        list(map(str, values)),
        _label_names(set(values), rows.info.builder_name),
    )


def _label_names(values: set[Any], kind: str) -> list[str]:
    """Return the names of labels in order.

    Numbers are sorted by value, also in CSV files, where they are texts.
    """
    if kind == "csv" and all(re.fullmatch(NUMBER_PATTERN, value) for value in values):
        return sorted(values, key=float)
    if len({isinstance(value, str) for value in values}) > 1:
        return sorted(set(map(str, values)))
    return list(map(str, sorted(values)))


def _pixels(content: Any, row: str) -> np.ndarray:
    """Return the pixels of an image file. Grey images have one channel, others three.

    Raises:
        ValueError: Pillow cannot read the file, or pixels have more than 8 bits.
    """
    import datasets

    file = f"{content['path']!r}, " if content.get("path") else ""
    try:
        image = datasets.Image().decode_example(content)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UnusableData(f"{file}{row} is no image: {reason}") from None
    if image.mode.startswith(("I", "F")):
        raise UnusableData(
            f"{file}{row} has pixels of more than 8 bits (mode {image.mode!r}): "
            "convert it first"
        )
    gray = image.mode in ("1", "L")
    pixels = np.asarray(image.convert("L" if gray else "RGB"), np.uint8)
    return pixels[..., None] if gray else pixels
