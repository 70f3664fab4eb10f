"""The options of every task, and its results: values, lines, tables and figures."""

import contextlib
import functools
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from symjax.figures import Figure

QUIET = 1.0  # seconds of work before a line says what is done
Cell = str | int | float | None
Series = dict[str, tuple[list[float], list[float]]]

# A bar on stderr that leaves nothing behind; none where stderr is no terminal.
progress = functools.partial(tqdm, leave=False, disable=None)


@contextlib.contextmanager
def at_work(what: str) -> Iterator[None]:
    """Say on stderr what is done inside, if it takes longer than `QUIET` seconds.

    On a terminal the line leaves nothing behind.
    """
    shown = contextlib.ExitStack()

    def show() -> None:
        if sys.stderr.isatty():
            shown.enter_context(progress(desc=what, bar_format="{desc}"))
        else:
            print(what, file=sys.stderr, flush=True)

    timer = threading.Timer(QUIET, show)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        shown.close()


class Options(NamedTuple):
    """The options of eval.py, the same for every task.

    Attributes:
        batches: held-out batches, each of the batch size in training; None is all.
        prompt: text to continue; None is the first tokens of the held-out text.
        tokens: to generate.
        temperature: of the sample; 0 is greedy decoding.
        seed: of the sample and of all other random numbers.
        rope_scaling: kinds of it by which the task length reads longer windows.
    """

    batches: int | None = None
    prompt: str | None = None
    tokens: int = 200
    temperature: float = 0.8
    seed: int = 0
    rope_scaling: tuple[str, ...] = ()


class Table(NamedTuple):
    """Rows of cells; a name that is also the name of its file.

    Attributes:
        printed: False where the text of the result has the numbers already.
    """

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    printed: bool = True

    def __repr__(self) -> str:
        columns = ", ".join(self.columns)
        return f"Table({self.name}: {len(self.rows)} rows of {columns})"


class Result(NamedTuple):
    """The measurements of one task on one checkpoint.

    Attributes:
        values: plain numbers in nested dicts and lists, for JSON: no times, no paths.
        text: lines that are printed before the tables.
    """

    values: dict[str, Any]
    text: list[str]
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()

    def __repr__(self) -> str:
        """The names of what was measured; `report.to_text` shows the numbers."""
        parts = {
            "values": ", ".join(self.values),
            "text": f"{len(self.text)} lines",
            "tables": ", ".join(x.name for x in self.tables),
            "figures": ", ".join(x.name for x in self.figures),
        }
        shown = (f"{name}: {value}" for name, value in parts.items() if value)
        return f"Result({'; '.join(shown)})"


def none(task: str, reason: str) -> Result:
    """The result of a task that does not apply to a run."""
    return Result({task: None}, [f"{task}: none, {reason}"])


def table(name: str, columns: Sequence[str], records: list[dict[str, Any]]) -> Table:
    """A table of records, whose values stand in the order of the columns."""
    return Table(name, columns, [tuple(record.values()) for record in records])


def series(points: Iterable[tuple[str, float, float]]) -> Series:
    """Points (label, x, y) as one curve a label."""
    curves: Series = {}
    for label, x, y in points:
        for axis, value in zip(curves.setdefault(label, ([], [])), (x, y), strict=True):
            axis.append(value)
    return curves
