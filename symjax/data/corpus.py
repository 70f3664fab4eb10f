"""A corpus: the tokens of a text, packed once into a folder and read from there."""

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
from symjax.data import ngrams, sources, tokens
from symjax.data.documents import Ends
from symjax.data.folder import SPLITS, open_folder
from symjax.data.manifest import fingerprint
from symjax.data.mixture import NAMES, Part, entries, key_of
from symjax.data.packed import Packed
from symjax.data.progress import bar
from symjax.data.stream import Growing, Stream, open_stream
from symjax.data.subwords import pieces
from symjax.data.texts import Document, Texts
from symjax.data.writer import SEPARATOR, SplitWriter


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
        shard: tokens of a shard, where the training text is a stream; else 0.
    """

    train: Packed | Growing | np.ndarray
    heldout: Packed | Growing | np.ndarray
    tokenizer: tokens.Tokenizer
    fingerprint: dict[str, Any]
    references: dict[str, float]
    bytes_per_token: float
    ends: Mapping[str, Ends] = dataclasses.field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    shard: int = 0

    @property
    def stream(self) -> Stream | None:
        """What packs the training text, while it does."""
        return self.train.stream if isinstance(self.train, Growing) else None

    @property
    def size(self) -> str:
        """How much training text there is, or will be."""
        tokens = self.stream.wanted if self.stream else len(self.train)
        return f"{tokens:,} training tokens{' of a stream' if self.shard else ''}"

    def bits_per_byte(self, nats: float) -> float:
        """Of a held-out loss in nats a token."""
        return nats / self.bytes_per_token / math.log(2)

    def check_length(self, length: int) -> None:
        """Refuse a model longer than the text, before anything is compiled.

        Raises:
            ValueError: train or held-out is shorter than length + 1 tokens.
        """
        key = key_of(self.fingerprint["source"])
        mixed = self.fingerprint.get("mixture", [])
        for part, facts in zip(self.parts, mixed, strict=True):
            where = f"data.mixture: {facts['entry']}"
            check_length(range(part.start, part.stop), length, "training", where)
        tokens = min(len(self.train), self.shard or len(self.train))
        check_length(range(tokens), length, "training", key)
        check_length(self.heldout, length, "held-out", key)


def open_corpus(
    options: config.Data, directory: Path, *, replace: bool = False
) -> Corpus:
    """The corpus of a run, packed from its source the first time: `open_folder`,
    `open_stream`."""
    directory = Path(directory)
    if options.streaming:
        sources.check_keys(options)
        manifest, parts = open_stream(options, directory, replace=replace)
    else:
        manifest, parts = open_folder(options, directory, _pack, replace=replace)
    heldout = manifest["fingerprint"]["heldout"]
    ends = {x: parts[f"{x}_ends"] for x in SPLITS if f"{x}_ends" in parts}
    return Corpus(
        train=parts["train"],
        heldout=parts["heldout"],
        ends={} if options.documents == "joined" else ends,
        tokenizer=tokens.from_description(manifest["tokenizer"]),
        fingerprint=manifest["fingerprint"],
        references=manifest["ngrams"],
        bytes_per_token=heldout["bytes"] / heldout["tokens"],
        parts=tuple(
            Part(x["share"], *x["tokens"])
            for x in manifest["fingerprint"].get("mixture", [])
        ),
        shard=manifest.get("shard", 0),
    )


def _pack(options: config.Data, folder: Path) -> dict[str, Any]:
    """Write the tokens of both splits, in memory that does not grow with them."""
    parts = entries(options)
    loaded = [sources.load(part) for _, part in parts]
    texts = [its for its, _ in loaded]
    several = any(sum(x.count(split) for x in texts) > 1 for split in SPLITS)
    tokenizer = _tokenizer(options, texts, several)
    content, counts, stops = hashlib.sha256(), {}, {}
    with bar(sum(x.characters for x in texts), "packing") as shown:
        for split in SPLITS:
            writer = SplitWriter(folder, split, tokenizer, content, shown.update)
            stops[split] = [0]
            for its in texts:
                for document in its.read(split):
                    writer.add(document)
                stops[split].append(writer.counts.tokens)
            counts[split] = writer.close()._asdict()
    if options.documents == "joined" or (options.documents == "auto" and not several):
        for split in SPLITS:
            Path(folder, f"{split}_ends.npy").unlink()
    facts = loaded[0][1]
    if options.mixture:
        edges = itertools.pairwise(stops["train"])
        mixed = [
            {
                "entry": getattr(part, NAMES[part.source]),
                "share": share,
                "tokens": list(its),
                **own,
            }
            for (share, part), (_, own), its in zip(parts, loaded, edges, strict=True)
        ]
        facts = {"mixture": mixed}
    train, heldout = (np.load(folder / f"{x}.npy", mmap_mode="r") for x in SPLITS)
    return {
        "tokenizer": tokenizer.describe(),
        "fingerprint": {
            **fingerprint(options.source, facts, content),
            "datasets": version("datasets"),
            **counts,
        },
        "ngrams": ngrams.cross_entropies(train, heldout, tokenizer.vocabulary),
    }


def _tokenizer(
    options: config.Data, texts: list[Texts], several: bool
) -> tokens.Tokenizer:
    """An alphabet is that of both splits, with the separator; BPE learns from one."""

    def documents(split: str) -> Iterator[Document]:
        return itertools.chain.from_iterable(x.read(split) for x in texts)

    some = itertools.chain.from_iterable(map(pieces, documents("train")))
    if options.tokenizer == "char":
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
