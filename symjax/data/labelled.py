"""Texts or images with labels, packed once into a folder and read from there.

The folder holds, for each split, `<split>.npy` (the token ids or pixels of all of its
examples, one after the other), `<split>_ends.npy` (where each ends) and
`<split>_labels.npy`; and `corpus.json`, written last, as in `corpus`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from symjax import config
from symjax.data import batches, classes, corpus, sources, tokens
from symjax.data.batches import Rows, Shape
from symjax.data.generated import NOTHING
from symjax.data.packed import Packed


class Pieces(NamedTuple):
    """What one row each shows of the content of a split."""

    starts: np.ndarray
    stops: np.ndarray
    labels: np.ndarray


class Split(NamedTuple):
    content: Packed
    ends: np.ndarray
    labels: np.ndarray

    def pieces(self, length: int | None) -> Pieces:
        """Every example cut into pieces of at most this length; None: whole."""
        starts = np.concatenate([[0], self.ends[:-1]])
        if length is None:
            return Pieces(starts, self.ends, self.labels)
        counts = -(-(self.ends - starts) // length)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        begin = np.repeat(starts, counts) + length * (np.arange(len(first)) - first)
        stops = np.minimum(begin + length, np.repeat(self.ends, counts))
        return Pieces(begin, stops, np.repeat(self.labels, counts))


class Labelled:
    """Rows with one label each; see `Examples`.

    A text that is longer than a row is cut into pieces, each with its label; a shorter
    piece is filled up with tokens of −1, which an encoder does not see. Images come as
    numbers from 0 (black) to 1 (white).

    Args:
        length: of the rows that the reference is about.
    Attributes:
        labels: their names.
        image: height, width and channels; None for texts.
    """

    unit = "label"

    def __init__(self, manifest: dict[str, Any], parts: dict[str, Packed], length: int):
        self.train, self.heldout = (
            Split(parts[name], parts[f"{name}_ends"][:], parts[f"{name}_labels"][:])
            for name in corpus.SPLITS
        )
        self.fingerprint: dict[str, Any] = manifest["fingerprint"]
        self.labels: list[str] = manifest["labels"]
        self.image = tuple(manifest["image"]) if manifest["image"] else None
        self.white: int = manifest["white"]
        self.tokenizer = tokens.from_description(manifest["tokenizer"])
        self._pieces = functools.cache(self._cut)
        # What a loss is a mean over are pieces, not files nor their bytes.
        labels = {name: self._pieces(name, length).labels for name in corpus.SPLITS}
        self.references = {"frequency": _frequency(**labels, count=len(self.labels))}

    @property
    def vocabulary(self) -> int:
        """One more than the tokenizer has, as a masked-LM needs: weights carry over."""
        return 0 if self.image else self.tokenizer.vocabulary + 1

    @property
    def size(self) -> str:
        kind = "images" if self.image else "texts"
        return f"{len(self.train.ends):,} training {kind} of {len(self.labels)} labels"

    @property
    def language(self) -> dict[str, Any]:
        if self.image:
            return {"image": list(self.image)}
        return {**self.tokenizer.describe(), "mask": self.tokenizer.vocabulary}

    def check_length(self, length: int) -> None:
        """Rows of any length can be had."""

    def batch(self, shape: Shape, *, seed: int, step: int) -> Rows:
        """An epoch shows every piece once."""

        def some(start: int, stop: int) -> tuple[np.ndarray, ...]:
            pieces = self._pieces("train", shape[1])
            numbers = step * shape[0] + np.arange(start, stop, dtype=np.int64)
            chosen, _ = batches.visited(len(pieces.labels), numbers, seed)
            return self._rows(self.train, pieces, chosen.astype(np.int64), shape[1])

        return some

    def heldout_batches(self, shape: Shape, count: int | None = None) -> Iterator[Rows]:
        for number in batches.spread(self.heldout_count(shape), count):
            yield functools.partial(self._judged, shape, number * shape[0])

    def heldout_count(self, shape: Shape) -> int:
        return math.ceil(len(self._pieces("heldout", shape[1]).labels) / shape[0])

    def vanished(self) -> str:
        return corpus.vanished(self.train.content, self.heldout.content)

    def _cut(self, split: str, length: int) -> Pieces:
        return getattr(self, split).pieces(None if self.image else length)

    def _judged(self, shape: Shape, first: int, start: int, stop: int):
        """Beyond the last piece it is repeated, with a weight of 0."""
        pieces = self._pieces("heldout", shape[1])
        numbers, last = np.arange(first + start, first + stop), len(pieces.labels) - 1
        chosen = np.minimum(numbers, last)
        inputs, targets = self._rows(self.heldout, pieces, chosen, shape[1])
        return inputs, targets, (numbers <= last).astype(np.float32)[:, None]

    def _rows(
        self, split: Split, pieces: Pieces, chosen: np.ndarray, length: int
    ) -> tuple[np.ndarray, np.ndarray]:
        contents = [
            split.content[start:stop]
            for start, stop in zip(
                pieces.starts[chosen].tolist(),
                pieces.stops[chosen].tolist(),
                strict=True,
            )
        ]
        targets = pieces.labels[chosen].astype(np.int32)[:, None]
        if self.image:
            pixels = [content.reshape(self.image) for content in contents]
            return np.stack(pixels).astype(np.float32) / self.white, targets
        inputs = np.full((len(chosen), length), NOTHING, np.int32)
        for row, content in zip(inputs, contents, strict=True):
            row[: len(content)] = content
        return inputs, targets


def open_labelled(
    options: config.Data, directory: Path, length: int, *, replace: bool = False
) -> Labelled:
    """The labelled examples of a folder, built from their source the first time.

    Args:
        length: of a row, which says in how many pieces a text is judged.
        replace: build anew over those of other options, or damaged ones.
    Raises:
        ValueError: the source cannot be read, the folder holds examples of other
            options, or a file of it is damaged.
    """
    read = functools.partial(_read, length=length)
    return corpus.built(read, _build, options, Path(directory), replace=replace)


def _read(options: config.Data, directory: Path, *, length: int) -> Labelled:
    manifest = corpus.read_manifest(directory)
    corpus.check_options(manifest["options"], options, directory)
    parts = {
        Path(name).stem: Packed(directory / name, **facts)
        for name, facts in manifest["files"].items()
    }
    return Labelled(manifest, parts, length)


def _build(options: config.Data, directory: Path) -> None:
    origin = corpus.Origin(sources.files(options))
    found = classes.load(options)
    texts = [] if found.white else [*found.train.contents, *found.heldout.contents]
    tokenizer = tokens.build(options.tokenizer, texts)
    image = None if texts else found.train.contents[0].shape
    arrays, counts, content = {}, {}, hashlib.sha256()
    for split, some in zip(corpus.SPLITS, (found.train, found.heldout), strict=True):
        if not some.labels:
            raise ValueError(f"data.source={options.source} has no {split} examples")
        pieces = [
            x.reshape(-1) if image else tokenizer.encode(x) for x in some.contents
        ]
        arrays[split] = np.concatenate(pieces)
        arrays[f"{split}_ends"] = np.cumsum([len(piece) for piece in pieces])
        arrays[f"{split}_labels"] = np.asarray(some.labels, np.int32)
        content.update(arrays[split].tobytes() + arrays[f"{split}_labels"].tobytes())
        counts[split] = {"examples": len(pieces), "tokens": len(arrays[split])}
    fingerprint = {
        "source": options.source,
        **found.facts,
        "sha256": content.hexdigest(),
        "python": platform.python_version(),
        **counts,
    }
    manifest = {
        "options": dataclasses.asdict(options),
        "tokenizer": tokenizer.describe(),
        "fingerprint": fingerprint,
        "labels": found.names,
        "image": image,
        "white": found.white,
        "origin": origin.read(),
    }
    corpus.write(directory, arrays, manifest)


def _frequency(train: np.ndarray, heldout: np.ndarray, count: int) -> float:
    """Cross-entropy of the held-out labels and how often training has each, nats."""
    known, wanted = (np.bincount(x, minlength=count) / len(x) for x in (train, heldout))
    smooth = (known + 1e-3) / (1 + 1e-3 * count)
    return float(-(wanted * np.log(smooth)).sum())
