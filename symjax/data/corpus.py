"""A corpus: the token ids of a text, packed into a folder once and read from there.

`open_corpus` returns the `Corpus` of a run. The first time, `_pack` reads the source
(`sources.table.load`), makes the tokenizer, writes the tokens of both splits
(`store.writer.SplitWriter`), and returns entries of `corpus.json`. A stream is packed
by another process: see `store.stream`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sized
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from symjax import config
from symjax.data import tokens
from symjax.data.boundaries import FORMAT, SEPARATOR, boundaries
from symjax.data.documents import Ends
from symjax.data.progress import bar
from symjax.data.sources import table
from symjax.data.sources.mixture import ENTRY_KEYS, MixturePart, config_key, entries
from symjax.data.sources.texts import Document, Texts
from symjax.data.store.folder import SPLITS, open_folder
from symjax.data.store.manifest import fingerprint
from symjax.data.store.packed import PackedArray
from symjax.data.store.stream import GrowingArray, Stream, open_stream
from symjax.data.store.writer import SplitWriter
from symjax.data.subwords import pieces
from symjax.data.text_statistics import text_statistics


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Packed text.

    Attributes:
        train, heldout: token ids [T] (uint8, uint16 or uint32) in files. The text of
            `eval.py --text` is in memory.
        tokenizer: the tokenizer that turned the text into these ids.
        fingerprint: plain values that identify the text: source and sha256; for a
            packed text also versions, and documents, tokens and bytes of each split.
        references: held-out cross-entropy of "unigram", "bigram" and "trigram" tables,
            in nats per target.
        bytes_per_token: UTF-8 bytes per held-out target, for bits per byte. Special
            tokens before or after a document count 0 bytes, a NUL between documents 1.
        start: the token before every document, from which a model predicts the first
            token of the document; None if there is no such token.
        shared: whether `start` is also the last token of the previous document: see
            `documents.with_segment_ids`.
        ends: the place after the last token of each document, by split; empty if
            documents are joined.
        parts: the sources of the training text if it is a mixture; else empty.
        shard: tokens per shard if the training text is a stream; else 0.
        all_counted: whether `bytes_per_token` and `references` count also those tokens
            that are no targets, the first tokens of documents. Older versions packed
            such corpora.
    """

    train: PackedArray | GrowingArray | np.ndarray
    heldout: PackedArray | GrowingArray | np.ndarray
    tokenizer: tokens.Tokenizer
    fingerprint: dict[str, Any]
    references: dict[str, float]
    bytes_per_token: float
    start: int | None = None
    shared: bool = False
    ends: Mapping[str, Ends] = dataclasses.field(default_factory=dict)
    parts: tuple[MixturePart, ...] = ()
    shard: int = 0
    all_counted: bool = False

    @property
    def stream(self) -> Stream | None:
        """The process that packs the training text; None if the text is packed."""
        return self.train.stream if isinstance(self.train, GrowingArray) else None

    @property
    def size(self) -> str:
        """Phrase with the number of training tokens, including those still to pack."""
        tokens = self.stream.wanted if self.stream else len(self.train)
        return f"{tokens:,} training tokens{' of a stream' if self.shard else ''}"

    def bits_per_byte(self, nats: float) -> float:
        """Return a held-out loss in bits per byte.

        Args:
            nats: the loss in nats per token.
        """
        return nats / self.bytes_per_token / math.log(2)

    def decode(self, ids: Any) -> str:
        """The text of token ids [T]. A `start` token at the beginning is left out."""
        ids = np.asarray(ids)
        skip = len(ids) > 0 and ids[0] == self.start
        return self.tokenizer.decode(ids[int(skip) :])

    def check_length(self, length: int) -> None:
        """Check that the text is long enough for rows of a length.

        Raises:
            ValueError: the training or held-out text, or the text of one source of a
                mixture, has fewer than length + 1 tokens.
        """
        key = config_key(self.fingerprint["source"])
        mixed = self.fingerprint.get("mixture", [])
        for part, facts in zip(self.parts, mixed, strict=True):
            where = f"data.mixture: {facts['entry']}"
            check_length(range(part.start, part.stop), length, "training", where)
        tokens = min(len(self.train), self.shard or len(self.train))
        check_length(range(tokens), length, "training", key)
        check_length(self.heldout, length, "held-out", key)


def open_corpus(
    options: config.Data,
    directory: Path,
    *,
    replace: bool = False,
    format: int = FORMAT,
) -> Corpus:
    """Open the corpus of a run; the first time, pack it from its source.

    Args:
        directory: the folder "data" of the run, for its `corpus.json`.
        replace, format: as in `open_folder`.
    Raises:
        ValueError: as in `open_folder` and `open_stream`.
    """
    directory = Path(directory)
    if options.streaming:
        table.check_keys(options)
        manifest, parts = open_stream(
            options, directory, replace=replace, format=format
        )
    else:
        manifest, parts = open_folder(
            options, directory, _pack, replace=replace, format=format
        )
    heldout = manifest["fingerprint"]["heldout"]
    of_targets = manifest.get("judged", heldout)  # older versions counted all tokens
    ends = {x: parts[f"{x}_ends"] for x in SPLITS if f"{x}_ends" in parts}
    if options.documents == "joined":  # a stream writes the ends in any case
        ends = {}
    return Corpus(
        train=parts["train"],
        heldout=parts["heldout"],
        ends=ends,
        tokenizer=tokens.from_description(manifest["tokenizer"]),
        fingerprint=manifest["fingerprint"],
        references=manifest["ngrams"],
        bytes_per_token=of_targets["bytes"] / of_targets["tokens"],
        start=manifest.get("document_start"),
        shared=manifest.get("shared", False),
        parts=tuple(
            MixturePart(x["share"], *x["tokens"])
            for x in manifest["fingerprint"].get("mixture", [])
        ),
        shard=manifest.get("shard", 0),
        all_counted="judged" not in manifest and bool(ends),
    )


def _pack(options: config.Data, folder: Path, format: int) -> dict[str, Any]:
    """Write the tokens of both splits piece by piece; return entries of the manifest.

    Args:
        folder: an empty folder, for `train.npy`, `heldout.npy` and their ends.
        format: as in `boundaries`.
    """
    parts = entries(options)
    loaded = [table.load(part) for _, part in parts]
    texts = [source for source, _ in loaded]
    several = any(sum(x.count(split) for x in texts) > 1 for split in SPLITS)
    if format == 1:  # format 1 has no BOS token
        options = dataclasses.replace(options, bos="false")
    tokenizer = _tokenizer(options, texts, several)
    marks = boundaries(tokenizer, several=several, format=format)
    content, counts, stops = hashlib.sha256(), {}, {}
    with bar(sum(x.characters for x in texts), "packing") as progress:
        for split in SPLITS:
            update = progress.update
            writer = SplitWriter(folder, split, tokenizer, marks, content, update)
            stops[split] = [0]
            for source in texts:
                for document in source.read(split):
                    writer.add(document)
                stops[split].append(writer.counts.tokens)
            counts[split] = writer.close()
    separate = options.documents == "separate"
    separate = separate or (options.documents == "auto" and several)
    if not separate:
        for split in SPLITS:
            Path(folder, f"{split}_ends.npy").unlink()
    facts = loaded[0][1]
    if options.mixture:
        edges = itertools.pairwise(stops["train"])
        mixed = [
            {
                "entry": getattr(part, ENTRY_KEYS[part.source]),
                "share": share,
                "tokens": [max(0, start - marks.overlap), stop],
                **identity,
            }
            for (share, part), (_, identity), (start, stop) in zip(
                parts, loaded, edges, strict=True
            )
        ]
        facts = {"mixture": mixed}
    names = [*SPLITS, *(f"{x}_ends" for x in SPLITS if separate)]
    arrays = {x: np.load(folder / f"{x}.npy", mmap_mode="r") for x in names}
    return {
        "tokenizer": tokenizer.describe(),
        "fingerprint": {
            **fingerprint(options.source, facts, content),
            "format": format,
            "datasets": version("datasets"),
            **{split: count._asdict() for split, count in counts.items()},
        },
        **text_statistics(arrays, tokenizer, marks, counts["heldout"]),
    }


def _tokenizer(
    options: config.Data, texts: list[Texts], several: bool
) -> tokens.Tokenizer:
    """Make the tokenizer of texts.

    The alphabet of "char" has the characters of both splits and, if there are several
    documents, the separator. BPE learns from the training split alone.
    """

    def documents(split: str) -> Iterator[Document]:
        return itertools.chain.from_iterable(x.read(split) for x in texts)

    learned_from = itertools.chain.from_iterable(map(pieces, documents("train")))
    if options.tokenizer == "char":
        heldout = itertools.chain.from_iterable(documents("heldout"))
        separator = SEPARATOR if several else ""
        learned_from = itertools.chain(learned_from, heldout, separator)
    return tokens.build(
        options.tokenizer,
        learned_from,
        vocabulary=options.vocabulary,
        bos=options.bos,
    )


def check_length(
    tokens: Sized, length: int, split: str, key: str = "data.path"
) -> None:
    """Check that a text has at least one window of length + 1 tokens.

    Args:
        split: "training" or "held-out", for the message.
        key: the configuration key that names the text, for the message.
    Raises:
        ValueError: the text is too short; the message names both sizes.
    """
    if length < 1:
        raise ValueError(f"model.length must be at least 1, got {length}")
    if len(tokens) < length + 1:
        raise ValueError(
            f"{key} has {len(tokens)} tokens of {split} text, model.length + 1 = "
            f"{length + 1} are needed: give a longer text or a smaller model.length"
        )
