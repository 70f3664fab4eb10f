"""A check that a zstd file is whole.

The package zstandard reads a file that ends early without an error.
"""

from __future__ import annotations

from pathlib import Path

from symjax.data.sources.formats import compression

BLOCK = 1 << 20  # bytes read at a time


def check_whole(path: Path) -> None:
    """Raise if a zstd file ends inside a frame. Other files pass.

    Raises:
        EOFError: the file ends early.
    """
    if compression(path) != "zstd":
        return
    try:
        import zstandard
    except ImportError:
        return  # fsspec then uses another package, which does raise an error
    frame = zstandard.ZstdDecompressor().decompressobj()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            while block:
                if frame.eof:
                    frame = zstandard.ZstdDecompressor().decompressobj()
                frame.decompress(block)
                block = frame.unused_data if frame.eof else b""
    if not frame.eof:
        raise EOFError("Compressed file ended before the end-of-stream marker")
