"""Builders of `datasets` that read the asked columns alone, and name a damaged file.

Other columns are not converted, so nothing in them can stop a read.
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

Columns = Mapping[str, str]  # the asked columns by their keys: {"column": "text"}

ROWS_PER_TABLE = 1000  # rows of JSON in a table


def check_column(key: str, column: str, known: Iterable[str]) -> None:
    """Raises: ValueError: there is no such column."""
    known = list(known)
    if column not in known:
        raise UnusableData(unknown_column(key, column, known))


def unknown_column(key: str, column: str, known: list[str]) -> str:
    """Return the message about a column that is not one of those there are."""
    return f"data.{key} {column!r} is unknown: choose from {', '.join(known)}"


def column_names(columns: Columns) -> list[str]:
    """Return the names of the asked columns, each once."""
    return list(dict.fromkeys(columns.values()))


def is_text(kind: Any) -> bool:
    """Return whether a column of this type holds text."""
    return getattr(kind, "dtype", "") in ("string", "large_string", "string_view")


def builder_options(kind: str, columns: Columns) -> dict[str, Any]:
    """Return the options with which `datasets` reads the columns of a format.

    In CSV no text stands for a missing value. What is prepared is found again by the
    options, so they tell the columns, in the description where nothing else does.
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
    """The types of the columns; all columns of CSV are text.

    Args:
        known: the types of all columns, where the data set has them.
    Raises:
        ValueError: they do not have the columns.
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
    asked = _Request(columns, where, builder.name)
    if builder.name == "text" and reader.config.encoding == "utf-8":
        reader.config.encoding = "utf-8-sig"
    if builder.name in ("csv", "json"):
        types = _types(builder.name, columns, builder.info.features)
        builder.info.features = reader.config.features = types
    if builder.name in ("parquet", "arrow"):
        reader._split_generators = _with_column_types(reader, asked)
    if builder.name == "arrow":
        cast = reader._cast_table
        reader._cast_table = lambda table: cast(table.select(asked.names))
    own = {"json": _json_tables, "csv": _csv_tables}
    if builder.name in ("text", "parquet", "arrow"):
        reader._generate_tables = _file_by_file(reader._generate_tables, asked)
    elif builder.name in own:
        reader._generate_tables = _file_by_file(own[builder.name](reader, asked), asked)


class _Request(NamedTuple):
    columns: Columns
    where: str
    kind: str

    @property
    def names(self) -> list[str]:
        return column_names(self.columns)


def _file_by_file(read: Any, asked: _Request) -> Any:
    """The tables of `read`, with errors that name their file."""
    from datasets.builder import Key

    def tables(**shards: Any) -> Iterator[tuple[Key, pyarrow.Table]]:
        for index in range(max(map(len, shards.values()))):
            one = {name: its[index : index + 1] for name, its in shards.items()}
            path = _path(one.get("base_files") or one["files"])
            if asked.kind in ("text", "csv", "json") and _is_empty(path):
                continue  # the folder it is in names it
            try:
                if os.path.isfile(path):
                    check_whole(Path(path))
                for key, table in read(**one):
                    if asked.kind in ("parquet", "arrow"):
                        table.validate(full=True)  # that texts are UTF-8
                    yield Key(index, key.item_or_batch_id), table
            except Exception as error:
                if _has_no_rows(error, path):
                    continue
                raise _error_with_path(error, path, asked) from None

    return tables


def _has_no_rows(error: Exception, path: str) -> bool:
    """Return whether an error is that of `datasets` for a parquet file without rows."""
    import pyarrow.parquet
    from datasets.utils.file_utils import xopen

    if "BatchSize must be greater than 0" not in str(error):
        return False
    with xopen(path, "rb") as file:
        return not pyarrow.parquet.read_metadata(file).num_rows


def _with_column_types(builder: Any, asked: _Request) -> Any:
    """Splits of a builder that knows the types of the asked columns, and no others."""
    generators = builder._split_generators

    def splits(manager: Any) -> list[Any]:
        import datasets
        import pyarrow

        types = builder.info.features
        if types is None:
            path = next(iter(builder.config.data_files.values()))[0]
            try:
                schema = _schema(path, asked.kind)
            except Exception as error:
                raise _error_with_path(error, path, asked) from None
            for key, name in asked.columns.items():
                check_column(key, name, schema.names)
            fields = [schema.field(name) for name in asked.names]
            only = pyarrow.schema(fields, schema.metadata)
            builder.info.features = datasets.Features.from_arrow_schema(only)
        else:
            for key, name in asked.columns.items():
                check_column(key, name, types)
            only = {name: types[name] for name in asked.names}
            builder.info.features = datasets.Features(only)
        return generators(manager)

    return splits


def _schema(path: str, kind: str) -> pyarrow.Schema:
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


def _csv_tables(builder: Any, asked: _Request) -> Any:
    """Tables of the asked columns of CSV files, as text."""
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
                        yield Key(0, next(number)), _csv_table(builder, rows, asked)
                except pandas.errors.ParserError as error:
                    raise _error_with_line(error, path, options) from None

    return tables


def _error_with_line(error: Exception, path: str, options: dict[str, Any]) -> Exception:
    """The error of a CSV file with the line that a row begins in.

    pandas counts rows, and a row with line ends inside quotes takes several lines.
    """
    from datasets.utils.file_utils import xopen

    said = str(error).strip()
    if found := re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", said):
        wanted, row, saw = map(int, found.groups())
        problem = f"{saw} fields, where {wanted} are expected"
    elif found := re.search(r"EOF inside string starting at row (\d+)", said):
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


def _csv_table(builder: Any, rows: pandas.DataFrame, asked: _Request) -> pyarrow.Table:
    import pandas
    import pyarrow

    # Where rows have more fields than the header, pandas takes the first as an index.
    shifted = not isinstance(rows.index, pandas.RangeIndex)
    if shifted and builder.config.index_col is None:
        if (rows.iloc[:, -1] == "").all():
            raise DamagedFile("its lines end with a delimiter, but the header does not")
        raise DamagedFile("its lines have more fields than the header")
    arrays = {}
    for key, name in asked.columns.items():
        check_column(key, name, map(str, rows.columns))
        texts = rows[name]
        if not is_text(builder.info.features[name]):
            texts = texts.replace("", None)
        arrays[name] = pyarrow.array(texts, pyarrow.string(), from_pandas=True)
    return builder._cast_table(pyarrow.table(arrays))


def _json_tables(builder: Any, asked: _Request) -> Any:
    """Tables of the asked keys of JSON files.

    A row may lack a key. A key is unknown if it is in no row of a file, nor in one of
    the files before.
    """
    from datasets.builder import Key

    known: set[str] = set()

    def tables(files_iterables: Any, **_: Any) -> Iterator[tuple[Key, pyarrow.Table]]:
        number = itertools.count()
        for file in (file for files in files_iterables for file in files):
            shown: dict[str, None] = {}  # the keys of its first rows
            for rows in _row_batches(file, builder.config):
                shown = shown or dict.fromkeys(x for row in rows for x in row.values)
                missing = set(asked.names) - known
                known.update(x for x in missing if any(x in row.values for row in rows))
                yield Key(0, next(number)), _json_table(builder, rows, asked)
            for key, name in asked.columns.items():
                if shown and name not in known:
                    raise UnusableData(unknown_column(key, name, list(shown)))

    return tables


def _row_batches(file: str, config: Any) -> Iterator[list[Row]]:
    """The rows of a JSON file, so many at a time that tables stay small."""
    from datasets.utils.file_utils import xopen

    encoding = "utf-8-sig" if config.encoding == "utf-8" else config.encoding
    errors = config.encoding_errors
    lines: Any
    with xopen(file, "r", encoding=encoding, errors=errors, newline="\n") as lines:
        rows = read_rows(lines, config.field)
        while some := list(itertools.islice(rows, ROWS_PER_TABLE)):
            yield some


def _json_table(builder: Any, rows: list[Row], asked: _Request) -> pyarrow.Table:
    """A table of the asked keys of rows; null where a row lacks one.

    Raises:
        UnusableData: a row has a key twice, or no text under the key for it.
    """
    import pyarrow

    arrays = {}
    for key, name in asked.columns.items():
        for row in rows:
            if name in row.twice:
                raise DamagedFile(f"{row.place} has the key {name!r} twice")
        kind = builder.info.features[name]
        values = [row.values.get(name) for row in rows]
        if is_text(kind):
            arrays[name] = _text_array(values, rows, key, name)
        elif type(kind).__name__ == "Json":
            said = [None if x is None else json.dumps(x) for x in values]
            arrays[name] = pyarrow.array(said, pyarrow.string())
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
    """The path of the one file of a list, without what says how it is compressed."""
    return str(files[0]).rpartition("::")[2]


def _is_empty(path: str) -> bool:
    return os.path.isfile(path) and not os.path.getsize(path)


def _error_with_path(error: Exception, path: str, asked: _Request) -> Exception:
    """The error to raise for one of a file, which may be that a column is missing."""
    if asked.kind == "parquet" and "No match for FieldRef" in str(error):
        known = _schema(path, asked.kind).names
        key = next(x for x, name in asked.columns.items() if name not in known)
        error = UnusableData(unknown_column(key, asked.columns[key], known))
    return error_with_path(error, path, asked.where)
