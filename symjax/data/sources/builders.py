"""Builders of `datasets` that read only some columns, and name a damaged file.

Other columns are not converted, so their content cannot raise an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from symjax.data.sources.columns import (
    Columns,
    Request,
    check_column,
    column_names,
    unknown_column,
)
from symjax.data.sources.csv_tables import csv_tables
from symjax.data.sources.errors import error_with_path
from symjax.data.sources.formats import UnusableData
from symjax.data.sources.json_tables import json_tables
from symjax.data.sources.zstd import check_whole

if TYPE_CHECKING:
    import pyarrow
    from datasets import DatasetBuilder, Features


def builder_options(kind: str, columns: Columns) -> dict[str, Any]:
    """Return the options with which `datasets` reads columns of a format.

    In a CSV file, a text such as "NA" is not taken for a missing value. `datasets`
    reuses files that it has prepared with equal options, so the options name the
    columns. For CSV and JSON the description names them.

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
    """The types of the columns to read.

    Args:
        known: the types of all columns. Without them columns are text, except that
            labels in JSON files may be any values.
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
    """Make a builder read only these columns.

    Args:
        builder: a builder that was made with the options of `builder_options`.
        where: the name of the data set in messages, such as "data.name 'a'".
    """
    reader: Any = builder
    request = Request(columns, where, builder.name)
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
    own = {"json": json_tables, "csv": csv_tables}
    if builder.name in ("text", "parquet", "arrow"):
        reader._generate_tables = _file_by_file(reader._generate_tables, request)
    elif builder.name in own:
        reader._generate_tables = _file_by_file(
            own[builder.name](reader, request), request
        )


def _file_by_file(read: Any, request: Request) -> Any:
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


def _with_column_types(builder: Any, request: Request) -> Any:
    """Return the `_split_generators` of a builder, changed to set column types first.

    Only the columns to read have types.
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


def _path(files: Any) -> str:
    """The path of the first file of a list, without the prefix for its compression."""
    return str(files[0]).rpartition("::")[2]


def _is_empty(path: str) -> bool:
    """Return whether a local file is empty."""
    return os.path.isfile(path) and not os.path.getsize(path)


def _error_with_path(error: Exception, path: str, request: Request) -> Exception:
    """Return an error with the path of its file, or about a missing column."""
    if request.kind == "parquet" and "No match for FieldRef" in str(error):
        known = _schema(path, request.kind).names
        key = next(x for x, name in request.columns.items() if name not in known)
        error = UnusableData(unknown_column(key, request.columns[key], known))
    return error_with_path(error, path, request.where)
