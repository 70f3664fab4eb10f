"""Choice of held-out documents by a hash: the same ones on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from symjax.data.sources.texts import Document, Texts, in_two

HELD_SHARE = 1 / 20  # of the documents; 3.5 % of the bytes of Python 3.11
LABELLED_SHARE = 1 / 5  # of the examples of every label
LARGEST_SHARE = 1 / 4  # the hash of a few documents may hold out more


def held_out(keys: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Which documents are held out by their keys; both splits are non-empty.

    Where the hash holds out nothing, or more than a quarter of the text (which happens
    with few documents), those whose share is closest to a tenth are held out. Documents
    with one key are copies, and on one side.

    Args:
        keys: uint64 [D], the first 64 bits of a hash.
        sizes: [D], characters.
    Returns:
        bool [D].
    """
    unique, copy = np.unique(keys, return_inverse=True)
    own = np.bincount(copy, weights=sizes)
    held = (unique >> np.uint64(32)) < HELD_SHARE * 2**32
    if not 0 < own[held].sum() <= own.sum() * LARGEST_SHARE:
        held = np.arange(len(own)) == np.argmin(np.abs(own - own.sum() / 10))
    return held[copy]


def number(sha256: str) -> int:
    """The first 64 bits of a hash, as `held_out` takes them."""
    return int(sha256[:16], 16)


def by_content(
    documents: Callable[[], Iterator[Document]],
    scanned: list[tuple[int, int]],
    where: str,
    unit: str,
) -> Texts:
    """Documents held out by the sha256 of their content, so copies are on one side.

    A single document holds out its last tenth, cut between two characters.

    Args:
        scanned: of each document the number of its hash, and its characters.
        where, unit: what the texts are, for messages: "data.path 'a'", "files".
    Raises:
        ValueError: all texts are copies of one.
    """
    keys, sizes = np.array(scanned, np.uint64).reshape(-1, 2).T
    total = int(sizes.sum())
    if len(keys) == 1:
        halves = partial(in_two, documents, total * 9 // 10)
        return Texts(halves, np.array([False, True]), total)
    if len(np.unique(keys)) == 1:
        raise ValueError(
            f"{where}: its {len(keys)} {unit} are copies of one, so none can be held "
            "out: name one of them"
        )
    return Texts(documents, held_out(keys, sizes), total)


def scan(document: Document) -> tuple[int, int]:
    """The number of the hash of a document's content, and its characters."""
    content, characters = hashlib.sha256(), 0
    for piece in document:
        content.update(piece.encode("utf-8", "surrogateescape"))
        characters += len(piece)
    return number(content.hexdigest()), characters


def stratified(keys: Iterable[str], labels: Sequence[Any]) -> list[bool]:
    """Return which examples are held out: a fifth of every label, by their hash.

    Examples with one key are copies, and on one side.

    Raises:
        ValueError: all examples of a label are copies of one.
    """
    keys, held = list(keys), set()
    for label in sorted(set(labels)):
        own = {key for key, its in zip(keys, labels, strict=True) if its == label}
        if len(own) < 2:
            raise ValueError(
                f"label {label!r} has one example, or only copies of one: none can be "
                "held out"
            )
        held |= {*sorted(own)[: max(1, round(len(own) * LABELLED_SHARE))]}
    return [key in held for key in keys]


def sha256(content: str | np.ndarray) -> str:
    """Of a text or of the pixels of an image."""
    if isinstance(content, str):
        return hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()
    return hashlib.sha256(content.tobytes()).hexdigest()
