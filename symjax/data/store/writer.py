"""Writers of packed text: `ArrayWriter` for a .npy file, `SplitWriter` for a split.

`SplitWriter` writes the tokens of all documents of a split into `<split>.npy`, and the
places where they end into `<split>_ends.npy`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from symjax.data.boundaries import SEPARATOR, Boundaries, Piece
from symjax.data.sources.texts import Document
from symjax.data.tokens import Tokenizer

ENCODED_AT_ONCE = 1 << 20  # characters; the tokenizer uses all cores


class ArrayWriter:
    """A .npy file of one axis, to which arrays are appended.

    The header has room for any length. It is written again when the file is closed.

    Args:
        length: the number of entries of an existing file to keep; 0 for a new file.
    """

    def __init__(self, path: Path, dtype: Any, length: int = 0):
        self.path, self.dtype, self.length = path, np.dtype(dtype), length
        self._file = path.open("r+b" if length else "wb")
        self._header()
        self._begin = self._file.tell()
        self._file.truncate(self._begin + length * self.dtype.itemsize)
        self._file.seek(0, os.SEEK_END)

    def append(self, array: np.ndarray) -> None:
        """Append the entries of an array.

        Raises:
            ValueError: the dtype is not that of the file.
        """
        if array.dtype != self.dtype:
            raise ValueError(f"{self.path} has {self.dtype}, got {array.dtype}")
        self._file.write(array.tobytes())
        self.length += len(array)

    def sync(self) -> None:
        """Flush everything that was appended to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write the header with the final length, and close the file."""
        self._file.seek(0)
        self._header()
        if self._file.tell() != self._begin:
            raise RuntimeError(f"the header of {self.path} has changed its size")
        self._file.close()

    def _header(self) -> None:
        described = np.lib.format.dtype_to_descr(self.dtype)
        facts = {"descr": described, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, facts)


class Counts(NamedTuple):
    """Numbers of documents, tokens, and bytes of text in a split."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0


class SplitWriter:
    """Writer of the documents of a split: tokens in one file, ends in another.

    Args:
        marks: the tokens around documents.
        content: a hash object that is updated with all text, and with the pieces before
            and between documents; a piece that is a token counts as NUL.
        report: called with the number of characters that were written.
        counts: the part of existing files to keep; None for new files.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        tokenizer: Tokenizer,
        marks: Boundaries,
        content: Any,
        report: Callable[[int], Any],
        counts: Counts | None = None,
    ):
        self._tokenizer, self._content, self._report = tokenizer, content, report
        self._marks = marks
        self._waiting: list[str | int | None] = []
        self._characters = 0
        self.documents, tokens, self.bytes = counts or Counts()
        dtype = np.min_scalar_type(tokenizer.vocabulary - 1)
        self._tokens = ArrayWriter(folder / f"{split}.npy", dtype, tokens)
        before = max(0, self.documents - 1)  # the last end is written later
        self._ends = ArrayWriter(folder / f"{split}_ends.npy", np.int64, before)

    @property
    def counts(self) -> Counts:
        """The counts of everything that was added."""
        self._encode()
        return Counts(self.documents, self._tokens.length, self.bytes)

    def add(self, document: Document) -> None:
        """Write a document, with the tokens before and after it."""
        if self.documents:
            self._mark(self._marks.between)
            self._end_last()
            self._mark(self._marks.before)
        else:
            self._mark(self._marks.first)
        for piece in self._tokenizer.pieces(document):
            self._put(piece)
        if self._marks.after is not None:
            self._waiting.append(self._marks.after)
        self.documents += 1

    def sync(self) -> Counts:
        """Flush everything that was added to the disk."""
        self._encode()
        for file in (self._tokens, self._ends):
            file.sync()
        return self.counts

    def close(self) -> Counts:
        """Write the end of the last document, and close both files."""
        self._end_last()
        self._encode()
        for file in (self._tokens, self._ends):
            file.close()
        return self.counts

    def _end_last(self) -> None:
        """Note that the last document ends here."""
        if self.documents:
            self._waiting.append(None)

    def _mark(self, piece: Piece) -> None:
        """Add the piece between or before documents, if there is one."""
        if isinstance(piece, str):
            self._put(piece)
        elif piece is not None:
            self._content.update(SEPARATOR.encode())
            self._waiting.append(piece)

    def _put(self, piece: str) -> None:
        """Add a piece of text."""
        encoded = piece.encode()
        self._content.update(encoded)
        self.bytes += len(encoded)
        self._waiting.append(piece)
        self._characters += len(piece)
        if self._characters >= ENCODED_AT_ONCE:
            self._encode()

    def _encode(self) -> None:
        """Encode and write the waiting pieces: text, tokens, and ends (None)."""
        texts = [x for x in self._waiting if isinstance(x, str)]
        encoded = iter(self._tokenizer.encode_all(texts))
        for x in self._waiting:
            if x is None:
                self._ends.append(np.array([self._tokens.length], np.int64))
            elif isinstance(x, str):
                self._tokens.append(next(encoded))
            else:
                self._tokens.append(np.array([x], self._tokens.dtype))
        self._report(self._characters)
        self._waiting, self._characters = [], 0
