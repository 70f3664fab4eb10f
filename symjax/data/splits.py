"""Which documents are held out: by a hash, so the same ones on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from datasets import DatasetDict

HELD_SHARE = 1 / 20  # of the documents; 3.5 % of the bytes of Python 3.11
LABELLED_SHARE = 1 / 5  # of the examples of every label
LARGEST_SHARE = 1 / 4  # the hash of a few documents may hold out more


def dataset(**splits: list[str]) -> DatasetDict:
    """Splits of texts as a data set in memory, one row a document, column "text"."""
    import datasets  # six times numpy's import: only where a corpus is built

    features = datasets.Features({"text": datasets.Value("large_string")})
    return datasets.DatasetDict(
        {
            split: datasets.Dataset.from_dict({"text": texts}, features=features)
            for split, texts in splits.items()
        }
    )


def by_content(texts: list[str], where: str, unit: str) -> DatasetDict:
    """Documents held out by the sha256 of their content, so copies are on one side.

    A single document holds out its last tenth, cut between two characters.

    Args:
        where, unit: what the texts are, for messages: "data.path 'a'", "files".
    Raises:
        ValueError: all texts are copies of one.
    """
    if len(texts) == 1:
        [content] = texts
        cut = len(content) * 9 // 10
        return dataset(train=[content[:cut]], heldout=[content[cut:]])
    keys = [sha256(content) for content in texts]
    if len(set(keys)) == 1:
        raise ValueError(
            f"{where}: its {len(texts)} {unit} are copies of one, so none can be held "
            "out: name one of them"
        )
    return by_key(texts, keys)


def by_key(texts: list[str], keys: list[str]) -> DatasetDict:
    """Whole documents held out by the hash that is their key; both splits non-empty.

    Where the hash holds out nothing, or more than a quarter of the text (which happens
    with few documents), those whose share is closest to a tenth are held out.
    """
    sizes = dict.fromkeys(sorted(keys), 0)
    for key, content in zip(keys, texts, strict=True):
        sizes[key] += len(content)
    total = sum(sizes.values())
    held = {key for key in sizes if int(key[:8], 16) < HELD_SHARE * 2**32}
    if not 0 < sum(sizes[key] for key in held) <= total * LARGEST_SHARE:
        held = {min(sizes, key=lambda key: abs(sizes[key] - total / 10))}
    documents = list(zip(keys, texts, strict=True))
    return dataset(
        train=[content for key, content in documents if key not in held],
        heldout=[content for key, content in documents if key in held],
    )


def stratified(keys: Iterable[str], labels: list[int]) -> list[bool]:
    """Which examples are held out: a fifth of those of every label, by their hash.

    Examples with one key are copies, and on one side.

    Raises:
        ValueError: all examples of a label are copies of one.
    """
    keys, held = list(keys), set()
    for label in sorted(set(labels)):
        own = {key for key, its in zip(keys, labels, strict=True) if its == label}
        if len(own) < 2:
            raise ValueError(f"label {label} has one example: none can be held out")
        held |= {*sorted(own)[: max(1, round(len(own) * LABELLED_SHARE))]}
    return [key in held for key in keys]


def sha256(content: str | np.ndarray) -> str:
    """Of a text or of the pixels of an image."""
    if isinstance(content, str):
        return hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()
    return hashlib.sha256(content.tobytes()).hexdigest()
