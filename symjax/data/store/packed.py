"""An array in a file, whose slices are read when they are needed.

The file is not mapped into memory. If a mapped file is cut short, reading the map kills
the process with SIGBUS. Here a read that returns too few bytes raises an exception.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

SAMPLED_FROM = 1 << 26  # bytes; opening a file of this size checks only a sample
BLOCKS, BLOCK = 64, 1 << 16  # blocks of a sample, and bytes per block
REMEDY = "delete the folder to build it again"


def sample_hash(file: BinaryIO, size: int) -> str:
    """Return a hash of `BLOCKS` blocks of a file, spread evenly from start to end.

    Args:
        size: the bytes of the file.
    """
    content = hashlib.sha256()
    for number in range(BLOCKS):
        file.seek(number * max(0, size - BLOCK) // (BLOCKS - 1))
        content.update(file.read(BLOCK))
    return content.hexdigest()


def layout_of(file: BinaryIO) -> tuple[int, np.dtype, int]:
    """Return length, dtype, and offset of the content of a .npy file with one axis."""
    np.lib.format.read_magic(file)
    (length,), _, dtype = np.lib.format.read_array_header_1_0(file)
    return length, dtype, file.tell()


class PackedArray:
    """An array [T] in a .npy file, such as token ids; its slices are NumPy arrays.

    A slice costs one read. If the file is deleted or replaced while it is open, reads
    continue in the file that was opened.

    Args:
        size, sha256: the size and hash of the file when it was written.
        sample: its `sample_hash` when it was written; "" if it has none. Opening a file
            of `SAMPLED_FROM` bytes or more compares only the sample. Opening a smaller
            file, or one without sample, compares the whole file, like `verify`.
    Raises:
        ValueError: the file is missing or is not as it was written. A slice raises it
            too, if the content has changed since the file was opened or cannot be read.
    """

    def __init__(self, path: Path, *, size: int, sha256: str, sample: str = ""):
        self.path = path
        self.sha256 = sha256
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise self._damaged("missing") from None
        weakref.finalize(self, os.close, self._descriptor)
        found = os.fstat(self._descriptor)
        if found.st_size != size:
            raise self._damaged(f"{found.st_size} bytes, {size} were written")
        sampled = sample and size >= SAMPLED_FROM
        if not sampled:
            self.verify()
        with self._file() as file:
            if sampled and sample_hash(file, size) != sample:
                raise self._damaged("a sample of it has changed")
            file.seek(0)
            self._length, self.dtype, self._begin = layout_of(file)
        self._checked = found.st_size, found.st_mtime_ns

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, piece: slice) -> np.ndarray:
        start, stop, _ = piece.indices(self._length)
        wanted = max(0, stop - start) * self.dtype.itemsize
        place = self._begin + start * self.dtype.itemsize
        try:
            found = os.fstat(self._descriptor)
            content = os.pread(self._descriptor, wanted, place)
        except OSError as error:
            raise ValueError(f"{self} cannot be read: {error.strerror}") from None
        if len(content) < wanted:
            raise self._damaged("cut short while in use")
        if (found.st_size, found.st_mtime_ns) != self._checked:
            self.verify()
            self._checked = found.st_size, found.st_mtime_ns
        return np.frombuffer(content, self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype, copy=bool(copy))

    def __str__(self) -> str:
        return f"corpus file {str(self.path)!r}"

    @property
    def vanished(self) -> bool:
        """True if the path no longer leads to the open file."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except OSError:
            return True

    def _file(self) -> Any:
        file = os.fdopen(os.dup(self._descriptor), "rb")
        file.seek(0)
        return file

    def verify(self) -> None:
        """Read the whole file and compare it with its sha256.

        Raises:
            ValueError: the content has changed.
        """
        with self._file() as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != self.sha256:
                raise self._damaged("its sha256 has changed")

    def _damaged(self, problem: str) -> ValueError:
        return ValueError(f"{self} is damaged ({problem}): {REMEDY}")
