"""A corpus: the tokens of a text, packed once into a folder and read from there."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from symjax import config
from symjax.data import ngrams, sources, tokens
from symjax.data.documents import Ends
from symjax.data.folder import SPLITS, TEXT_KEYS, open_folder
from symjax.data.packed import Packed

SEPARATOR = "\0"  # between two documents, where no token of its own ends them


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Packed text.

    Attributes:
        train, heldout: token ids [T] in files, uint8, uint16 or uint32.
        tokenizer: what turned text into these ids.
        fingerprint: plain values that identify the text: source, sha256, versions,
            and for each split its documents, tokens and bytes.
        references: held-out cross-entropy of "unigram", "bigram" and "trigram", nats
            per token.
        bytes_per_token: UTF-8 bytes a held-out token, for bits per byte. A token that
            ends a document has none.
        ends: for each split, where its documents end; empty: they are joined.
    """

    train: Packed | np.ndarray
    heldout: Packed | np.ndarray
    tokenizer: tokens.Tokenizer
    fingerprint: dict[str, Any]
    references: dict[str, float]
    bytes_per_token: float
    ends: Mapping[str, Ends] = dataclasses.field(default_factory=dict)

    def bits_per_byte(self, nats: float) -> float:
        """Of a held-out loss in nats a token."""
        return nats / self.bytes_per_token / math.log(2)

    def check_length(self, length: int) -> None:
        """Refuse a model longer than the text, before anything is compiled.

        Raises:
            ValueError: train or held-out is shorter than length + 1 tokens.
        """
        source = self.fingerprint["source"]
        key = TEXT_KEYS.get(source, f"data.source={source}")
        check_length(self.train, length, "training", key)
        check_length(self.heldout, length, "held-out", key)


def open_corpus(
    options: config.Data, directory: Path, *, replace: bool = False
) -> Corpus:
    """The corpus of a folder, built from its source the first time: `open_folder`."""
    manifest, parts = open_folder(options, Path(directory), _pack, replace=replace)
    heldout = manifest["fingerprint"]["heldout"]
    ends = {x: parts[f"{x}_ends"] for x in SPLITS if f"{x}_ends" in parts}
    return Corpus(
        train=parts["train"],
        heldout=parts["heldout"],
        ends=ends,
        tokenizer=tokens.from_description(manifest["tokenizer"]),
        fingerprint=manifest["fingerprint"],
        references=manifest["ngrams"],
        bytes_per_token=heldout["bytes"] / heldout["tokens"],
    )


def _pack(options: config.Data) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    documents, facts = sources.load(options)
    texts = {split: list(documents[split]["text"]) for split in SPLITS}
    tokenizer = _tokenizer(options, texts)
    encodings = {split: _encoded(tokenizer, texts[split]) for split in SPLITS}
    packed = {split: ids for split, (ids, _) in encodings.items()}
    lines = ngrams.cross_entropies(
        packed["train"], packed["heldout"], tokenizer.vocabulary
    )
    between = "" if tokenizer.document_end is not None else SEPARATOR
    encoded = {split: between.join(texts[split]).encode() for split in SPLITS}
    fingerprint: dict[str, Any] = {
        "source": options.source,
        **facts,
        "sha256": hashlib.sha256(b"".join(encoded.values())).hexdigest(),
        "python": platform.python_version(),
        "datasets": version("datasets"),
    }
    for split in SPLITS:
        fingerprint[split] = {
            "documents": len(documents[split]),
            "tokens": len(packed[split]),
            "bytes": len(encoded[split]),
        }
    facts = {"tokenizer": tokenizer.describe(), "fingerprint": fingerprint}
    several = any(len(documents) > 1 for documents in texts.values())
    if options.documents == "separate" or (options.documents == "auto" and several):
        packed |= {f"{split}_ends": ends for split, (_, ends) in encodings.items()}
    return packed, {**facts, "ngrams": lines}


def _tokenizer(options: config.Data, texts: dict[str, list[str]]) -> tokens.Tokenizer:
    """An alphabet is that of both splits, with the separator; BPE learns from one."""
    some: Iterable[str] = texts["train"]
    if options.tokenizer == "char":
        several = any(len(documents) > 1 for documents in texts.values())
        some = itertools.chain(*texts.values(), SEPARATOR if several else "")
    return tokens.build(options.tokenizer, some, vocabulary=options.vocabulary)


def _encoded(
    tokenizer: tokens.Tokenizer, documents: list[str]
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of documents, and where each ends.

    A document ends with the token for it, or has a NUL between it and the next.
    """
    end, last, parts = tokenizer.document_end, len(documents) - 1, []
    for number, text in enumerate(documents):
        if end is not None:
            ids = tokenizer.encode(text)
            parts.append(np.append(ids, np.array(end, ids.dtype)))
        else:
            parts.append(tokenizer.encode(text + SEPARATOR * (number < last)))
    return np.concatenate(parts), np.cumsum([len(part) for part in parts])


def check_length(
    tokens: np.ndarray | Packed, length: int, split: str, key: str = "data.path"
) -> None:
    """Refuse a text shorter than one window.

    Raises:
        ValueError: naming both sizes.
    """
    if length < 1:
        raise ValueError(f"model.length must be at least 1, got {length}")
    if len(tokens) < length + 1:
        raise ValueError(
            f"{key} has {len(tokens)} tokens of {split} text, model.length + 1 = "
            f"{length + 1} are needed: give a longer text or a smaller model.length"
        )
