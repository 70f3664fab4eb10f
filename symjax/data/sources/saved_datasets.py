"""Folders that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from symjax.data.sources.columns import Columns, check_column, column_names
from symjax.data.sources.errors import error_with_path
from symjax.data.sources.formats import STATE, UnusableData
from symjax.data.store.manifest import stamp_of

SPLITS_FILE = "dataset_dict.json"  # lists the splits, each a folder


def is_saved(folder: str) -> bool:
    """Return whether `save_to_disk` wrote a folder."""
    one = Path(folder, STATE).is_file() and Path(folder, "dataset_info.json").is_file()
    return one or Path(folder, SPLITS_FILE).is_file()


class SavedDataset:
    """A data set that `save_to_disk` wrote. A single split is called "train".

    Attributes:
        names: the names of its splits.
        subset: "default" for every such data set.
        revision: a hash of the names, sizes and times of its files.
        files: the files that are read.
    """

    subset = "default"

    def __init__(self, folder: str, columns: Columns, where: str):
        self._columns, self._where, place = columns, where, Path(folder)
        self._folders = {"train": place}
        if (place / SPLITS_FILE).is_file():
            names = _json_value(place / SPLITS_FILE, "splits", where)
            self._folders = {name: place / name for name in names}
        self.names = list(self._folders)
        self._files = {name: self._arrow(path) for name, path in self._folders.items()}
        self.files = [str(path) for paths in self._files.values() for path in paths]
        read = {os.path.relpath(path, folder): Path(path) for path in self.files}
        self.revision = stamp_of(read)

    def _arrow(self, folder: Path) -> list[Path]:
        """Return the arrow files of the split in a folder."""
        found = _json_value(folder / STATE, "_data_files", self._where)
        files = [folder / file["filename"] for file in found]
        for path in files:
            if not path.is_file():
                raise UnusableData(f"{self._where}: {str(path)!r} is missing")
        return files

    def read(self, names: list[str], *, stream: bool = False) -> dict[str, Any]:
        """Return the rows of splits by name, as `Dataset`s that map the files.

        Args:
            names: the splits; others are not read.
            stream: return `IterableDataset`s.
        """
        import datasets

        found = {}
        for name in names:
            for path in self._files[name]:
                self._check(path)
            if not self._files[name]:
                raise UnusableData(f"{self._where} has no rows in split {name!r}")
            folder = str(self._folders[name])
            try:
                rows = datasets.Dataset.load_from_disk(folder)
            except Exception as error:
                raise error_with_path(error, folder, self._where) from None
            for key, column in self._columns.items():
                check_column(key, column, rows.column_names)
            rows = rows.select_columns(column_names(self._columns))
            found[name] = rows.to_iterable_dataset() if stream else rows
        return found

    def _check(self, path: Path) -> None:
        """Read a whole file, since mapping it would not notice damage.

        Raises:
            ValueError: the file is damaged.
        """
        import pyarrow

        try:
            with pyarrow.memory_map(str(path)) as file:
                pyarrow.ipc.open_stream(file).read_all()
        except Exception as error:
            raise error_with_path(error, str(path), self._where) from None


def _json_value(path: Path, key: str, where: str) -> Any:
    """Return the value of a key of a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise error_with_path(error, str(path), where) from None
