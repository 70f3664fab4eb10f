"""Tables of some columns of CSV files, as text."""

from __future__ import annotations

import csv
import itertools
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from symjax.data.sources.columns import Request, check_column, is_text
from symjax.data.sources.errors import DamagedFile

if TYPE_CHECKING:
    import pandas
    import pyarrow


def csv_tables(builder: Any, request: Request) -> Any:
    """Return a function that yields tables of the columns of CSV files, as text."""
    import pandas
    from datasets.builder import Key
    from datasets.utils.file_utils import xopen

    def tables(files_iterables: Any, **_: Any) -> Iterator[tuple[Key, pyarrow.Table]]:
        number, options = itertools.count(), builder.config.pd_read_csv_kwargs
        options |= {"dtype": str, "compression": None, "iterator": True}
        for path in (path for files in files_iterables for path in files):
            file: Any
            with xopen(path, "rb") as file:
                try:
                    for rows in pandas.read_csv(file, **options):
                        yield Key(0, next(number)), _csv_table(builder, rows, request)
                except pandas.errors.ParserError as error:
                    raise _error_with_line(error, path, options) from None

    return tables


def _error_with_line(error: Exception, path: str, options: dict[str, Any]) -> Exception:
    """Return the error of a CSV file with the line in which the wrong row begins.

    The error of pandas has the number of the row. A row has several lines if there are
    line ends inside quotes.
    """
    from datasets.utils.file_utils import xopen

    message = str(error).strip()
    if found := re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", message):
        wanted, row, saw = map(int, found.groups())
        problem = f"{saw} fields, where {wanted} are expected"
    elif found := re.search(r"EOF inside string starting at row (\d+)", message):
        row, problem = int(found[1]) + 1, "a quote opens that is not closed"
    else:
        return error
    names = "delimiter", "quotechar", "escapechar", "doublequote", "quoting"
    dialect = {"delimiter": options["sep"], **options}
    known = {name: dialect[name] for name in names if dialect.get(name) is not None}
    limit = csv.field_size_limit(sys.maxsize)
    lines: Any
    try:
        encoding = options.get("encoding") or "utf-8"
        with xopen(path, "r", encoding=encoding, newline="") as lines:
            rows, line = csv.reader(lines, **known), 1
            for _ in itertools.islice(rows, row - 1):
                line = rows.line_num + 1
    finally:
        csv.field_size_limit(limit)
    return DamagedFile(f"line {line}: {problem}")


def _csv_table(builder: Any, rows: pandas.DataFrame, request: Request) -> pyarrow.Table:
    """Make a table of the columns of rows."""
    import pandas
    import pyarrow

    # If rows have more fields than the header, pandas takes the first field as index.
    shifted = not isinstance(rows.index, pandas.RangeIndex)
    if shifted and builder.config.index_col is None:
        if (rows.iloc[:, -1] == "").all():
            raise DamagedFile("its lines end with a delimiter, but the header does not")
        raise DamagedFile("its lines have more fields than the header")
    arrays = {}
    for key, name in request.columns.items():
        check_column(key, name, map(str, rows.columns))
        texts = rows[name]
        if not is_text(builder.info.features[name]):
            texts = texts.replace("", None)
        arrays[name] = pyarrow.array(texts, pyarrow.string(), from_pandas=True)
    return builder._cast_table(pyarrow.table(arrays))
