"""Texts or images with labels, packed once into a folder and read from there.

The folder holds, for each split, `<split>.npy` (the token ids or pixels of all of its
examples, one after the other), `<split>_ends.npy` (where each ends) and
`<split>_labels.npy`; and `corpus.json`: see `folder`.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from symjax import config
from symjax.data import tokens
from symjax.data.batches import Examples
from symjax.data.generated import NOTHING
from symjax.data.order import visited
from symjax.data.sources import classes
from symjax.data.store.folder import SPLITS, open_folder
from symjax.data.store.manifest import fingerprint
from symjax.data.store.packed import Packed


class Pieces(NamedTuple):
    """What one row each shows of the content of a split."""

    starts: np.ndarray
    stops: np.ndarray
    labels: np.ndarray


class Labelled:
    """Packed texts or images with one label each.

    Attributes:
        parts: the arrays of the folder, by name.
        labels: their names.
        image: height, width and channels; None for texts.
        white: the largest value of a pixel.
    """

    def __init__(self, manifest: dict[str, Any], parts: dict[str, Packed]):
        self.parts = parts
        self.fingerprint: dict[str, Any] = manifest["fingerprint"]
        self.labels: list[str] = manifest["labels"]
        self.image = tuple(manifest["image"]) if manifest["image"] else None
        self.white: int = manifest["white"]
        self.tokenizer = tokens.from_description(manifest["tokenizer"])
        self.pieces = functools.cache(self._pieces)

    def _pieces(self, split: str, length: int) -> Pieces:
        """The examples of a split: texts in pieces of at most `length` tokens."""
        ends, labels = (self.parts[f"{split}_{x}"][:] for x in ("ends", "labels"))
        starts = np.concatenate([[0], ends[:-1]])
        if self.image:
            return Pieces(starts, ends, labels)
        counts = -(-(ends - starts) // length)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        begin = np.repeat(starts, counts) + length * (np.arange(len(first)) - first)
        stops = np.minimum(begin + length, np.repeat(ends, counts))
        return Pieces(begin, stops, np.repeat(labels, counts))

    def rows(
        self, split: str, chosen: np.ndarray, length: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets [B, 1] of the chosen pieces [B] of a split.

        A text that is longer than a row is cut into pieces, each with its label; a
        shorter piece is filled up with tokens of −1, which an encoder does not see.
        Images come as numbers from 0 (black) to 1 (white).
        """
        pieces, content = self.pieces(split, length), self.parts[split]
        places = zip(pieces.starts[chosen], pieces.stops[chosen], strict=True)
        contents = [content[int(start) : int(stop)] for start, stop in places]
        targets = pieces.labels[chosen].astype(np.int32)[:, None]
        if self.image:
            pixels = [content.reshape(self.image) for content in contents]
            return np.stack(pixels).astype(np.float32) / self.white, targets
        inputs = np.full((len(chosen), length), NOTHING, np.int32)
        for row, content in zip(inputs, contents, strict=True):
            row[: len(content)] = content
        return inputs, targets


def labelled_examples(found: Labelled, length: int) -> Examples:
    """Rows with one label each; an epoch shows every piece once.

    Args:
        length: of the rows that the reference is about.
    """
    words = found.tokenizer.vocabulary

    def train(
        numbers: np.ndarray, length: int, seed: int
    ) -> tuple[np.ndarray, np.ndarray]:
        count = len(found.pieces("train", length).labels)
        chosen, _ = visited(count, numbers, seed)
        return found.rows("train", chosen.astype(np.int64), length)

    def heldout(numbers: np.ndarray, length: int) -> tuple[np.ndarray, ...]:
        """Beyond the last piece it is repeated, with a weight of 0."""
        last = heldout_rows(length) - 1
        rows = found.rows("heldout", np.minimum(numbers, last), length)
        return *rows, (numbers <= last).astype(np.float32)[:, None]

    def heldout_rows(length: int) -> int:
        return len(found.pieces("heldout", length).labels)

    # What a loss is a mean over are pieces, not files nor their bytes.
    labels = {name: found.pieces(name, length).labels for name in SPLITS}
    count, kind = len(found.labels), "images" if found.image else "texts"
    return Examples(
        train=train,
        heldout=heldout,
        heldout_rows=heldout_rows,
        check_length=lambda length: None,  # rows of any length can be had
        # One more than the tokenizer has, as a masked-LM needs: weights carry over.
        vocabulary=0 if found.image else words + 1,
        unit="label",
        size=f"{len(found.parts['train_ends']):,} training {kind} of {count} labels",
        language={"image": list(found.image)}
        if found.image
        else {**found.tokenizer.describe(), "mask": words},
        fingerprint=found.fingerprint,
        references={"frequency": _frequency(**labels, count=count)},
        files=tuple(found.parts[split] for split in SPLITS),
        tokenizer=None if found.image else found.tokenizer,
        fixed_length=found.image is not None,
        labels=tuple(found.labels),
        image=found.image,
    )


def open_labelled(
    options: config.Data, directory: Path, *, replace: bool = False
) -> Labelled:
    """The labelled examples of a folder, built from their source the first time:
    `open_folder`."""
    return Labelled(*open_folder(options, Path(directory), _pack, replace=replace))


def _pack(options: config.Data, folder: Path, format: int) -> dict[str, Any]:
    del format  # all have been packed alike so far
    found = classes.load(options)
    image = found.contents[0].shape if found.white else None
    texts = () if image else found.contents
    tokenizer = tokens.build(
        options.tokenizer, texts, vocabulary=options.vocabulary, bos="false"
    )
    arrays, counts, content = {}, {}, hashlib.sha256()
    for split, side in zip(SPLITS, (False, True), strict=True):
        chosen = [i for i, held in enumerate(found.held) if held == side]
        if not chosen:
            raise ValueError(f"data.source={options.source} has no {split} examples")
        some = [found.contents[i] for i in chosen]
        pieces = [x.reshape(-1) if image else tokenizer.encode(x) for x in some]
        labels = np.asarray([found.labels[i] for i in chosen], np.int32)
        arrays[split] = np.concatenate(pieces)
        arrays[f"{split}_ends"] = np.cumsum([len(piece) for piece in pieces])
        arrays[f"{split}_labels"] = labels
        content.update(arrays[split].tobytes() + labels.tobytes())
        counts[split] = {"examples": len(pieces), "tokens": len(arrays[split])}
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)
    return {
        "tokenizer": tokenizer.describe(),
        "fingerprint": {
            **fingerprint(options.source, found.facts, content),
            **counts,
        },
        "labels": found.names,
        "image": image,
        "white": found.white,
    }


def _frequency(train: np.ndarray, heldout: np.ndarray, count: int) -> float:
    """Cross-entropy of the held-out labels and how often training has each, nats."""
    known, wanted = (np.bincount(x, minlength=count) / len(x) for x in (train, heldout))
    smooth = (known + 1e-3) / (1 + 1e-3 * count)
    return float(-(wanted * np.log(smooth)).sum())
