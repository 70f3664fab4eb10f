"""Data sets of the Hugging Face hub, and local folders in the same formats.

If the hub does not respond within SILENCE seconds, a one-line error says what to do.
Later requests have the limits of huggingface_hub: six attempts each, and
HF_HUB_DOWNLOAD_TIMEOUT seconds (10) without a byte.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import logging
import os
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from symjax import config
from symjax.data import splits
from symjax.data.formats import MixedFormats, check_one_format
from symjax.data.progress import bar
from symjax.data.texts import Document, Texts

if TYPE_CHECKING:
    from datasets import DatasetBuilder

SILENCE = 10.0  # seconds
HELDOUT = ("validation", "test")  # the first of them that there is
ROWS = 256  # read at a time
PAUSES = (1, 2, 4, 8, 16)  # seconds before each attempt at a stream that breaks
FOLDER = "a local folder of parquet, json or text files"

Labelled = tuple[list[Any], list[int]]  # contents and the numbers of their labels


class _Refused(ValueError):
    """Raised here, and told apart from the ValueErrors of the libraries."""


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
    found, facts, where, kept = _read(
        options, lambda rows: _Texts(rows, options.column)
    )

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
    with _found(options) as (builder, _):
        return builder.hash or ""


def streams(
    options: config.Data, revision: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rows of the training split and of the held-out one, if there is one, by name,
    not read yet; and what identifies them.

    Args:
        revision: of `revision`; the rows are those, wherever the data set is at since.
    """
    with _found(options, revision) as (builder, where):
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
    with _quiet(), _one_line(f"data.name {options.name!r}"):
        while True:
            rows.load_state_dict(state)
            try:
                for row in rows:
                    state, failed = rows.state_dict(), 0
                    if text := _text(row, options.column):
                        yield text, rows.state_dict()
                return
            except Exception as error:
                if failed == len(PAUSES) or not _is_silence(error):
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
        raise _Refused(f"data.column {column!r} is unknown: choose from {known}")
    if not isinstance(row[column], str | None):
        kind = type(row[column]).__name__
        raise _Refused(f"data.column {column!r} holds no text, but {kind}")
    return row[column]


def load_labelled(
    options: config.Data,
) -> tuple[Labelled, Labelled | None, list[str], dict[str, Any]]:
    """Texts or images with their labels, and what identifies them.

    Splits are chosen as in `load`. Rows without content or label are left out. Images
    are uint8 [height, width, channels] of one size, with 1 or 3 channels.

    Returns:
        training and held-out examples, these None where no split is held out; the
        names of the labels, by which labels are numbered; and facts as `load`.
    Raises:
        ValueError: as `load`; no such label column, a held-out label that training
            does not have, images of several sizes, or no Pillow for images.
    """
    columns = options.column, options.label
    found, facts, where, _ = _read(options, lambda rows: _labelled(rows, *columns))
    (*_, names), *_ = found.values()
    for split, (_, labels, _) in found.items():
        if unknown := sorted(set(labels) - set(names)):
            raise ValueError(
                f"{where} has label {unknown[0]!r} in split {split!r} only, training "
                f"has {', '.join(names)}"
            )
    numbers = {name: number for number, name in enumerate(names)}
    train, *heldout = (
        (contents, [numbers[label] for label in labels])
        for contents, labels, _ in found.values()
    )
    every = itertools.chain(*(contents for contents, _ in (train, *heldout)))
    shapes = {x.shape for x in every if isinstance(x, np.ndarray)}
    if len(shapes) > 1:
        one, other = sorted(shapes)[:2]
        raise ValueError(f"{where} has images of several sizes: {one} and {other}")
    facts["label"] = options.label
    return train, heldout[0] if heldout else None, names, facts


def _read(
    options: config.Data, read: Callable[[Any], Any]
) -> tuple[dict[str, Any], dict[str, Any], str, DatasetBuilder]:
    """read(rows) of the training split and of the held-out one, if there is one, by
    name; what identifies them; what to call them in messages; and what keeps the rows
    of a folder on disk, as long as it lives."""
    with _found(options) as (builder, where):
        builder.download_and_prepare()
        train, heldout = _choose(list(builder.info.splits or ()), where)
        found = {}
        for split in (train, heldout) if heldout else (train,):
            found[split] = read(builder.as_dataset(split=split))
            if not found[split]:
                raise _Refused(f"{where} has no text in split {split!r}")
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


@contextlib.contextmanager
def _found(
    options: config.Data, revision: str = ""
) -> Iterator[tuple[DatasetBuilder, str]]:
    """What reads a data set, and what to call it in messages.

    Raises:
        ValueError: there is none, or inside something about it fails.
    """
    _check_name(options.name)
    path, where = os.path.expanduser(options.name), f"data.name {options.name!r}"
    with _quiet(), _one_line(where), contextlib.ExitStack() as failed:
        cache = None  # that of the machine
        if os.path.isdir(path):
            check_one_format(path)
            cache = tempfile.mkdtemp()
            failed.callback(shutil.rmtree, cache, ignore_errors=True)
        else:
            _check_reachable(options.name)
        builder = _builder(path, options.subset, cache, revision or None)
        failed.pop_all()
        if cache is not None:
            weakref.finalize(builder, shutil.rmtree, cache, ignore_errors=True)
        yield builder, where


def _check_name(name: str) -> None:
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
    """One request without a retry: the library itself would try for minutes."""
    import huggingface_hub

    if not huggingface_hub.constants.HF_HUB_OFFLINE:
        huggingface_hub.HfApi().dataset_info(name, timeout=SILENCE)


def _builder(
    path: str, subset: str, cache: str | None, revision: str | None
) -> DatasetBuilder:
    """Raises: ValueError: an unknown subset, or none where there are several."""
    import datasets

    options: dict[str, Any] = {
        "name": subset or None,
        "cache_dir": cache,
        "revision": revision,
    }
    with contextlib.suppress(ValueError, TypeError):  # formats other than text files
        return datasets.load_dataset_builder(path, **options, sample_by="document")
    try:
        builder = datasets.load_dataset_builder(path, **options)
    except ValueError:
        known = datasets.get_dataset_config_names(path)
        if subset in known or (len(known) == 1 and not subset):
            raise  # it is about something else
        problem = f"{subset!r} is unknown" if subset else "is needed"
        raise _Refused(
            f"data.subset {problem}: choose from {', '.join(sorted(known))}"
        ) from None
    if builder.info.builder_name == "text":
        raise _Refused(
            f"data.name {path!r} is in the local cache by lines only, without their "
            "ends: unset HF_HUB_OFFLINE once"
        )
    return builder


def _choose(names: list[str], where: str) -> tuple[str, str]:
    """The splits to train on and to hold out; "" if rows have to be held out."""
    if len(names) == 1:
        return names[0], ""
    if "train" not in names:
        raise _Refused(f"{where} has no split 'train', only {', '.join(names)}")
    return "train", next((name for name in HELDOUT if name in names), "")


class _Texts:
    """The column of a `Dataset` on disk, without rows that have no text."""

    def __init__(self, rows: Any, column: str):
        kind = _kind(rows, "column", column)
        if not _is_text(kind):
            raise _Refused(f"data.column {column!r} holds no text, but {kind}")
        self._rows, self._column = rows.select_columns(column), column

    def __iter__(self) -> Iterator[str]:
        for batch in self._rows.iter(ROWS):
            yield from filter(None, batch[self._column])

    def __len__(self) -> int:
        """Of all rows, also those without text."""
        return len(self._rows)

    def __bool__(self) -> bool:
        return next(iter(self), None) is not None


def _labelled(rows: Any, column: str, label: str) -> tuple[Any, ...]:
    """Contents, the names of their labels, and all names in order; () if no rows."""
    import datasets

    kind, labels = _kind(rows, "column", column), _kind(rows, "label", label)
    images = isinstance(kind, datasets.Image)
    if not images and not _is_text(kind):
        raise _Refused(f"data.column {column!r} holds no text or images, but {kind}")
    if images and importlib.util.find_spec("PIL") is None:
        raise _Refused(
            f"data.column {column!r} holds images, which need Pillow: "
            "pip install 'symjax[images]'"
        )
    names = list(getattr(labels, "names", ()))
    pairs = [
        (_pixels(content) if images else content, value)
        for content, value in zip(rows[column], rows[label], strict=True)
        if content and value is not None and not (names and value < 0)
    ]
    if not pairs:
        return ()
    contents, values = map(list, zip(*pairs, strict=True))
    if names:
        return contents, [names[value] for value in values], names
    return contents, list(map(str, values)), list(map(str, sorted(set(values))))


def _kind(rows: Any, key: str, column: str) -> Any:
    """Raises: ValueError: there is no such column."""
    if column not in rows.column_names:
        known = ", ".join(rows.column_names)
        raise _Refused(f"data.{key} {column!r} is unknown: choose from {known}")
    return rows.features[column]


def _is_text(kind: Any) -> bool:
    return getattr(kind, "dtype", "") in ("string", "large_string")


def _pixels(image: Any) -> np.ndarray:
    """Of a Pillow image; shades of grey stay one channel."""
    gray = image.mode in ("1", "L")
    pixels = np.asarray(image.convert("L" if gray else "RGB"), np.uint8)
    return pixels[..., None] if gray else pixels


@contextlib.contextmanager
def _one_line(where: str) -> Iterator[None]:
    """Raises: ValueError: whatever the libraries raise, in one line."""
    try:
        yield
    except (_Refused, MixedFormats, MemoryError):
        raise
    except Exception as error:
        raise ValueError(f"{where} {_problem(error)}") from None


def _problem(error: BaseException) -> str:
    """What went wrong, by the first cause of an error, and what to do."""
    import huggingface_hub
    from datasets.exceptions import DatasetNotFoundError

    chain, cause = [], error
    while cause is not None:  # as a traceback would show it
        chain.append(cause)
        context = None if cause.__suppress_context__ else cause.__context__
        cause = cause.__cause__ or context
    hub = huggingface_hub.constants.ENDPOINT
    unknown = DatasetNotFoundError, huggingface_hub.errors.RepositoryNotFoundError
    if any(isinstance(link, unknown) for link in chain):
        return f"is no folder here, and {hub} shows no such data set to this login"
    first = chain[-1]
    reason = f"{type(first).__name__}: {' '.join(str(first).split())}"
    if not any(map(_is_silence, chain)):
        return f"cannot be loaded ({reason})"
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return f"is not in the local cache: unset HF_HUB_OFFLINE, or give {FOLDER}"
    return (
        f"cannot be loaded: no answer from {hub} ({reason}): HF_HUB_OFFLINE=1 uses the "
        f"local cache, or give {FOLDER}"
    )


def _is_silence(error: BaseException) -> bool:
    """Whether an error is one of the connection, or of a server that is busy."""
    response = getattr(error, "response", None)
    if response is not None:
        return response.status_code == 429 or response.status_code >= 500
    library = type(error).__module__.partition(".")[0]
    return isinstance(error, ConnectionError | TimeoutError) or library.startswith(
        ("http", "aiohttp")
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Bars on a terminal only, no log of attempts, and downloads that time out.

    They go by HTTP and not by xet, which has no time limit.
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
