"""Data sets of the Hugging Face hub, and local folders in the same formats."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from symjax import config
from symjax.data import splits
from symjax.data.formats import Refused
from symjax.data.opening import is_silence, one_line, opened, quiet
from symjax.data.progress import bar
from symjax.data.texts import Document, Texts

if TYPE_CHECKING:
    from datasets import DatasetBuilder

HELDOUT = ("validation", "test")  # the first of them that there is
ROWS = 256  # read at a time
PAUSES = (1, 2, 4, 8, 16)  # seconds before each attempt at a stream that breaks


def load(options: config.Data) -> tuple[Texts, dict[str, Any]]:
    """The texts of one column, and what identifies them.

    The data set's own validation split is held out, else its test split, else rows by
    the sha256 of their text. Other splits than train are not used, unless there is only
    one. Rows without text are left out. A text file is one row; its line ends become
    newlines.

    Returns:
        the rows, which stay on disk; and name, subset, column, revision (of
        a folder: a hash of its files' names, sizes and times) and splits read.
    Raises:
        ValueError: the hub is silent, or there is no such data set, subset, column or
            text in it; the message names what there is.
    """
    found, facts, where, kept = read(options, lambda rows: _Texts(rows, options.column))

    def documents(_: DatasetBuilder = kept) -> Iterator[Document]:
        return ((text,) for texts in found.values() for text in texts)

    if len(found) == 1:
        [rows] = found.values()
        scanned = []
        with bar(len(rows), "reading", " rows") as shown:
            for text in rows:
                scanned.append(splits.scan([text]))
                shown.update()
        return splits.by_content(documents, scanned, where, "rows"), facts
    sizes = [np.array([len(text) for text in texts]) for texts in found.values()]
    held = np.repeat([False, True], [len(own) for own in sizes])
    return Texts(documents, held, int(sum(own.sum() for own in sizes))), facts


def revision(options: config.Data) -> str:
    """What a data set is at: its commit on the hub."""
    with opened(options) as (builder, _):
        return builder.hash or ""


def streams(
    options: config.Data, revision: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rows of the training split and of the held-out one, if there is one, by name,
    not read yet; and what identifies them.

    Args:
        revision: of `revision`; the rows are those, wherever the data set is at since.
    """
    with opened(options, revision) as (builder, where):
        found = builder.as_streaming_dataset()
        names = [name for name in _choose(list(map(str, found)), where) if name]
        facts = _facts(options, builder, names)
        return {name: found[name] for name in names}, facts


def stream(
    options: config.Data, rows: Any, state: dict[str, Any] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The texts of a split of `streams`, each with the state that is to be given to go
    on after it. Where the connection breaks it is taken up again.

    Raises:
        ValueError: the data set has no such column, or cannot be read.
    """
    failed = 0
    with quiet(), one_line(f"data.name {options.name!r}"):
        while True:
            rows.load_state_dict(state)
            try:
                for row in rows:
                    state, failed = rows.state_dict(), 0
                    if text := _text(row, options.column):
                        yield text, rows.state_dict()
                return
            except Exception as error:
                if failed == len(PAUSES) or not is_silence(error):
                    raise
                print(
                    f"data.name {options.name!r} broke off ({type(error).__name__}): "
                    f"going on after it in {PAUSES[failed]} s",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(PAUSES[failed])
            failed += 1


def _text(row: dict[str, Any], column: str) -> str | None:
    if column not in row:
        known = ", ".join(row)
        raise Refused(f"data.column {column!r} is unknown: choose from {known}")
    if not isinstance(row[column], str | None):
        kind = type(row[column]).__name__
        raise Refused(f"data.column {column!r} holds no text, but {kind}")
    return row[column]


def read(
    options: config.Data, read: Callable[[Any], Any]
) -> tuple[dict[str, Any], dict[str, Any], str, DatasetBuilder]:
    """read(rows) of the training split and of the held-out one, if there is one, by
    name; what identifies them; what to call them in messages; and what keeps the rows
    of a folder on disk, as long as it lives."""
    with opened(options) as (builder, where):
        builder.download_and_prepare()
        train, heldout = _choose(list(builder.info.splits or ()), where)
        found = {}
        for split in (train, heldout) if heldout else (train,):
            found[split] = read(builder.as_dataset(split=split))
            if not found[split]:
                raise Refused(f"{where} has no text in split {split!r}")
        facts = _facts(options, builder, list(found))
    return found, facts, where, builder


def _facts(
    options: config.Data, builder: DatasetBuilder, read: list[str]
) -> dict[str, Any]:
    """What identifies a data set of which some splits are read."""
    return {
        "name": options.name,
        "subset": builder.config.name.removesuffix("-sample_by=document"),
        "column": options.column,
        "revision": builder.hash,
        "splits": read,
    }


def _choose(names: list[str], where: str) -> tuple[str, str]:
    """The splits to train on and to hold out; "" if rows have to be held out."""
    if len(names) == 1:
        return names[0], ""
    if "train" not in names:
        raise Refused(f"{where} has no split 'train', only {', '.join(names)}")
    return "train", next((name for name in HELDOUT if name in names), "")


class _Texts:
    """The column of a `Dataset` on disk, without rows that have no text."""

    def __init__(self, rows: Any, column: str):
        kind = kind_of(rows, "column", column)
        if not is_text(kind):
            raise Refused(f"data.column {column!r} holds no text, but {kind}")
        self._rows, self._column = rows.select_columns(column), column

    def __iter__(self) -> Iterator[str]:
        for batch in self._rows.iter(ROWS):
            yield from filter(None, batch[self._column])

    def __len__(self) -> int:
        """Of all rows, also those without text."""
        return len(self._rows)

    def __bool__(self) -> bool:
        return next(iter(self), None) is not None


def kind_of(rows: Any, key: str, column: str) -> Any:
    """Raises: ValueError: there is no such column."""
    if column not in rows.column_names:
        known = ", ".join(rows.column_names)
        raise Refused(f"data.{key} {column!r} is unknown: choose from {known}")
    return rows.features[column]


def is_text(kind: Any) -> bool:
    return getattr(kind, "dtype", "") in ("string", "large_string")
