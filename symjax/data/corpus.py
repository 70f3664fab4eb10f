"""A corpus: the tokens of a text, packed once into a folder and read from there."""

from __future__ import annotations

import array
import dataclasses
import hashlib
import itertools
import math
import platform
from collections.abc import Iterator, Mapping, Sized
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from symjax import config
from symjax.data import ngrams, sources, tokens
from symjax.data.documents import Ends
from symjax.data.folder import SPLITS, TEXT_KEYS, open_folder
from symjax.data.mixture import NAMES, Part, entries
from symjax.data.packed import Packed
from symjax.data.progress import bar
from symjax.data.subwords import pieces
from symjax.data.texts import Document, Texts
from symjax.data.writer import Writer

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
        parts: of the training text, where it is a mixture of sources.
    """

    train: Packed | np.ndarray
    heldout: Packed | np.ndarray
    tokenizer: tokens.Tokenizer
    fingerprint: dict[str, Any]
    references: dict[str, float]
    bytes_per_token: float
    ends: Mapping[str, Ends] = dataclasses.field(default_factory=dict)
    parts: tuple[Part, ...] = ()

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
        mixed = self.fingerprint.get("mixture", [])
        for part, facts in zip(self.parts, mixed, strict=True):
            where = f"data.mixture: {facts['entry']}"
            check_length(range(part.start, part.stop), length, "training", where)
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
        parts=tuple(
            Part(x["share"], *x["tokens"])
            for x in manifest["fingerprint"].get("mixture", [])
        ),
    )


class _Packed(NamedTuple):
    """What packing a split has counted."""

    documents: int
    tokens: int
    bytes: int
    parts: list[int]  # tokens after each source


def _pack(options: config.Data, folder: Path) -> dict[str, Any]:
    """Write the tokens of both splits, in memory that does not grow with them."""
    parts = entries(options)
    loaded = [sources.load(part) for _, part in parts]
    texts = [its for its, _ in loaded]
    tokenizer = _tokenizer(options, texts)
    several = any(sum(x.count(split) for x in texts) > 1 for split in SPLITS)
    apart = options.documents == "separate" or (options.documents == "auto" and several)
    content = hashlib.sha256()
    with bar(sum(x.characters for x in texts), "packing") as shown:
        counts = {
            split: _write(texts, tokenizer, folder, split, content, shown)
            for split in SPLITS
        }
    if not apart:
        for split in SPLITS:
            Path(folder, f"{split}_ends.npy").unlink()
    packed = {x: np.load(folder / f"{x}.npy", mmap_mode="r") for x in SPLITS}
    lines = ngrams.cross_entropies(
        packed["train"], packed["heldout"], tokenizer.vocabulary
    )
    facts = loaded[0][1]
    if options.mixture:
        edges = [0, *counts["train"].parts]
        facts = {
            "mixture": [
                {
                    "entry": getattr(part, NAMES[part.source]),
                    "share": share,
                    "tokens": [start, stop],
                    **own,
                }
                for (share, part), (_, own), start, stop in zip(
                    parts, loaded, edges[:-1], edges[1:], strict=True
                )
            ]
        }
    fingerprint: dict[str, Any] = {
        "source": options.source,
        **facts,
        "sha256": content.hexdigest(),
        "python": platform.python_version(),
        "datasets": version("datasets"),
    }
    for split in SPLITS:
        fingerprint[split] = counts[split]._asdict()
        del fingerprint[split]["parts"]
    described = {"tokenizer": tokenizer.describe(), "fingerprint": fingerprint}
    return {**described, "ngrams": lines}


def _write(
    texts: list[Texts],
    tokenizer: tokens.Tokenizer,
    folder: Path,
    split: str,
    content: Any,
    shown: tqdm,
) -> _Packed:
    """The documents of a split in one file, and where each ends in another.

    A document ends with the token for it, or has a NUL between it and the next.

    Args:
        content: a hash of all text, NULs included.
        shown: a bar of characters.
    """
    dtype = np.min_scalar_type(tokenizer.vocabulary - 1)
    written = Writer(folder / f"{split}.npy", dtype)
    ends, size, parts = array.array("q"), 0, []

    def put(piece: str) -> None:
        nonlocal size
        encoded = piece.encode()
        content.update(encoded)
        size += len(encoded)
        written.append(tokenizer.encode(piece))
        shown.update(len(piece))

    for its in texts:
        for document in its.read(split):
            if ends and tokenizer.document_end is None:
                put(SEPARATOR)
                ends[-1] = written.length
            for piece in tokenizer.pieces(document):
                put(piece)
            if tokenizer.document_end is not None:
                written.append(np.array([tokenizer.document_end], dtype))
            ends.append(written.length)
        parts.append(written.length)
    written.close()
    np.save(folder / f"{split}_ends.npy", np.frombuffer(ends, np.int64))
    return _Packed(len(ends), written.length, size, parts)


def _tokenizer(options: config.Data, texts: list[Texts]) -> tokens.Tokenizer:
    """An alphabet is that of both splits, with the separator; BPE learns from one."""

    def documents(split: str) -> Iterator[Document]:
        return itertools.chain.from_iterable(x.read(split) for x in texts)

    some = itertools.chain.from_iterable(map(pieces, documents("train")))
    if options.tokenizer == "char":
        several = any(sum(x.count(split) for x in texts) > 1 for split in SPLITS)
        heldout = itertools.chain.from_iterable(documents("heldout"))
        some = itertools.chain(some, heldout, SEPARATOR if several else "")
    return tokens.build(options.tokenizer, some, vocabulary=options.vocabulary)


def check_length(
    tokens: Sized, length: int, split: str, key: str = "data.path"
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
