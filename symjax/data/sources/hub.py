"""Data sets of the Hugging Face hub, and local folders in the same formats.

`load` returns the texts of a data set that is downloaded or local. `open_streams` and
`streamed_texts` read a data set row by row while it is packed.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from symjax import config
from symjax.data.progress import bar
from symjax.data.sources import splits
from symjax.data.sources.columns import check_column, is_text
from symjax.data.sources.errors import is_connection_error
from symjax.data.sources.formats import UnusableData
from symjax.data.sources.left_out import LeftOut
from symjax.data.sources.opening import (
    OpenedDataset,
    errors_in_one_line,
    message_name,
    open_dataset,
    quiet_libraries,
)
from symjax.data.sources.saved_datasets import SavedDataset
from symjax.data.sources.texts import Document, Texts

HELDOUT = ("validation", "test")  # the first of these that exists is held out
ROWS_AT_ONCE = 256
PAUSES = (1, 2, 4, 8, 16)  # seconds before each new attempt after a broken connection


def load(options: config.Data) -> tuple[Texts, dict[str, Any]]:
    """Load the texts of one column of a data set.

    The validation split is held out, or else the test split. If the data set has only
    one split, rows are held out by the sha256 of their text. Other splits are not used.
    Rows without text are left out. A text file is one row; its line ends become
    newlines.

    Returns:
        the texts, which stay on disk; and plain values that identify them: name,
        subset, column, revision (the commit on the hub; for a folder, a hash of the
        names and times of its files) and the splits that are read.
    Raises:
        ValueError: the hub does not answer, or there is no such data set, subset or
            column, or no text in it. The message lists the names that exist.
    """
    left_out = LeftOut()

    def texts(rows: Any, split: str) -> _TextColumn:
        return _TextColumn(rows, options.column, split)

    found, facts, kept = read_splits(options, texts)

    # The default value keeps the data set alive: its files are deleted with it.
    def documents(_: OpenedDataset | SavedDataset = kept) -> Iterator[Document]:
        return ((text,) for texts in found.values() for text in texts)

    if len(found) == 1:
        [rows] = found.values()
        scanned = []
        with bar(len(rows), "reading", " rows") as progress:
            for text in rows.counting(left_out):
                scanned.append(splits.hash_and_size([text]))
                progress.update()
        left_out.say(message_name(options))
        return splits.held_out_by_content(
            documents, scanned, message_name(options), "rows"
        ), facts
    sizes = [
        np.array([len(text) for text in column.counting(left_out)])
        for column in found.values()
    ]
    left_out.say(message_name(options))
    held = np.repeat([False, True], [len(size) for size in sizes])
    return Texts(documents, held, int(sum(size.sum() for size in sizes))), facts


def revision(options: config.Data) -> str:
    """Return the commit of a data set on the hub."""
    with open_dataset(options, columns_of(options)) as found:
        return found.revision


def open_streams(
    options: config.Data, revision: str
) -> tuple[list[Any], dict[str, Any]]:
    """Open the training split and, if there is one, the held-out split as streams.

    Args:
        revision: the commit to read, as `revision` returned it.
    Returns:
        the streams of rows, and plain values that identify the data set.
    """
    with open_dataset(options, columns_of(options), revision) as found:
        names = _chosen_splits(options, found.names)
        rows = found.read(names, stream=True)
        return list(rows.values()), _identity(options, found, names)


def streamed_texts(
    options: config.Data,
    rows: Any,
    state: dict[str, Any] | None = None,
    left_out: LeftOut | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the texts of a split, each with the state from which to continue after it.

    If the connection breaks, it is opened again after the last row that was read. If
    this fails len(PAUSES) times without a new row, the error is raised.

    Args:
        rows: a split that `open_streams` returned.
        state: the state from which to continue; None for the beginning.
        left_out: counts rows without text.
    Raises:
        ValueError: the data set has no such column, or cannot be read.
    """
    failed, number = 0, 0
    resumed = " since the stream was resumed" if state else ""
    with quiet_libraries(), errors_in_one_line(options):
        while True:
            rows.load_state_dict(
                _counted_from_file_start(state) if rows.features else state
            )
            try:
                for row in rows:
                    state, failed, number = rows.state_dict(), 0, number + 1
                    if text := _text(row, options.column):
                        yield text, rows.state_dict()
                    elif left_out is not None:
                        kind = f"rows without text in {options.column!r}"
                        left_out.add(kind, f"row {number}{resumed}")
                return
            except Exception as error:
                if failed == len(PAUSES) or not is_connection_error(error):
                    raise
                print(
                    f"{message_name(options)} lost its connection "
                    f"({type(error).__name__}): continuing in {PAUSES[failed]} s",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(PAUSES[failed])
            failed += 1


def _counted_from_file_start(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a stream's state that counts rows from the beginning of a file.

    `datasets` counts rows from the beginning of a table, so its states are valid for
    one size of tables only. Older versions of symjax had another size.
    """
    outer = (state or {}).get("examples_iterable", {})
    inner = outer.get("examples_iterable", {})
    kinds = outer.get("type"), inner.get("type")
    if kinds != ("RebatchedArrowExamplesIterable", "ArrowExamplesIterable"):
        return state
    table = outer["previous_state"] or inner
    rows = table["shard_example_idx"] + outer["num_chunks_since_previous_state"]
    begin = {**table, "shard_example_idx": 0}
    outer = {**outer, "examples_iterable": begin, "previous_state": begin}
    outer["num_chunks_since_previous_state"] = rows
    return {**(state or {}), "examples_iterable": outer}


def _text(row: dict[str, Any], column: str) -> str | None:
    """Return the text of a row, or None."""
    check_column("column", column, row)
    if not isinstance(row[column], str | None):
        kind = type(row[column]).__name__
        raise UnusableData(f"data.column {column!r} holds no text, but {kind}")
    return row[column]


def read_splits(
    options: config.Data, convert: Callable[[Any, str], Any]
) -> tuple[dict[str, Any], dict[str, Any], OpenedDataset | SavedDataset]:
    """Convert the rows of the training split and, if there is one, the held-out split.

    Args:
        convert: (rows, split) → the value of a split.
    Returns:
        the values by split, plain values that identify the data set, and the opened
        data set. Keep this object as long as the rows: their files may be deleted with
        it.
    """
    with open_dataset(options, columns_of(options)) as source:
        names = _chosen_splits(options, source.names)
        found = {}
        for split, rows in source.read(names).items():
            found[split] = convert(rows, split)
            if not found[split]:
                raise UnusableData(
                    f"{message_name(options)} has no text in split {split!r}"
                )
        return found, _identity(options, source, names), source


def columns_of(options: config.Data) -> dict[str, str]:
    """The columns to read, by the configuration keys that name them."""
    columns = {"column": options.column}
    return columns | ({"label": options.label} if options.label else {})


def _identity(
    options: config.Data, source: OpenedDataset | SavedDataset, read: list[str]
) -> dict[str, Any]:
    """Plain values that identify the splits `read` of a data set."""
    return {
        "name": options.name,
        "subset": source.subset,
        "column": options.column,
        "revision": source.revision,
        "splits": read,
    }


def _chosen_splits(options: config.Data, names: list[str]) -> list[str]:
    """Choose the split to train on and, if there is one, the split to hold out.

    A line about the splits that are left out is printed.
    """
    if len(names) == 1:
        return names
    if "train" not in names:
        only = ", ".join(names)
        raise UnusableData(f"{message_name(options)} has no split 'train', only {only}")
    chosen = ["train", *[name for name in HELDOUT if name in names][:1]]
    left_out = LeftOut()
    for name in names:
        if name not in chosen:
            left_out.add("splits", repr(name))
    left_out.say(message_name(options))
    return chosen


class _TextColumn:
    """The texts of a column of a `Dataset` on disk, without rows that have no text."""

    def __init__(self, rows: Any, column: str, split: str):
        check_column("column", column, rows.column_names)
        kind = rows.features[column]
        if not is_text(kind):
            raise UnusableData(f"data.column {column!r} holds no text, but {kind}")
        self._rows, self._column = rows.select_columns(column), column
        self._split = split

    def __iter__(self) -> Iterator[str]:
        for batch in self._rows.iter(ROWS_AT_ONCE):
            yield from filter(None, batch[self._column])

    def counting(self, left_out: LeftOut) -> Iterator[str]:
        """Yield the texts, and count the rows without text."""
        batches = (batch[self._column] for batch in self._rows.iter(ROWS_AT_ONCE))
        for number, text in enumerate(itertools.chain.from_iterable(batches), 1):
            if text:
                yield text
            else:
                kind = f"rows without text in {self._column!r}"
                left_out.add(kind, f"row {number} of {self._split!r}")

    def __len__(self) -> int:
        """Number of rows, including those without text."""
        return len(self._rows)

    def __bool__(self) -> bool:
        return next(iter(self), None) is not None
