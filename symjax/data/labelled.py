"""Texts or images with labels, packed into a folder once and read from there.

For each split the folder has `<split>.npy` (the token ids or pixels of all examples,
one after another), `<split>_ends.npy` (the place after the last token or pixel of each
example) and `<split>_labels.npy`. It also has a `corpus.json`: see `store.folder`.
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
from symjax.data.shuffle import shuffled
from symjax.data.sources import labelled_sources
from symjax.data.store.folder import SPLITS, open_folder
from symjax.data.store.manifest import fingerprint
from symjax.data.store.packed import PackedArray


class LabelledPieces(NamedTuple):
    """Parts of texts, or whole images: their ranges of tokens or pixels, and labels."""

    starts: np.ndarray
    stops: np.ndarray
    labels: np.ndarray


class Labelled:
    """Packed texts or images with one label each.

    Attributes:
        parts: the arrays of the folder, by name.
        labels: the names of the labels.
        image: height, width and channels of the images; None for texts.
        white: the pixel value of white, such as 255; 0 for texts.
    """

    def __init__(self, manifest: dict[str, Any], parts: dict[str, PackedArray]):
        self.parts = parts
        self.fingerprint: dict[str, Any] = manifest["fingerprint"]
        self.labels: list[str] = manifest["labels"]
        self.image = tuple(manifest["image"]) if manifest["image"] else None
        self.white: int = manifest["white"]
        self.tokenizer = tokens.from_description(manifest["tokenizer"])
        self.pieces = functools.cache(self._pieces)

    def _pieces(self, split: str, length: int) -> LabelledPieces:
        """The images of a split, or its texts in pieces of at most `length` tokens."""
        ends, labels = (self.parts[f"{split}_{x}"][:] for x in ("ends", "labels"))
        starts = np.concatenate([[0], ends[:-1]])
        if self.image:
            return LabelledPieces(starts, ends, labels)
        counts = -(-(ends - starts) // length)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        begin = np.repeat(starts, counts) + length * (np.arange(len(first)) - first)
        stops = np.minimum(begin + length, np.repeat(ends, counts))
        return LabelledPieces(begin, stops, np.repeat(labels, counts))

    def rows(
        self, split: str, chosen: np.ndarray, length: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets [B, 1] of the chosen pieces [B] of a split.

        A text that is longer than a row is cut into pieces, each with the label of the
        text. A shorter piece is padded with tokens of −1, which an encoder masks.
        Images are float32 from 0 (black) to 1 (white).
        """
        pieces, content = self.pieces(split, length), self.parts[split]
        ranges = zip(pieces.starts[chosen], pieces.stops[chosen], strict=True)
        contents = [content[int(start) : int(stop)] for start, stop in ranges]
        targets = pieces.labels[chosen].astype(np.int32)[:, None]
        if self.image:
            pixels = [content.reshape(self.image) for content in contents]
            return np.stack(pixels).astype(np.float32) / self.white, targets
        inputs = np.full((len(chosen), length), NOTHING, np.int32)
        for row, content in zip(inputs, contents, strict=True):
            row[: len(content)] = content
        return inputs, targets


def labelled_examples(labelled: Labelled, length: int) -> Examples:
    """Rows with one label each; an epoch shows every piece once.

    Args:
        length: tokens per row, for the reference loss. This loss is a mean over
            pieces, whose number depends on the length.
    """
    vocabulary = labelled.tokenizer.vocabulary

    def train(
        numbers: np.ndarray, length: int, seed: int
    ) -> tuple[np.ndarray, np.ndarray]:
        count = len(labelled.pieces("train", length).labels)
        chosen, _ = shuffled(count, numbers, seed)
        return labelled.rows("train", chosen.astype(np.int64), length)

    def heldout(numbers: np.ndarray, length: int) -> tuple[np.ndarray, ...]:
        """Held-out rows; rows after the last piece repeat it with weight 0."""
        last = heldout_rows(length) - 1
        rows = labelled.rows("heldout", np.minimum(numbers, last), length)
        return *rows, (numbers <= last).astype(np.float32)[:, None]

    def heldout_rows(length: int) -> int:
        return len(labelled.pieces("heldout", length).labels)

    labels = {name: labelled.pieces(name, length).labels for name in SPLITS}
    count, kind = len(labelled.labels), "images" if labelled.image else "texts"
    return Examples(
        read_training=train,
        read_heldout=heldout,
        heldout_rows=heldout_rows,
        check_length=lambda length: None,  # rows of any length are possible
        # One token more than the tokenizer has: the mask of masked language models. So
        # their weights fit a model of labelled texts.
        vocabulary=0 if labelled.image else vocabulary + 1,
        unit="label",
        size=f"{len(labelled.parts['train_ends']):,} training {kind} of {count} labels",
        language={"image": list(labelled.image)}
        if labelled.image
        else {**labelled.tokenizer.describe(), "mask": vocabulary},
        fingerprint=labelled.fingerprint,
        references={"frequency": _frequency(**labels, count=count)},
        files=tuple(labelled.parts[split] for split in SPLITS),
        tokenizer=None if labelled.image else labelled.tokenizer,
        fixed_length=labelled.image is not None,
        labels=tuple(labelled.labels),
        image=labelled.image,
    )


def open_labelled(
    options: config.Data, directory: Path, *, replace: bool = False
) -> Labelled:
    """Open the labelled examples of a run; the first time, pack them from their source.

    Args:
        replace: as in `open_folder`.
    """
    return Labelled(*open_folder(options, Path(directory), _pack, replace=replace))


def _pack(options: config.Data, folder: Path, format: int) -> dict[str, Any]:
    """Write the arrays of both splits, and return entries of the manifest."""
    del format  # labelled examples have one format
    source = labelled_sources.load(options)
    image = source.contents[0].shape if source.white else None
    texts = () if image else source.contents
    tokenizer = tokens.build(
        options.tokenizer, texts, vocabulary=options.vocabulary, bos="false"
    )
    arrays, counts, content = {}, {}, hashlib.sha256()
    for split, side in zip(SPLITS, (False, True), strict=True):
        chosen = [i for i, held in enumerate(source.held) if held == side]
        if not chosen:
            raise ValueError(f"data.source={options.source} has no {split} examples")
        contents = [source.contents[i] for i in chosen]
        pieces = [x.reshape(-1) if image else tokenizer.encode(x) for x in contents]
        labels = np.asarray([source.labels[i] for i in chosen], np.int32)
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
            **fingerprint(options.source, source.facts, content),
            **counts,
        },
        "labels": source.names,
        "image": image,
        "white": source.white,
    }


def _frequency(train: np.ndarray, heldout: np.ndarray, count: int) -> float:
    """Cross-entropy in nats of held-out labels under their training frequencies."""
    shares = (np.bincount(x, minlength=count) / len(x) for x in (train, heldout))
    training, wanted = shares
    smooth = (training + 1e-3) / (1 + 1e-3 * count)
    return float(-(wanted * np.log(smooth)).sum())
