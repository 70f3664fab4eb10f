"""Builders of `datasets` that read only some columns, and name a damaged file.

Other columns are not converted, so their content cannot raise an error.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from symjax.data.sources.errors import DamagedFile, error_with_path
from symjax.data.sources.formats import UnusableData
from symjax.data.sources.json_rows import Row, read_rows
from symjax.data.sources.zstd import check_whole

if TYPE_CHECKING:
    import pandas
    import pyarrow
    from datasets import DatasetBuilder, Features

Columns = Mapping[str, str]  # columns to read, by their keys: {"column": "text"}

ROWS_PER_TABLE = 1000  # of JSON files


def check_column(key: str, column: str, known: Iterable[str]) -> None:
    """Raise if a column does not exist.

    Args:
        key: the configuration key that names the column: "column" or "label".
        known: the columns that exist.
    Raises:
        ValueError: the message lists the columns that exist.
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


def builder_options(kind: str, columns: Columns) -> dict[str, Any]:
    """Return the options with which `datasets` reads columns of a format.

    No text in a CSV file means a missing value. `datasets` finds prepared files by
    their options. So the options contain the columns, if need be as a description.

    Args:
        kind: the format, by the name of its builder.
    """
    names = column_names(columns)
    described = {"description": f"columns {', '.join(names)}"}
    options = {
        "text": {"sample_by": "document"},
        "parquet": {"columns": names},
        "csv": {**described, "keep_default_na": False},
        "json": described,
    }
    return options.get(kind, {})


def _types(kind: str, columns: Columns, known: Features | None) -> Features:
    """The types of the columns to read; all columns of CSV are text.

    Args:
        known: the types of all columns, if the data set has them.
    Raises:
        ValueError: a column does not exist.
    """
    import datasets

    label = datasets.Json() if kind == "json" else datasets.Value("string")
    usual = {"column": datasets.Value("string"), "label": label}
    types = {}
    for key, name in columns.items():
        if known:
            check_column(key, name, known)
        types[name] = known[name] if known else usual[key]
    return datasets.Features(types)


def restrict_columns(builder: DatasetBuilder, columns: Columns, where: str) -> None:
    """Make a builder read these columns alone.

    Args:
        builder: a builder that was made with the options of `builder_options`.
        where: the name of the data set in messages, such as "data.name 'a'".
    """
    reader: Any = builder
    request = _Request(columns, where, builder.name)
    if builder.name == "text" and reader.config.encoding == "utf-8":
        reader.config.encoding = "utf-8-sig"
    if builder.name in ("csv", "json"):
        types = _types(builder.name, columns, builder.info.features)
        builder.info.features = reader.config.features = types
    if builder.name in ("parquet", "arrow"):
        reader._split_generators = _with_column_types(reader, request)
    if builder.name == "arrow":
        cast = reader._cast_table
        reader._cast_table = lambda table: cast(table.select(request.names))
    own = {"json": _json_tables, "csv": _csv_tables}
    if builder.name in ("text", "parquet", "arrow"):
        reader._generate_tables = _file_by_file(reader._generate_tables, request)
    elif builder.name in own:
        reader._generate_tables = _file_by_file(
            own[builder.name](reader, request), request
        )


class _Request(NamedTuple):
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


def _file_by_file(read: Any, request: _Request) -> Any:
    """Return `read` with errors that name the file.

    Args:
        read: the method of a builder that yields the tables of files.
    """
    from datasets.builder import Key

    def tables(**shards: Any) -> Iterator[tuple[Key, pyarrow.Table]]:
        for index in range(max(map(len, shards.values()))):
            file = {name: files[index : index + 1] for name, files in shards.items()}
            path = _path(file.get("base_files") or file["files"])
            if request.kind in ("text", "csv", "json") and _is_empty(path):
                continue  # `formats.add_unread` counts empty files
            try:
                if os.path.isfile(path):
                    check_whole(Path(path))
                for key, table in read(**file):
                    if request.kind in ("parquet", "arrow"):
                        table.validate(full=True)  # checks that texts are UTF-8
                    yield Key(index, key.item_or_batch_id), table
            except Exception as error:
                if _has_no_rows(error, path):
                    continue
                raise _error_with_path(error, path, request) from None

    return tables


def _has_no_rows(error: Exception, path: str) -> bool:
    """Return whether an error is from a parquet file without rows."""
    import pyarrow.parquet
    from datasets.utils.file_utils import xopen

    if "BatchSize must be greater than 0" not in str(error):
        return False
    with xopen(path, "rb") as file:
        return not pyarrow.parquet.read_metadata(file).num_rows


def _with_column_types(builder: Any, request: _Request) -> Any:
    """Return the `_split_generators` of a builder, which first sets its column types.

    They are the types of the columns to read, and of no others.
    """
    generators = builder._split_generators

    def splits(manager: Any) -> list[Any]:
        import datasets
        import pyarrow

        types = builder.info.features
        if types is None:
            path = next(iter(builder.config.data_files.values()))[0]
            try:
                schema = _schema(path, request.kind)
            except Exception as error:
                raise _error_with_path(error, path, request) from None
            for key, name in request.columns.items():
                check_column(key, name, schema.names)
            fields = [schema.field(name) for name in request.names]
            only = pyarrow.schema(fields, schema.metadata)
            builder.info.features = datasets.Features.from_arrow_schema(only)
        else:
            for key, name in request.columns.items():
                check_column(key, name, types)
            only = {name: types[name] for name in request.names}
            builder.info.features = datasets.Features(only)
        return generators(manager)

    return splits


def _schema(path: str, kind: str) -> pyarrow.Schema:
    """Read the schema of a parquet or arrow file."""
    import pyarrow
    import pyarrow.parquet
    from datasets.utils.file_utils import xopen

    with xopen(path, "rb") as file:
        if kind == "parquet":
            return pyarrow.parquet.read_schema(file)
        try:
            return pyarrow.ipc.open_stream(file).schema
        except (OSError, pyarrow.ArrowInvalid):
            return pyarrow.ipc.open_file(file).schema


def _csv_tables(builder: Any, request: _Request) -> Any:
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
    """Return the error of a CSV file with the line in which a row begins.

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


def _csv_table(
    builder: Any, rows: pandas.DataFrame, request: _Request
) -> pyarrow.Table:
    """Make a table of the columns of rows."""
    import pandas
    import pyarrow

    # If rows have more fields than the header, pandas takes the first as an index.
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


def _json_tables(builder: Any, request: _Request) -> Any:
    """Return a function that yields tables of the columns of JSON files.

    A row may lack a column. A column is unknown if no row of a file has it, and no row
    of an earlier file.
    """
    from datasets.builder import Key

    known: set[str] = set()

    def tables(files_iterables: Any, **_: Any) -> Iterator[tuple[Key, pyarrow.Table]]:
        number = itertools.count()
        for file in (file for files in files_iterables for file in files):
            shown: dict[str, None] = {}  # the keys of its first rows
            for rows in _row_batches(file, builder.config):
                shown = shown or dict.fromkeys(x for row in rows for x in row.values)
                missing = set(request.names) - known
                known.update(x for x in missing if any(x in row.values for row in rows))
                yield Key(0, next(number)), _json_table(builder, rows, request)
            for key, name in request.columns.items():
                if shown and name not in known:
                    raise UnusableData(unknown_column(key, name, list(shown)))

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


def _json_table(builder: Any, rows: list[Row], request: _Request) -> pyarrow.Table:
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


def _path(files: Any) -> str:
    """The path of the first file of a list, without the prefix for its compression."""
    return str(files[0]).rpartition("::")[2]


def _is_empty(path: str) -> bool:
    """Return whether a local file is empty."""
    return os.path.isfile(path) and not os.path.getsize(path)


def _error_with_path(error: Exception, path: str, request: _Request) -> Exception:
    """Return an error with the path of its file, or about a missing column."""
    if request.kind == "parquet" and "No match for FieldRef" in str(error):
        known = _schema(path, request.kind).names
        key = next(x for x, name in request.columns.items() if name not in known)
        error = UnusableData(unknown_column(key, request.columns[key], known))
    return error_with_path(error, path, request.where)
