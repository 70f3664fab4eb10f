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
from symjax.data import tokens
from symjax.data.boundaries import FORMAT, SEPARATOR, boundaries
from symjax.data.documents import Ends
from symjax.data.progress import bar
from symjax.data.sources import sources
from symjax.data.sources.mixture import NAMES, Part, entries, key_of
from symjax.data.sources.texts import Document, Texts
from symjax.data.store.folder import SPLITS, open_folder
from symjax.data.store.manifest import fingerprint
from symjax.data.store.packed import Packed
from symjax.data.store.stream import Growing, Stream, open_stream
from symjax.data.store.writer import SplitWriter
from symjax.data.subwords import pieces
from symjax.data.targets import measured


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Packed text.

    Attributes:
        train, heldout: token ids [T] in files, uint8, uint16 or uint32.
        tokenizer: what turned text into these ids.
        fingerprint: plain values that identify the text: source, sha256, versions,
            and for each split its documents, tokens and bytes.
        references: held-out cross-entropy of "unigram", "bigram" and "trigram", nats
            per target.
        bytes_per_token: UTF-8 bytes a held-out target, for bits per byte. A token that
            stands before or after a document has none, a NUL one.
        start: the token before a document that its first token is predicted from;
            None: nothing is.
        shared: the documents next to each other have that token in common: see
            `documents.separated`.
        ends: for each split, where its documents end; empty: they are joined.
        parts: of the training text, where it is a mixture of sources.
        all_counted: bytes_per_token and references are about all tokens, also about
            first tokens of documents that are no targets, as older versions had it.
        shard: tokens of a shard, where the training text is a stream; else 0.
    """

    train: Packed | Growing | np.ndarray
    heldout: Packed | Growing | np.ndarray
    tokenizer: tokens.Tokenizer
    fingerprint: dict[str, Any]
    references: dict[str, float]
    bytes_per_token: float
    start: int | None = None
    shared: bool = False
    ends: Mapping[str, Ends] = dataclasses.field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    shard: int = 0
    all_counted: bool = False

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

    def shown(self, ids: Any) -> str:
        """The text of token ids [T], without the token before the first document."""
        ids = np.asarray(ids)
        skip = len(ids) > 0 and ids[0] == self.start
        return self.tokenizer.decode(ids[int(skip) :])

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
    options: config.Data,
    directory: Path,
    *,
    replace: bool = False,
    format: int = FORMAT,
) -> Corpus:
    """The corpus of a run, packed from its source the first time: `open_folder`,
    `open_stream`."""
    directory = Path(directory)
    if options.streaming:
        sources.check_keys(options)
        manifest, parts = open_stream(
            options, directory, replace=replace, format=format
        )
    else:
        manifest, parts = open_folder(
            options, directory, _pack, replace=replace, format=format
        )
    heldout = manifest["fingerprint"]["heldout"]
    judged = manifest.get("judged", heldout)  # format 1 took all tokens
    ends = {x: parts[f"{x}_ends"] for x in SPLITS if f"{x}_ends" in parts}
    if options.documents == "joined":  # streams keep them all the same
        ends = {}
    return Corpus(
        train=parts["train"],
        heldout=parts["heldout"],
        ends=ends,
        tokenizer=tokens.from_description(manifest["tokenizer"]),
        fingerprint=manifest["fingerprint"],
        references=manifest["ngrams"],
        bytes_per_token=judged["bytes"] / judged["tokens"],
        start=manifest.get("document_start"),
        shared=manifest.get("shared", False),
        parts=tuple(
            Part(x["share"], *x["tokens"])
            for x in manifest["fingerprint"].get("mixture", [])
        ),
        shard=manifest.get("shard", 0),
        all_counted="judged" not in manifest and bool(ends),
    )


def _pack(options: config.Data, folder: Path, format: int) -> dict[str, Any]:
    """Write the tokens of both splits, in memory that does not grow with them."""
    parts = entries(options)
    loaded = [sources.load(part) for _, part in parts]
    texts = [its for its, _ in loaded]
    several = any(sum(x.count(split) for x in texts) > 1 for split in SPLITS)
    if format == 1:  # which had no token before a document
        options = dataclasses.replace(options, bos="false")
    tokenizer = _tokenizer(options, texts, several)
    marks = boundaries(tokenizer, several=several, format=format)
    content, counts, stops = hashlib.sha256(), {}, {}
    with bar(sum(x.characters for x in texts), "packing") as shown:
        for split in SPLITS:
            made = folder, split, tokenizer, marks, content, shown.update
            writer = SplitWriter(*made)
            stops[split] = [0]
            for its in texts:
                for document in its.read(split):
                    writer.add(document)
                stops[split].append(writer.counts.tokens)
            counts[split] = writer.close()
    apart = options.documents == "separate" or (options.documents == "auto" and several)
    if not apart:
        for split in SPLITS:
            Path(folder, f"{split}_ends.npy").unlink()
    facts = loaded[0][1]
    if options.mixture:
        edges = itertools.pairwise(stops["train"])
        mixed = [
            {
                "entry": getattr(part, NAMES[part.source]),
                "share": share,
                "tokens": [max(0, start - marks.overlap), stop],
                **own,
            }
            for (share, part), (_, own), (start, stop) in zip(
                parts, loaded, edges, strict=True
            )
        ]
        facts = {"mixture": mixed}
    names = [*SPLITS, *(f"{x}_ends" for x in SPLITS if apart)]
    arrays = {x: np.load(folder / f"{x}.npy", mmap_mode="r") for x in names}
    return {
        "tokenizer": tokenizer.describe(),
        "fingerprint": {
            **fingerprint(options.source, facts, content),
            "format": format,
            "datasets": version("datasets"),
            **{split: its._asdict() for split, its in counts.items()},
        },
        **measured(arrays, tokenizer, marks, counts["heldout"]),
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
    more = {"vocabulary": options.vocabulary, "bos": options.bos}
    return tokens.build(options.tokenizer, some, **more)


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
