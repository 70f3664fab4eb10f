"""The documents of a source, read piece by piece and as often as they are needed.

What is kept in memory is a piece of text, and 17 bytes a document.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from symjax.data.sources.formats import ZSTANDARD, compression
from symjax.data.sources.zstd import check_whole

BLOCK = 1 << 20  # bytes read at a time

Document = Iterable[str]  # the pieces of its text, in order


@dataclass(frozen=True, eq=False)
class Texts:
    """
    Attributes:
        documents: reads them again, in order.
        held: bool, of each document whether it is held out.
        characters: of all documents.
    """

    documents: Callable[[], Iterator[Document]]
    held: np.ndarray
    characters: int

    def count(self, split: str) -> int:
        """How many documents a split has."""
        return int((self.held == (split == "heldout")).sum())

    def read(self, split: str) -> Iterator[Document]:
        """The documents of "train" or "heldout"."""
        for document, held in zip(self.documents(), self.held, strict=True):
            if held == (split == "heldout"):
                yield document


def in_two(documents: Callable[[], Iterator[Document]], cut: int) -> Iterator[Document]:
    """The one document there is up to a character, and from there on."""
    for before in (True, False):
        [document] = documents()
        yield _part(document, cut, before=before)


def _part(document: Document, cut: int, *, before: bool) -> Iterator[str]:
    place = 0
    for piece in document:
        left = max(0, cut - place)
        if part := piece[:left] if before else piece[left:]:
            yield part
        place += len(piece)
        if before and place >= cut:
            return


def wide_encoding(block: bytes) -> str:
    """Return "UTF-16" or "UTF-32" if a file begins with the mark of it, else ""."""
    marks = {
        codecs.BOM_UTF32_LE: "UTF-32",  # begins with the mark of UTF-16
        codecs.BOM_UTF32_BE: "UTF-32",
        codecs.BOM_UTF16_LE: "UTF-16",
        codecs.BOM_UTF16_BE: "UTF-16",
    }
    return next((name for mark, name in marks.items() if block.startswith(mark)), "")


def read_pieces(path: Path, key: str) -> Iterator[str]:
    """The text of a UTF-8 file, which may be compressed; a byte order mark is no text.

    Args:
        key: what names the file, for messages.
    Raises:
        ValueError: the file cannot be read, or is not UTF-8.
    """
    decoder, before = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        with _opened(path, key) as file:
            block = file.read(BLOCK)
            if name := wide_encoding(block):
                raise ValueError(f"{key}: {str(path)!r} is {name}: convert it to UTF-8")
            if block.startswith(codecs.BOM_UTF8):
                before = len(codecs.BOM_UTF8)
                block = block[before:]
            while True:
                begun = before - len(decoder.getstate()[0])
                if text := decoder.decode(block, final=not block):
                    yield text
                if not block:
                    return
                before += len(block)
                block = file.read(BLOCK)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{key}: {str(path)!r} is not UTF-8 (byte 0x{error.object[error.start]:02x}"
            f" at offset {begun + error.start}): convert it first"
        ) from None
    except ValueError:
        raise
    except Exception as error:
        if not isinstance(error, OSError) and not compression(path):
            raise
        why = (isinstance(error, OSError) and error.strerror) or error
        raise ValueError(f"{key}: {str(path)!r} cannot be read ({why})") from None


def _opened(path: Path, key: str) -> Any:
    """The bytes of a file; of a compressed one those that were compressed."""
    kind = compression(path)
    if not kind:
        return path.open("rb")
    import fsspec
    import fsspec.compression

    if kind not in fsspec.compression.compr:
        raise ValueError(f"{key}: {str(path)!r} is {ZSTANDARD}")
    check_whole(path)
    files: Any = fsspec.open(str(path), "rb", compression=kind)
    return files.open()
