"""Choice of held-out documents by a hash, which is the same on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from symjax.data.sources.texts import Document, Texts, cut_in_two

HELD_SHARE = 1 / 20  # of the documents; 3.5 % of the bytes of Python 3.11's library
LABELLED_SHARE = 1 / 5  # of the examples of every label
LARGEST_SHARE = 1 / 4  # of the characters; see `held_out`


def held_out(keys: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Choose the held-out documents by their keys. Both splits get documents.

    A document is held out if its key is in the lowest twentieth of uint64. If there are
    few documents, this may hold out nothing or more than a quarter of the text. Then
    the document whose share of the text is closest to a tenth is held out instead.
    Documents with equal keys are copies, and are in the same split.

    Args:
        keys: uint64 [documents], the first 64 bits of a hash.
        sizes: [documents], the characters of each.
    Returns:
        bool [documents].
    """
    unique, index = np.unique(keys, return_inverse=True)
    size = np.bincount(index, weights=sizes)
    held = (unique >> np.uint64(32)) < HELD_SHARE * 2**32
    if not 0 < size[held].sum() <= size.sum() * LARGEST_SHARE:
        held = np.arange(len(size)) == np.argmin(np.abs(size - size.sum() / 10))
    return held[index]


def hash_number(sha256: str) -> int:
    """Return the first 64 bits of a hash, the key of `held_out`."""
    return int(sha256[:16], 16)


def held_out_by_content(
    documents: Callable[[], Iterator[Document]],
    scanned: list[tuple[int, int]],
    where: str,
    unit: str,
) -> Texts:
    """Split documents by the sha256 of their content, so copies stay together.

    The last tenth of a single document is held out.

    Args:
        documents: reads all documents again, in order.
        scanned: the `hash_and_size` of each document.
        where: the name of the source in messages, such as "data.path 'a'".
        unit: the plural of a document's name in messages, such as "files".
    Raises:
        ValueError: all texts are copies of one.
    """
    keys, sizes = np.array(scanned, np.uint64).reshape(-1, 2).T
    total = int(sizes.sum())
    if len(keys) == 1:
        halves = partial(cut_in_two, documents, total * 9 // 10)
        return Texts(halves, np.array([False, True]), total)
    if len(np.unique(keys)) == 1:
        raise ValueError(
            f"{where}: its {len(keys)} {unit} are copies of one, so none can be held "
            "out: name one of them"
        )
    return Texts(documents, held_out(keys, sizes), total)


def hash_and_size(document: Document) -> tuple[int, int]:
    """Return the `hash_number` of a document's content, and its characters."""
    content, characters = hashlib.sha256(), 0
    for piece in document:
        content.update(piece.encode("utf-8", "surrogateescape"))
        characters += len(piece)
    return hash_number(content.hexdigest()), characters


def stratified(keys: Iterable[str], labels: Sequence[Any]) -> list[bool]:
    """Choose a fifth of the examples of every label as held out, by their keys.

    Examples with equal keys are copies, and are in the same split.

    Args:
        keys: a hash of each example.
    Raises:
        ValueError: all examples of a label are copies of one.
    """
    keys, held = list(keys), set()
    for label in sorted(set(labels)):
        pairs = zip(keys, labels, strict=True)
        same = {key for key, other in pairs if other == label}
        if len(same) < 2:
            raise ValueError(
                f"label {label!r} has one example, or only copies of one: none can be "
                "held out"
            )
        held |= {*sorted(same)[: max(1, round(len(same) * LABELLED_SHARE))]}
    return [key in held for key in keys]


def sha256(content: str | np.ndarray) -> str:
    """Return the sha256 of a text, or of the pixels of an image, in hexadecimal."""
    if isinstance(content, str):
        return hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()
    return hashlib.sha256(content.tobytes()).hexdigest()
