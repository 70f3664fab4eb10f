"""Folders that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from symjax.data.sources.columns import Columns, check_known, names_of
from symjax.data.sources.damaged import naming
from symjax.data.sources.formats import STATE, UnusableData
from symjax.data.store.manifest import stamp_of

SPLITS = "dataset_dict.json"  # names the splits, each a folder


def is_saved(folder: str) -> bool:
    """Return whether a folder is one of `save_to_disk`."""
    one = Path(folder, STATE).is_file() and Path(folder, "dataset_info.json").is_file()
    return one or Path(folder, SPLITS).is_file()


class Saved:
    """A saved data set whose splits can be read; a single one is called "train".

    Attributes:
        names: of its splits.
        subset: a name that all of them have.
        revision: a hash of the names, sizes and times of its files.
        files: those that are read.
    """

    subset = "default"

    def __init__(self, folder: str, columns: Columns, where: str):
        self._columns, self._where, place = columns, where, Path(folder)
        self._folders = {"train": place}
        if (place / SPLITS).is_file():
            names = _described(place / SPLITS, "splits", where)
            self._folders = {name: place / name for name in names}
        self.names = list(self._folders)
        self._files = {name: self._arrow(path) for name, path in self._folders.items()}
        self.files = [str(path) for its in self._files.values() for path in its]
        read = {os.path.relpath(path, folder): Path(path) for path in self.files}
        self.revision = stamp_of(read)

    def _arrow(self, folder: Path) -> list[Path]:
        found = _described(folder / STATE, "_data_files", self._where)
        files = [folder / file["filename"] for file in found]
        for path in files:
            if not path.is_file():
                raise UnusableData(f"{self._where}: {str(path)!r} is missing")
        return files

    def read(self, names: list[str], *, stream: bool = False) -> dict[str, Any]:
        """The rows of splits, `Dataset`s or `IterableDataset`s, on the disk as they
        are. Other splits are not read."""
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
                raise naming(error, folder, self._where) from None
            for key, column in self._columns.items():
                check_known(key, column, rows.column_names)
            rows = rows.select_columns(names_of(self._columns))
            found[name] = rows.to_iterable_dataset() if stream else rows
        return found

    def _check(self, path: Path) -> None:
        """Raises: ValueError: the file is damaged; its rows are mapped, not read."""
        import pyarrow

        try:
            with pyarrow.memory_map(str(path)) as file:
                pyarrow.ipc.open_stream(file).read_all()
        except Exception as error:
            raise naming(error, str(path), self._where) from None


def _described(path: Path, key: str, where: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise naming(error, str(path), where) from None
