"""A check of files that are compressed by zstd: the package zstandard does not notice
where one ends early."""

from __future__ import annotations

from pathlib import Path

from symjax.data.sources.formats import compression

BLOCK = 1 << 20  # bytes read at a time


def check_whole(path: Path) -> None:
    """Refuse a zstd file that ends inside a frame; other files pass.

    Raises:
        EOFError: the file ends early.
    """
    if compression(path) != "zstd":
        return
    try:
        import zstandard
    except ImportError:
        return  # what fsspec reads it with then does notice
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
