"""Tables of some columns of JSON files."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from symjax.data.sources.columns import Request, is_text, unknown_column
from symjax.data.sources.errors import DamagedFile
from symjax.data.sources.formats import UnusableData
from symjax.data.sources.json_rows import Row, read_rows

if TYPE_CHECKING:
    import pyarrow

ROWS_PER_TABLE = 1000


def json_tables(builder: Any, request: Request) -> Any:
    """Return a function that yields tables of the columns of JSON files.

    A row may lack a column. A column is unknown if no row of a file, or of the files
    before it, has this column.
    """
    from datasets.builder import Key

    known: set[str] = set()

    def tables(files_iterables: Any, **_: Any) -> Iterator[tuple[Key, pyarrow.Table]]:
        number = itertools.count()
        for file in (file for files in files_iterables for file in files):
            first_keys: dict[str, None] = {}  # those of the first rows of the file
            for rows in _row_batches(file, builder.config):
                first_keys = first_keys or dict.fromkeys(
                    x for row in rows for x in row.values
                )
                missing = set(request.names) - known
                known.update(x for x in missing if any(x in row.values for row in rows))
                yield Key(0, next(number)), _json_table(builder, rows, request)
            for key, name in request.columns.items():
                if first_keys and name not in known:
                    raise UnusableData(unknown_column(key, name, list(first_keys)))

    return tables


def _row_batches(file: str, config: Any) -> Iterator[list[Row]]:
    """Yield the rows of a JSON file, up to ROWS_PER_TABLE at a time."""
    from datasets.utils.file_utils import xopen

    encoding = "utf-8-sig" if config.encoding == "utf-8" else config.encoding
    errors = config.encoding_errors
    lines: Any
    with xopen(file, "r", encoding=encoding, errors=errors, newline="\n") as lines:
        rows = read_rows(lines, config.field)
        while some := list(itertools.islice(rows, ROWS_PER_TABLE)):
            yield some


def _json_table(builder: Any, rows: list[Row], request: Request) -> pyarrow.Table:
    """Make a table of the columns of rows, with null for keys that a row lacks.

    Raises:
        UnusableData: a row has a key twice, or a text column holds another value.
    """
    import pyarrow

    arrays = {}
    for key, name in request.columns.items():
        for row in rows:
            if name in row.twice:
                raise DamagedFile(f"{row.place} has the key {name!r} twice")
        kind = builder.info.features[name]
        values = [row.values.get(name) for row in rows]
        if is_text(kind):
            arrays[name] = _text_array(values, rows, key, name)
        elif type(kind).__name__ == "Json":
            texts = [None if x is None else json.dumps(x) for x in values]
            arrays[name] = pyarrow.array(texts, pyarrow.string())
        else:
            arrays[name] = pyarrow.array(values)
    return builder._cast_table(pyarrow.table(arrays))


def _text_array(
    values: list[Any], rows: list[Row], key: str, name: str
) -> pyarrow.Array:
    import pyarrow

    for value, row in zip(values, rows, strict=True):
        if not isinstance(value, str | None):
            raise UnusableData(
                f"data.{key} {name!r} holds no text, but {type(value).__name__}, in "
                f"{row.place}"
            )
    try:
        return pyarrow.array(values, pyarrow.string())
    except (UnicodeEncodeError, pyarrow.ArrowInvalid):
        for value, row in zip(values, rows, strict=True):
            if value is not None and any("\ud800" <= x <= "\udfff" for x in value):
                raise DamagedFile(
                    f"{row.place} has half of a surrogate pair in {name!r}"
                ) from None
        raise
