"""A corpus that is read while another process (`packer`) still packs it.

It grows by whole shards. An epoch reads the shards in order, and the rows of each shard
in a pseudo-random order. So the text of a row does not depend on how many shards are
packed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from symjax import config
from symjax.data.progress import bar
from symjax.data.sources import table
from symjax.data.store.cache import folder_name, open_arrays, root
from symjax.data.store.folder import source_name
from symjax.data.store.manifest import (
    MANIFEST,
    check_options,
    format_of,
    read_manifest,
    write_manifest,
)
from symjax.data.store.packed import PackedArray, layout_of
from symjax.data.store.packer import HEAD, PROGRESS, PackRequest, read_progress
from symjax.data.store.writer import Counts
from symjax.storage import check_writable

SHARD = 1 << 24  # tokens per shard, which give 8,190 rows of 2,048 tokens
POLL_SECONDS = 0.2  # between two looks at the progress of the packer
REPORT_SECONDS = 30.0  # between two lines while a run waits for the packer


class Stream:
    """A packer process, and the number of tokens that it has packed.

    The process ends when this object is deleted.

    Args:
        request: the stream to pack.
    """

    def __init__(self, request: PackRequest):
        self.place, self.wanted = request.place, request.options.tokens
        self.complete, self.counts = False, Counts()
        self._closed = False
        command = [sys.executable, "-m", "symjax.data.store.packer"]
        here = str(Path(__file__).resolve().parents[3])
        paths = filter(None, [here, os.environ.get("PYTHONPATH")])
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            text=True,
            start_new_session=True,  # so that Ctrl-C reaches only the run
        )
        self._end = weakref.finalize(self, _end_process, self._process)
        self._input = self._process.stdin
        print(request.as_json(), file=self._input, flush=True)

    def wait_for(self, tokens: int) -> int:
        """Wait until `tokens` tokens are packed, or all of the stream is packed.

        Returns:
            the number of tokens that are packed.
        Raises:
            ValueError: the stream was closed, or the packer has ended before; the
                message has the reason.
        """
        reported = time.monotonic() + 1 - REPORT_SECONDS
        while not self._update_counts() and self.counts.tokens < tokens:
            if self._closed:
                raise ValueError(f"{self.place} is closed")
            ended = self._process.poll() is not None
            if ended and not self._update_counts() and not self._closed:
                raise ValueError(self._reason())
            if self.counts.tokens and time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                tqdm.write(
                    f"waiting for the stream: {self.counts.tokens:,} of "
                    f"{self.wanted:,} tokens are packed, {tokens:,} are needed",
                    file=sys.stderr,
                )
            time.sleep(POLL_SECONDS)
        return self.counts.tokens

    def finish(self) -> None:
        """Wait until all of the stream is packed, with a progress bar."""
        with bar(self.wanted, "packing", " tokens") as progress:
            while not self.complete:
                self.wait_for(self.counts.tokens + 1)
                progress.update(self.counts.tokens - progress.n)

    def close(self) -> None:
        """End the packer. A `wait_for` in another thread then raises a ValueError."""
        self._closed = True
        self._end()

    def _update_counts(self) -> bool:
        """Update `counts`; return whether all of the stream is packed."""
        if self.complete:
            return True
        if (self.place / MANIFEST).exists():
            written = read_manifest(self.place)["fingerprint"]["train"]
            self.counts, self.complete = Counts(**written), True
        elif (self.place / PROGRESS).exists():
            self.counts, _ = read_progress(self.place)
        return self.complete

    def _reason(self) -> str:
        """The reason that a packer printed before it ended, or its exit code."""
        reason = self._process.stdout.read() if self._process.stdout else ""
        return reason.strip() or (
            f"the process that packs {self.place} ended with exit code "
            f"{self._process.returncode}"
        )


def _end_process(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()


class GrowingArray:
    """An array [T] in a .npy file to which a packer appends; slices are NumPy arrays.

    Its length is the number of entries that are packed.
    """

    def __init__(self, stream: Stream, name: str):
        self.stream, self.path = stream, stream.place / f"{name}.npy"
        with self.path.open("rb") as file:
            _, self.dtype, self._begin = layout_of(file)
        self._descriptor = os.open(self.path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._ends = name.endswith("_ends")

    def __len__(self) -> int:
        counts = self.stream.counts
        if not self._ends:
            return counts.tokens
        # The end of the last document is written with the next document, or at the end
        # of the stream.
        return counts.documents - (not self.stream.complete)

    def __getitem__(self, piece: slice) -> np.ndarray:
        start, stop, _ = piece.indices(len(self))
        size = self.dtype.itemsize
        wanted = max(0, stop - start) * size
        content = os.pread(self._descriptor, wanted, self._begin + start * size)
        if len(content) < wanted:
            raise ValueError(f"corpus file {str(self.path)!r} was cut short")
        return np.frombuffer(content, self.dtype)


def open_stream(
    options: config.Data, directory: Path, *, replace: bool, format: int
) -> tuple[dict[str, Any], dict[str, PackedArray | GrowingArray]]:
    """Return the manifest of a run, and its arrays by name, once one shard is packed.

    If the corpus is not complete, a process is started that packs the rest.

    Args:
        replace, format: as in `open_folder`.
    Raises:
        ValueError: the data set cannot be read, or differs from the run's manifest.
    """
    known = _manifest_of_run(options, directory, replace)
    revisions = known["revisions"] if known else table.revisions(options)
    format = format_of(known["fingerprint"]) if known else format
    place = root(options) / (known["name"] if known else "")
    if known is None or not (place / PROGRESS).exists():
        place = root(options) / folder_name(options, revisions, format=format)
    check_writable(place.parent, f"data.cache {str(place.parent)!r}")
    if (place / MANIFEST).exists():
        manifest = read_manifest(place)
        arrays: dict[str, PackedArray | GrowingArray] = {**open_arrays(place, manifest)}
    else:
        stream = Stream(PackRequest(options, place, revisions, SHARD, format))
        stream.wait_for(1)
        manifest = read_manifest(place, HEAD)
        names = "train", "train_ends"
        arrays = {name: GrowingArray(stream, name) for name in names}
        arrays |= open_arrays(place, manifest)
    if known is None:
        write_manifest(directory, manifest)
    elif known["fingerprint"]["sha256"] != manifest["fingerprint"]["sha256"]:
        raise ValueError(
            f"{source_name(options)} does not begin as it did when this run was "
            "packed: use another --workdir"
        )
    else:  # all other entries stay as the run began with them
        manifest = {**known, "fingerprint": manifest["fingerprint"]}
    return manifest, arrays


def _manifest_of_run(
    options: config.Data, directory: Path, replace: bool
) -> dict[str, Any] | None:
    """The manifest of a run; None if it has none, or one that may be replaced."""
    if not (directory / MANIFEST).exists():
        return None
    try:
        manifest = read_manifest(directory)
        check_options(manifest["options"], options, directory)
    except ValueError:
        if not replace:
            raise
        return None
    return manifest
