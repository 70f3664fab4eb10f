"""The documents of a source, read piece by piece and as often as they are needed.

Memory holds one piece of text at a time, and a hash and a size for each document.
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
    """The documents of a source.

    Attributes:
        documents: a function that reads all documents from the beginning, in order.
        held: bool [documents]; True for held-out documents.
        characters: the number of characters of all documents together.
    """

    documents: Callable[[], Iterator[Document]]
    held: np.ndarray
    characters: int

    def count(self, split: str) -> int:
        """Number of documents in a split, "train" or "heldout"."""
        return int((self.held == (split == "heldout")).sum())

    def read(self, split: str) -> Iterator[Document]:
        """Yield the documents of a split, "train" or "heldout"."""
        for document, held in zip(self.documents(), self.held, strict=True):
            if held == (split == "heldout"):
                yield document


def cut_in_two(
    documents: Callable[[], Iterator[Document]], cut: int
) -> Iterator[Document]:
    """Yield the first `cut` characters of a single document, then the rest of it."""
    for before in (True, False):
        [document] = documents()
        yield _side_of_cut(document, cut, before=before)


def _side_of_cut(document: Document, cut: int, *, before: bool) -> Iterator[str]:
    place = 0
    for piece in document:
        left = max(0, cut - place)
        if part := piece[:left] if before else piece[left:]:
            yield part
        place += len(piece)
        if before and place >= cut:
            return


def wide_encoding(block: bytes) -> str:
    """Return "UTF-16" or "UTF-32" if bytes begin with its byte order mark, else ""."""
    marks = {
        codecs.BOM_UTF32_LE: "UTF-32",  # first, since it begins like UTF-16's mark
        codecs.BOM_UTF32_BE: "UTF-32",
        codecs.BOM_UTF16_LE: "UTF-16",
        codecs.BOM_UTF16_BE: "UTF-16",
    }
    return next((name for mark, name in marks.items() if block.startswith(mark)), "")


def read_pieces(path: Path, key: str) -> Iterator[str]:
    """Yield the text of a UTF-8 file, without its byte order mark.

    A compressed file is decompressed.

    Args:
        key: the configuration key or option that names the file, for messages.
    Raises:
        ValueError: the file cannot be read, or is not UTF-8.
    """
    decoder, bytes_read = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        with _opened(path, key) as file:
            block = file.read(BLOCK)
            if name := wide_encoding(block):
                raise ValueError(f"{key}: {str(path)!r} is {name}: convert it to UTF-8")
            if block.startswith(codecs.BOM_UTF8):
                bytes_read = len(codecs.BOM_UTF8)
                block = block[bytes_read:]
            while True:
                start = bytes_read - len(decoder.getstate()[0])
                if text := decoder.decode(block, final=not block):
                    yield text
                if not block:
                    return
                bytes_read += len(block)
                block = file.read(BLOCK)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{key}: {str(path)!r} is not UTF-8 (byte 0x{error.object[error.start]:02x}"
            f" at offset {start + error.start}): convert it first"
        ) from None
    except ValueError:
        raise
    except Exception as error:
        if not isinstance(error, OSError) and not compression(path):
            raise
        why = (isinstance(error, OSError) and error.strerror) or error
        raise ValueError(f"{key}: {str(path)!r} cannot be read ({why})") from None


def _opened(path: Path, key: str) -> Any:
    """Open a file for reading its bytes, decompressed if it is compressed."""
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
