"""Columns to read from a data set, as the configuration names them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from symjax.data.sources.formats import UnusableData

Columns = Mapping[str, str]  # columns to read, by their keys: {"column": "text"}


def check_column(key: str, column: str, known: Iterable[str]) -> None:
    """Raise if a column does not exist.

    Args:
        key: the configuration key that names the column: "column" or "label".
        known: the columns that exist.
    Raises:
        ValueError: it does not exist; the message lists the columns that exist.
    """
    known = list(known)
    if column not in known:
        raise UnusableData(unknown_column(key, column, known))


def unknown_column(key: str, column: str, known: list[str]) -> str:
    """Return the message about a column that does not exist."""
    return f"data.{key} {column!r} is unknown: choose from {', '.join(known)}"


def column_names(columns: Columns) -> list[str]:
    """Return the names of the columns to read, each once."""
    return list(dict.fromkeys(columns.values()))


def is_text(kind: Any) -> bool:
    """Return whether a column of this type holds text."""
    return getattr(kind, "dtype", "") in ("string", "large_string", "string_view")


class Request(NamedTuple):
    """The columns to read from a data set.

    Attributes:
        where: the name of the data set in messages.
        kind: the format, by the name of its builder.
    """

    columns: Columns
    where: str
    kind: str

    @property
    def names(self) -> list[str]:
        return column_names(self.columns)
