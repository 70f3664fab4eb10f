"""Opening of data sets of the hub and of local folders, with errors in one line.

If the hub does not answer the first request within ANSWER_SECONDS, the error says what
to do. Later requests have the limits of huggingface_hub: six attempts each, and
HF_HUB_DOWNLOAD_TIMEOUT seconds (10) without a byte.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from symjax import config
from symjax.data.sources.builders import builder_options, restrict_columns
from symjax.data.sources.columns import Columns
from symjax.data.sources.errors import causes, is_connection_error
from symjax.data.sources.formats import (
    UnusableData,
    add_unread,
    check_all_read,
    check_one_format,
    check_splits_recognised,
    data_files,
    in_capitals,
    table_format,
)
from symjax.data.sources.left_out import LeftOut
from symjax.data.sources.saved_datasets import SavedDataset, is_saved
from symjax.data.store.manifest import stamp_of

if TYPE_CHECKING:
    from datasets import DatasetBuilder

ANSWER_SECONDS = 10.0
FOLDER = "a local folder of parquet, json or text files"


class OpenedDataset:
    """A data set that was opened with a builder of `datasets`.

    Attributes:
        names: the names of its splits.
        subset: the name of the subset that was opened.
        revision: its commit on the hub; for a folder, a hash of the names and times of
            its files.
    """

    def __init__(
        self, builder: DatasetBuilder, columns: Columns, where: str, *, own: bool
    ):
        """
        Args:
            own: whether only symjax uses the files that `datasets` prepares. They may
                then lack splits and columns that symjax does not read.
        """
        self._builder, self._own, self._where = builder, own, where
        if own:
            restrict_columns(builder, columns, where)
        files = builder.config.data_files or {}
        self.names = list(map(str, files or builder.info.splits or ()))
        self.subset = builder.info.config_name or builder.config.name
        self.revision = builder.hash or ""

    def read(self, names: list[str], *, stream: bool = False) -> dict[str, Any]:
        """Return the rows of splits by name, as `Dataset`s on disk.

        Keep this object as long as the rows: their files may be deleted with it.

        Args:
            names: the splits; others are not read.
            stream: return `IterableDataset`s.
        """
        files: Any = self._builder.config.data_files
        if files and self._own:
            kept = {name: files[name] for name in files if str(name) in names}
            self._builder.config.data_files = type(files)(kept)
        # `datasets` compares what it reads with the data card, so drop other splits.
        expected: Any = self._builder.info.splits
        if expected and self._own:
            kept = {name: expected[name] for name in expected if name in names}
            self._builder.info.splits = type(expected)(kept)
        if stream:
            return {name: self._builder.as_streaming_dataset(name) for name in names}
        self._builder.download_and_prepare()
        for name in names:
            if not (self._builder.info.splits or {})[name].num_examples:
                raise UnusableData(f"{self._where} has no rows in split {name!r}")
        found = {name: self._builder.as_dataset(name) for name in names}
        if self._builder.name == "imagefolder":
            left_out = LeftOut()
            for name, rows in found.items():
                _add_unlisted(files[name], rows, left_out)
            left_out.say(self._where)
        return found


def _add_unlisted(files: Iterable[str], rows: Any, left_out: LeftOut) -> None:
    """Count images that are in no row because the metadata does not list them.

    Args:
        files: all files of a split: images, metadata and archives.
    """
    import datasets

    images = rows.cast_column("image", datasets.Image(decode=False))["image"]
    listed = {os.path.realpath(image["path"]) for image in images if image}
    for file in map(str, files):
        other = Path(file).stem == "metadata" or table_format(file)
        if not other and os.path.realpath(file) not in listed:
            left_out.add("images that the metadata does not list", repr(file))


@contextlib.contextmanager
def open_dataset(
    options: config.Data, columns: Columns, revision: str = ""
) -> Iterator[OpenedDataset | SavedDataset]:
    """Open a data set of the hub, or a local folder, for reading some columns.

    For each kind of entries of a folder that are not read, a line is printed.

    Args:
        revision: a commit of the hub; "" for the newest.
    Raises:
        ValueError: the data set does not exist, or an error about it is raised inside
            the `with` block.
    """
    _check_name(options.name)
    path, where = os.path.expanduser(options.name), message_name(options)
    with quiet_libraries(), errors_in_one_line(options):
        if not os.path.isdir(path):
            _check_reachable(options.name)
            builder = _builder(path, options.subset, columns, None, revision or None)
            own = bool(builder_options(builder.name, columns))
            yield OpenedDataset(builder, columns, where, own=own)
            return
        left_out = LeftOut()
        if is_saved(path):
            _check_no_subset(options.subset)
            rows = SavedDataset(path, columns, where)
            add_unread(path, rows.files, left_out)
        else:
            rows = _open_folder_of_files(path, options.subset, columns, where, left_out)
        left_out.say(where)
        yield rows


def _open_folder_of_files(
    path: str, subset: str, columns: Columns, where: str, left_out: LeftOut
) -> OpenedDataset:
    """Open a folder of data files, whose rows are copied into a temporary folder."""
    files = data_files(path)
    check_one_format(path, files)
    with contextlib.ExitStack() as made:
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        cache = made.enter_context(folder)
        if in_capitals(files):
            _check_no_subset(subset)
            builder = _builder_for_capitals(path, files, columns, cache)
        else:
            builder = _builder(path, subset, columns, cache, None)
        found = builder.config.data_files or {}
        read = list(itertools.chain.from_iterable(found.values()))
        check_splits_recognised(path, files, found)
        check_all_read(path, files, read)
        add_unread(path, read, left_out)
        rows = OpenedDataset(builder, columns, where, own=True)
        weakref.finalize(rows, made.pop_all().close)
    return rows


def _check_no_subset(subset: str) -> None:
    if subset not in ("", "default"):
        raise UnusableData(f"data.subset {subset!r} is unknown: choose from default")


def _builder_for_capitals(
    path: str, files: dict[Path, str], columns: Columns, cache: str
) -> DatasetBuilder:
    """Make a builder for files with upper-case endings; `datasets` would skip them."""
    import datasets
    from datasets.data_files import DataFilesDict, DataFilesList, get_data_patterns

    [kind] = set(files.values())
    base = Path(path).resolve().as_posix()
    found = DataFilesDict.from_patterns(get_data_patterns(base), base_path=base)
    known = {str(file.resolve()) for file in files}
    kept = {
        split: DataFilesList([x for x in paths if x in known], paths.origin_metadata)
        for split, paths in found.items()
    }
    options = {"sep": "\t"} if kind == "tsv" else {}
    kind = {"tsv": "csv"}.get(kind, kind)
    builder = datasets.load_dataset_builder(
        kind,
        data_files=DataFilesDict({x: y for x, y in kept.items() if y}),
        cache_dir=cache,
        **options,
        **builder_options(kind, columns),
    )
    builder.hash = stamp_of({str(file.relative_to(path)): file for file in files})
    return builder


def message_name(options: config.Data) -> str:
    """Name of a data set in messages."""
    return f"data.name {options.name!r}"


def _check_name(name: str) -> None:
    """Raise if data.name can be neither a data set of the hub nor a folder."""
    path = os.path.expanduser(name)
    local = name.startswith((".", "~", os.sep)) or name.count("/") > 1
    if not name:
        problem = "is empty"
    elif os.path.isfile(path):
        problem = "is a file"
    elif local and not os.path.isdir(path):
        problem = "is not a folder"
    else:
        return
    raise ValueError(
        f"data.name {name!r} {problem}: give a data set of the hub such as "
        f"'Salesforce/wikitext', or {FOLDER}"
    )


def _check_reachable(name: str) -> None:
    """Send one request without a retry; the library itself would retry for minutes."""
    import huggingface_hub

    if not huggingface_hub.constants.HF_HUB_OFFLINE:
        huggingface_hub.HfApi().dataset_info(name, timeout=ANSWER_SECONDS)


def _builder(
    path: str,
    subset: str,
    columns: Columns,
    cache: str | None,
    revision: str | None,
) -> DatasetBuilder:
    """Make a builder of `datasets` for a data set of the hub or a folder.

    Raises:
        ValueError: the subset is unknown, or is missing and there are several.
    """
    import datasets
    import huggingface_hub

    options: dict[str, Any] = {
        "name": subset or None,
        "cache_dir": cache,
        "revision": revision,
    }
    if huggingface_hub.constants.HF_HUB_OFFLINE and cache is None:
        # `datasets` finds prepared files by the options that it prepared them with.
        for kind in ("text", "parquet", "csv", "json"):
            with contextlib.suppress(ValueError, TypeError):
                own = builder_options(kind, columns)
                return datasets.load_dataset_builder(path, **options, **own)
    try:
        builder = datasets.load_dataset_builder(path, **options)
    except ValueError:
        known = datasets.get_dataset_config_names(path)
        if subset in known or (len(known) == 1 and not subset):
            raise  # the error is not about the subset
        problem = f"{subset!r} is unknown" if subset else "is needed"
        raise UnusableData(
            f"data.subset {problem}: choose from {', '.join(sorted(known))}"
        ) from None
    if builder.name == "cache" and builder.info.builder_name == "text":
        raise UnusableData(
            f"data.name {path!r} is in the local cache as lines without their ends: "
            "unset HF_HUB_OFFLINE once"
        )
    own = builder_options(builder.name, columns)
    return datasets.load_dataset_builder(path, **options, **own) if own else builder


@contextlib.contextmanager
def errors_in_one_line(options: config.Data) -> Iterator[None]:
    """Turn any error of the libraries into a ValueError of one line.

    Raises:
        ValueError: an error was raised inside the `with` block.
    """
    try:
        yield
    except (UnusableData, MemoryError):
        raise
    except Exception as error:
        for cause in causes(error):
            if isinstance(cause, UnusableData):
                raise cause from None
        raise ValueError(f"{message_name(options)} {_problem(error)}") from None


def _problem(error: BaseException) -> str:
    """Return what went wrong, by the first cause of an error, and what to do."""
    import huggingface_hub
    from datasets.data_files import EmptyDatasetError
    from datasets.exceptions import DataFilesNotFoundError, DatasetNotFoundError

    chain = causes(error)
    hub = huggingface_hub.constants.ENDPOINT
    unknown = DatasetNotFoundError, huggingface_hub.errors.RepositoryNotFoundError
    if any(isinstance(link, unknown) for link in chain):
        return f"is no folder here, and {hub} shows no such data set to this login"
    nothing = DataFilesNotFoundError, EmptyDatasetError
    if any(isinstance(link, nothing) for link in chain):
        return (
            f"cannot be loaded, since it has no files that can be read: give {FOLDER}, "
            "without [ ? * in its path, without :: in a name and, if its README.md has "
            "configs, with endings in small letters"
        )
    first = chain[-1]
    message = " ".join(str(first).split())
    message = message.partition(" with any supported extension")[0]
    reason = f"{type(first).__name__}: {message}"
    if not any(map(is_connection_error, chain)):
        return f"cannot be loaded ({reason})"
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return f"is not in the local cache: unset HF_HUB_OFFLINE, or give {FOLDER}"
    return (
        f"cannot be loaded: no answer from {hub} ({reason}): HF_HUB_OFFLINE=1 uses the "
        f"local cache, or give {FOLDER}"
    )


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Let the libraries show bars only on a terminal, and log no retries.

    Downloads use HTTP and not xet, which has no timeout.
    """
    import datasets
    import huggingface_hub

    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
        huggingface_hub.utils.disable_progress_bars()
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with mock.patch.object(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
