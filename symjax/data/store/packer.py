"""The program that packs a stream while runs train on the part that is packed.

    python -m symjax.data.store.packer   reads a `PackRequest` as JSON from stdin

It is a separate process, because a thread that tokenizes would hold Python's global
lock and delay the training steps. It ends when the process that started it ends, since
then its stdin is closed. If it is killed, the next packer continues from
`progress.json`.

`corpus.json` is written last. Until then, the folder of the corpus has:

    heldout.npy, heldout_ends.npy   complete
    heldout_keys.npy                hashes of the held-out documents
    train.npy, train_ends.npy       growing
    head.json       the part of the manifest that is known after the first shard
    progress.json   the counts that are flushed to disk, and the state of the stream
                    after them
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
# The held-out text ends with the document that reaches HELD_SHARE · data.tokens or
# LARGEST_HELD_OUT characters, whichever is less.
HELD_SHARE, LARGEST_HELD_OUT = 1 / 20, 1 << 24


class PackRequest(NamedTuple):
    """The stream to pack, and the folder for it.

    Attributes:
        options: the options of the data set.
        place: the folder of the corpus in the cache.
        revisions: the revision of the data set; empty for a local folder.
        shard: tokens per shard. Runs may read a shard once it is packed.
        format: the format of a corpus that is begun now.
    """

    options: config.Data
    place: Path
    revisions: list[str]
    shard: int
    format: int = FORMAT

    def as_json(self) -> str:
        """Return the request as JSON, for `request_from_json`."""
        options, place, *rest = self
        return json.dumps([dataclasses.asdict(options), str(place), *rest])


def request_from_json(text: str) -> PackRequest:
    """Return the request that `PackRequest.as_json` wrote."""
    options, place, *rest = json.loads(text)
    return PackRequest(config.Data(**options), Path(place), *rest)


def pack(request: PackRequest) -> None:
    """Pack the part of a stream that is not packed yet.

    Raises:
        ValueError: the data set cannot be read.
    """
    with locked(request.place):
        if (request.place / MANIFEST).exists():
            return
        if not (request.place / PROGRESS).exists():
            shutil.rmtree(request.place, ignore_errors=True)
            request.place.mkdir()
        _Packer(request).run()


class _Packer:
    """Packer of a stream, from its beginning or from where the last packer stopped.

    Attributes:
        keys: hashes of the held-out documents.
        state: state of the training stream after the last document that was read.
        counts: documents, tokens and bytes that the last packer has written to the
            training files.
        heldout_counts: documents, tokens and bytes of the held-out text; set only by
            the packer that writes this text.
        head: the part of the manifest that is known after the first shard; None before.
    """

    def __init__(self, request: PackRequest):
        self.request, self.options, self.place = request, request.options, request.place
        revision = next(iter(request.revisions), "")
        self.rows, self.facts = hub.open_streams(self.options, revision)
        self.content = hashlib.sha256()  # of the held-out text and the first shard
        self.state: dict[str, Any] | None = None
        self.counts, self.head = Counts(), None
        self.left_out = LeftOut()
        if (self.place / PROGRESS).exists():
            self._resume()
        else:
            self.tokenizer = self._tokenizer()
            self._choose_boundaries(request.format)
            self.keys, self.heldout_counts = self._hold_out()

    def _choose_boundaries(self, format: int) -> None:
        """Set `marks`, the tokens around documents."""
        self.marks = boundaries(self.tokenizer, several=True, format=format)

    def _resume(self) -> None:
        """Read the state of the packer that stopped."""
        self.head = read_manifest(self.place, HEAD)
        self.tokenizer = tokens.from_description(self.head["tokenizer"])
        self._choose_boundaries(format_of(self.head["fingerprint"]))
        self.counts, self.state = read_progress(self.place)
        self.keys = set(np.load(self.place / KEYS).tolist())

    def _documents(
        self, split: int, left_out: LeftOut | None = None
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (text, state after it) of a split: 0 for training, −1 for held-out."""
        return hub.streamed_texts(self.options, self.rows[split], self.state, left_out)

    def _held_out(
        self, left_out: LeftOut | None = None
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield held-out documents, with the state after each.

        They come from the held-out split, or else from the beginning of the training
        split, up to `HELD_SHARE` and `LARGEST_HELD_OUT`.
        """
        left = min(LARGEST_HELD_OUT, self.options.tokens * HELD_SHARE)
        for text, state in self._documents(-1, left_out):
            yield text, state
            left -= len(text)
            if left <= 0:
                return

    def _tokenizer(self) -> tokens.Tokenizer:
        """Make the tokenizer; BPE learns from the training documents."""
        first = 0 if len(self.rows) > 1 else sum(1 for _ in self._held_out())
        texts = (text for text, _ in itertools.islice(self._documents(0), first, None))
        options = self.options
        bos = "false" if self.request.format == 1 else options.bos
        more = {"vocabulary": options.vocabulary, "bos": bos}
        return tokens.build(options.tokenizer, pieces(texts), **more)

    def _hold_out(self) -> tuple[set[int], Counts]:
        """Write the held-out split; return hashes of its documents, and its counts."""
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
        return SplitWriter(
            self.place,
            split,
            self.tokenizer,
            self.marks,
            self.content,
            lambda _: None,
            counts,
        )

    def run(self) -> None:
        """Write the training documents, and `progress.json` after each shard.

        Copies of held-out documents are left out.
        """
        shard, wanted = self.request.shard, self.options.tokens
        writer = self._writer("train", self.counts)
        with bar(min(shard, wanted), "packing the first tokens", " tokens") as progress:
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
                    progress.update(size - progress.n)
                if size // shard > before:
                    self._advance(writer)
                    progress.close()
        self.left_out.say(message_name(self.options))
        if self.head is None:
            self._advance(writer)
        self._finish(writer.close())

    def _advance(self, writer: SplitWriter) -> None:
        """Flush the files and write `progress.json`, and the first time `head.json`."""
        counts = writer.sync()
        if self.head is None:
            self.head = self._head(counts)
            write_manifest(self.place, self.head, HEAD)
        facts = {**counts._asdict(), "state": self.state}
        with replaced(self.place, PROGRESS) as unfinished:
            (unfinished / PROGRESS).write_text(json.dumps(facts))

    def _finish(self, whole: Counts) -> None:
        """Write `corpus.json`."""
        names = sorted(path.name for path in self.place.glob("*.npy"))
        manifest = dict(self.head or {})
        manifest["files"] = {name: file_facts(self.place / name) for name in names}
        manifest["fingerprint"]["train"] = whole._asdict()
        write_manifest(self.place, manifest)

    def _head(self, counts: Counts) -> dict[str, Any]:
        """The part of the manifest that is known after the first shard."""
        if not counts.tokens:
            raise ValueError(
                f"data.name {self.options.name!r} has no text besides the held-out text"
            )
        files = table.files(self.options)
        arrays = {x: np.load(self.place / x, mmap_mode="r") for x in HELDOUT_FILES}
        arrays = {Path(name).stem: array for name, array in arrays.items()}
        arrays["train"] = _written_entries(self.place / "train.npy", counts.tokens)
        arrays["train"] = arrays["train"][: self.request.shard]
        arrays["train_ends"] = _written_entries(
            self.place / "train_ends.npy", counts.documents - 1
        )
        if self.options.documents == "joined":
            arrays = {x: arrays[x] for x in SPLITS}
        return {
            "name": self.place.name,
            "options": stored_options(self.options),
            "revisions": self.request.revisions,
            "shard": self.request.shard,
            "tokenizer": self.tokenizer.describe(),
            "fingerprint": {
                **fingerprint(self.options.source, self.facts, self.content),
                "format": self.request.format,
                "datasets": version("datasets"),
                "heldout": self.heldout_counts._asdict(),
            },
            **text_statistics(arrays, self.tokenizer, self.marks, self.heldout_counts),
            "origin": {"stamp": stamp_of(files), "sha256": ""},
            "files": {name: file_facts(self.place / name) for name in HELDOUT_FILES},
        }


def _written_entries(path: Path, length: int) -> np.ndarray:
    """Return the first `length` entries of a .npy file that is being written."""
    with path.open("rb") as file:
        _, dtype, begin = layout_of(file)
        if not length:
            return np.empty(0, dtype)  # an empty range cannot be mapped
        return np.memmap(file, dtype, "r", begin, (length,))


def read_progress(place: Path) -> tuple[Counts, dict[str, Any]]:
    """Return the counts that are flushed to disk, and the stream's state after them."""
    facts = json.loads((place / PROGRESS).read_text())
    state = facts.pop("state")
    return Counts(**facts), state


def _end_with_parent() -> None:
    """Exit as soon as stdin is closed."""
    sys.stdin.buffer.read()  # returns when the parent closes its end or dies
    os._exit(1)


def main() -> None:
    """Pack the request on stdin; exit with 0, or with 1 and the reason on stdout."""
    reasons = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr; stdout has only the reason
    request = request_from_json(sys.stdin.buffer.readline().decode())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        pack(request)
    except (ValueError, OSError) as error:
        print(error, file=reasons, flush=True)
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
