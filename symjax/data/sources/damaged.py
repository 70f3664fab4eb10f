"""Errors of files that cannot be read: one line with the file, the line and why."""

from __future__ import annotations

import io
from typing import Any

from symjax.data.sources.formats import ZSTANDARD, UnusableData
from symjax.data.sources.texts import wide_encoding


class DamagedFile(UnusableData):
    """Something is wrong inside a file, such as "line 3: …"; the file is not named."""


def is_silence(error: BaseException) -> bool:
    """Return whether an error is one of the connection, or of a server that is busy."""
    response = getattr(error, "response", None)
    if response is not None:
        return response.status_code == 429 or response.status_code >= 500
    library = type(error).__module__.partition(".")[0]
    return isinstance(error, ConnectionError | TimeoutError) or library.startswith(
        ("http", "aiohttp")
    )


def causes(error: BaseException) -> list[BaseException]:
    """Return an error and the errors before it, as a traceback would show them."""
    chain, cause = [], error
    while cause is not None:
        chain.append(cause)
        context = None if cause.__suppress_context__ else cause.__context__
        cause = cause.__cause__ or context
    return chain


def naming(error: Exception, path: str, where: str) -> Exception:
    """Return the error to raise for one that reading a file has raised.

    Args:
        where: the data set that the file is of, for messages: "data.name 'a'".
    """
    chain = causes(error)
    if any(map(is_silence, chain)):
        return error
    said = next((x for x in chain if isinstance(x, UnusableData)), None)
    if isinstance(said, DamagedFile):
        return UnusableData(f"{where}: {path!r}, {said}")
    if said is not None:
        return UnusableData(f"{said}, in {path!r}")
    return UnusableData(f"{where}: {path!r} cannot be read: {_reason(chain, path)}")


def _reason(chain: list[BaseException], path: str) -> str:
    if any(isinstance(error, UnicodeDecodeError) for error in chain):
        if found := _undecodable(path):
            return found
    said = " ".join(str(chain[-1]).split())
    if "zstd" in said and "not supported" in said or "zstandard" in said:
        return f"it is {ZSTANDARD}"
    return f"{type(chain[-1]).__name__}: {said}"


def _undecodable(path: str) -> str:
    """The first line of a file that is not UTF-8, and why; empty: there is none."""
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
