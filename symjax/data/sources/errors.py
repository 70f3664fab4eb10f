"""Errors about files that cannot be read: one line with file, line and reason."""

from __future__ import annotations

import io
from typing import Any

from symjax.data.sources.formats import ZSTANDARD, UnusableData
from symjax.data.sources.texts import wide_encoding


class DamagedFile(UnusableData):
    """An error inside a file, such as "line 3: …", without the file's name."""


def is_connection_error(error: BaseException) -> bool:
    """Return whether an error comes from the connection, or from a busy server."""
    response = getattr(error, "response", None)
    if response is not None:
        return response.status_code == 429 or response.status_code >= 500
    library = type(error).__module__.partition(".")[0]
    return isinstance(error, ConnectionError | TimeoutError) or library.startswith(
        ("http", "aiohttp")
    )


def causes(error: BaseException) -> list[BaseException]:
    """Return an error and the errors that caused it, as a traceback shows them."""
    chain, cause = [], error
    while cause is not None:
        chain.append(cause)
        context = None if cause.__suppress_context__ else cause.__context__
        cause = cause.__cause__ or context
    return chain


def error_with_path(error: Exception, path: str, where: str) -> Exception:
    """Return an error with the file's path, for an error from reading the file.

    Connection errors are returned unchanged.

    Args:
        where: the name of the data set in messages, such as "data.name 'a'".
    """
    chain = causes(error)
    if any(map(is_connection_error, chain)):
        return error
    ours = next((x for x in chain if isinstance(x, UnusableData)), None)
    if isinstance(ours, DamagedFile):
        return UnusableData(f"{where}: {path!r}, {ours}")
    if ours is not None:
        return UnusableData(f"{ours}, in {path!r}")
    return UnusableData(f"{where}: {path!r} cannot be read: {_reason(chain, path)}")


def _reason(chain: list[BaseException], path: str) -> str:
    if any(isinstance(error, UnicodeDecodeError) for error in chain):
        if reason := _undecodable(path):
            return reason
    message = " ".join(str(chain[-1]).split())
    if "zstd" in message and "not supported" in message or "zstandard" in message:
        return f"it is {ZSTANDARD}"
    return f"{type(chain[-1]).__name__}: {message}"


def _undecodable(path: str) -> str:
    """Return why a file is not UTF-8, with the number of a line; "" if it is UTF-8."""
    import fsspec

    try:
        file: Any
        with fsspec.open(path, "rb", compression="infer") as file:
            for number, line in enumerate(io.BufferedReader(file), 1):
                if number == 1 and (name := wide_encoding(line)):
                    return f"it is {name}: convert it to UTF-8"
                try:
                    line.decode()
                except UnicodeDecodeError as error:
                    byte = line[error.start]
                    return f"line {number} is not UTF-8 (byte 0x{byte:02x})"
    except (OSError, EOFError, ValueError):
        pass
    return ""
