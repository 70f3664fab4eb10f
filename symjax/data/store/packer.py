"""A program that packs a stream, beside the runs that train on what it has packed.

    python -m symjax.data.store.packer   reads a `PackRequest` as JSON from stdin

It is a process of its own, since tokenizing and decoding in a thread would hold the
interpreter's lock for as long as a step takes. It ends with the one that started it,
whose end of its stdin closes. If it is killed, the next one continues after
the last document in the file of its progress.

In the folder of the corpus, until `corpus.json` says that it is whole:

    train.npy, train_ends.npy   growing; heldout.npy and its ends are whole
    head.json       what is known once the first shard is packed: tokenizer, fingerprint
    progress.json   what is safely on the disk, and the state of the stream after it
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from symjax import config
from symjax.data import tokens
from symjax.data.boundaries import FORMAT, boundaries
from symjax.data.progress import bar
from symjax.data.sources import hub, splits, table
from symjax.data.sources.left_out import LeftOut
from symjax.data.sources.opening import message_name
from symjax.data.store.cache import file_facts, locked
from symjax.data.store.folder import SPLITS
from symjax.data.store.manifest import (
    MANIFEST,
    fingerprint,
    format_of,
    read_manifest,
    stamp_of,
    stored_options,
    write_manifest,
)
from symjax.data.store.packed import layout_of
from symjax.data.store.writer import Counts, SplitWriter
from symjax.data.subwords import pieces
from symjax.data.text_statistics import text_statistics
from symjax.storage import replaced

HEAD, PROGRESS, KEYS = "head.json", "progress.json", "heldout_keys.npy"
HELDOUT_FILES = "heldout.npy", "heldout_ends.npy"
HELD_SHARE, LARGEST_HELD_OUT = (
    1 / 20,
    1 << 24,
)  # characters held out, of data.tokens and at most


class PackRequest(NamedTuple):
    """The data to pack, and the folder for it.

    Attributes:
        place: the folder of the corpus in the cache.
        revisions: of the data set; none of a local folder.
        shard: tokens after which what has been packed may be read.
        format: of the corpus, where it has not been begun.
    """

    options: config.Data
    place: Path
    revisions: list[str]
    shard: int
    format: int = FORMAT

    def as_json(self) -> str:
        options, place, *rest = self
        return json.dumps([dataclasses.asdict(options), str(place), *rest])


def request_from_json(text: str) -> PackRequest:
    options, place, *rest = json.loads(text)
    return PackRequest(config.Data(**options), Path(place), *rest)


def pack(order: PackRequest) -> None:
    """Pack a stream as far as it is not yet.

    Raises:
        ValueError: the data set cannot be read.
    """
    with locked(order.place):
        if (order.place / MANIFEST).exists():
            return
        if not (order.place / PROGRESS).exists():
            shutil.rmtree(order.place, ignore_errors=True)
            order.place.mkdir()
        _Packer(order).run()


class _Packer:
    """The rest of a stream, from its beginning or from where a packer stopped.

    Attributes:
        keys: hashes of the held-out documents.
        state: of the training split after the last document that counts.
        counts: what is kept of the training files.
        head: the manifest as far as the first shard decides it; None before that.
    """

    def __init__(self, order: PackRequest):
        self.order, self.options, self.place = order, order.options, order.place
        revision = next(iter(order.revisions), "")
        self.rows, self.facts = hub.open_streams(self.options, revision)
        self.content = hashlib.sha256()  # of what is held out and the first shard
        self.state: dict[str, Any] | None = None
        self.counts, self.head = Counts(), None
        self.left_out = LeftOut()
        if (self.place / PROGRESS).exists():
            self._resume()
        else:
            self.tokenizer = self._tokenizer()
            self._mark(order.format)
            self.keys, self.held = self._hold_out()

    def _mark(self, format: int) -> None:
        self.marks = boundaries(self.tokenizer, several=True, format=format)

    def _resume(self) -> None:
        self.head = read_manifest(self.place, HEAD)
        self.tokenizer = tokens.from_description(self.head["tokenizer"])
        self._mark(format_of(self.head["fingerprint"]))
        self.counts, self.state = read_progress(self.place)
        self.keys = set(np.load(self.place / KEYS).tolist())

    def _documents(
        self, split: int, left_out: LeftOut | None = None
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        return hub.streamed_texts(self.options, self.rows[split], self.state, left_out)

    def _held_out(
        self, left_out: LeftOut | None = None
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Documents of the held-out split, or else the first ones of training."""
        left = min(LARGEST_HELD_OUT, self.options.tokens * HELD_SHARE)
        for text, state in self._documents(-1, left_out):
            yield text, state
            left -= len(text)
            if left <= 0:
                return

    def _tokenizer(self) -> tokens.Tokenizer:
        """BPE learns from the training text, as far as it is needed."""
        first = 0 if len(self.rows) > 1 else sum(1 for _ in self._held_out())
        texts = (text for text, _ in itertools.islice(self._documents(0), first, None))
        options = self.options
        bos = "false" if self.order.format == 1 else options.bos
        more = {"vocabulary": options.vocabulary, "bos": bos}
        return tokens.build(options.tokenizer, pieces(texts), **more)

    def _hold_out(self) -> tuple[set[int], Counts]:
        """Write what is held out: the hashes of its documents, and how much it is."""
        writer = self._writer("heldout")
        keys, after = [], None
        for text, state in self._held_out(self.left_out):
            writer.add([text])
            keys.append(splits.hash_and_size([text])[0])
            after = state
        np.save(self.place / KEYS, np.array(keys, np.uint64))
        if len(self.rows) == 1:
            self.state = after
        return set(keys), writer.close()

    def _writer(self, split: str, counts: Counts | None = None) -> SplitWriter:
        made = self.place, split, self.tokenizer, self.marks, self.content
        return SplitWriter(*made, lambda _: None, counts)

    def run(self) -> None:
        """Write training documents, but copies of what is held out, and their number
        after each shard."""
        shard, wanted = self.order.shard, self.options.tokens
        writer = self._writer("train", self.counts)
        with bar(min(shard, wanted), "packing the first tokens", " tokens") as shown:
            for text, state in self._documents(0, self.left_out):
                if writer.counts.tokens >= wanted:
                    break
                self.state = state
                if splits.hash_and_size([text])[0] in self.keys:
                    self.left_out.add("copies of held-out texts", repr(text[:40]))
                    continue
                before = writer.counts.tokens // shard
                writer.add([text])
                size = writer.counts.tokens
                if self.head is None:
                    shown.update(size - shown.n)
                if size // shard > before:
                    self._advance(writer)
                    shown.close()
        self.left_out.say(message_name(self.options))
        if self.head is None:
            self._advance(writer)
        self._finish(writer.close())

    def _advance(self, writer: SplitWriter) -> None:
        """Write how much is packed; the first time also the manifest so far."""
        counts = writer.sync()
        if self.head is None:
            self.head = self._head(counts)
            write_manifest(self.place, self.head, HEAD)
        said = {**counts._asdict(), "state": self.state}
        with replaced(self.place, PROGRESS) as unfinished:
            (unfinished / PROGRESS).write_text(json.dumps(said))

    def _finish(self, whole: Counts) -> None:
        names = sorted(path.name for path in self.place.glob("*.npy"))
        manifest = dict(self.head or {})
        manifest["files"] = {name: file_facts(self.place / name) for name in names}
        manifest["fingerprint"]["train"] = whole._asdict()
        write_manifest(self.place, manifest)

    def _head(self, counts: Counts) -> dict[str, Any]:
        """The manifest, as far as the first shard decides it."""
        if not counts.tokens:
            raise ValueError(
                f"data.name {self.options.name!r} has no text beside what is held out"
            )
        files = table.files(self.options)
        arrays = {x: np.load(self.place / x, mmap_mode="r") for x in HELDOUT_FILES}
        arrays = {Path(name).stem: array for name, array in arrays.items()}
        arrays["train"] = _written_entries(self.place / "train.npy", counts.tokens)
        arrays["train"] = arrays["train"][: self.order.shard]
        arrays["train_ends"] = _written_entries(
            self.place / "train_ends.npy", counts.documents - 1
        )
        if self.options.documents == "joined":
            arrays = {x: arrays[x] for x in SPLITS}
        return {
            "name": self.place.name,
            "options": stored_options(self.options),
            "revisions": self.order.revisions,
            "shard": self.order.shard,
            "tokenizer": self.tokenizer.describe(),
            "fingerprint": {
                **fingerprint(self.options.source, self.facts, self.content),
                "format": self.order.format,
                "datasets": version("datasets"),
                "heldout": self.held._asdict(),
            },
            **text_statistics(arrays, self.tokenizer, self.marks, self.held),
            "origin": {"stamp": stamp_of(files), "sha256": ""},
            "files": {name: file_facts(self.place / name) for name in HELDOUT_FILES},
        }


def _written_entries(path: Path, length: int) -> np.ndarray:
    """The first entries of a .npy file that is being written."""
    with path.open("rb") as file:
        _, dtype, begin = layout_of(file)
        if not length:
            return np.empty(0, dtype)  # which cannot be mapped
        return np.memmap(file, dtype, "r", begin, (length,))


def read_progress(place: Path) -> tuple[Counts, dict[str, Any]]:
    """How much is safely packed, and the state of the stream after it."""
    said = json.loads((place / PROGRESS).read_text())
    state = said.pop("state")
    return Counts(**said), state


def _end_with_parent() -> None:
    sys.stdin.buffer.read()  # comes back when the other end is closed
    os._exit(1)


def main() -> None:
    """Exit code 0: all is packed; 1: it cannot be, for the reason on stdout."""
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no reason
    order = request_from_json(sys.stdin.buffer.readline().decode())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        pack(order)
    except (ValueError, OSError) as error:
        print(error, file=said, flush=True)
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
