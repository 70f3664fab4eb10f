"""Input and output of a task: `Options`, and `Result` with its tables and figures."""

import contextlib
import functools
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from symjax.figures import Figure

QUIET = 1.0  # seconds before `announce_if_slow` prints its line
Cell = str | int | float | None
Series = dict[str, tuple[list[float], list[float]]]

# A progress bar on stderr, erased at its end; nothing if stderr is not a terminal.
progress = functools.partial(tqdm, leave=False, disable=None)


@contextlib.contextmanager
def announce_if_slow(work: str) -> Iterator[None]:
    """Print a line on stderr if the block runs for longer than `QUIET` seconds.

    On a terminal the line is erased at the end of the block.

    Args:
        work: the line to print, which says what the block does.
    """
    on_terminal = contextlib.ExitStack()

    def show() -> None:
        if sys.stderr.isatty():
            on_terminal.enter_context(progress(desc=work, bar_format="{desc}"))
        else:
            print(work, file=sys.stderr, flush=True)

    timer = threading.Timer(QUIET, show)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        on_terminal.close()


class Options(NamedTuple):
    """Flags of eval.py that tasks read.

    Attributes:
        batches: the most held-out batches to measure. None means all in the task
            `loss`, and a few in tasks that take longer, as their docstrings say.
        prompt: text to continue, or to draw maps of; None means held-out text.
        tokens: number of tokens to generate.
        temperature: sampling temperature; 0 is greedy decoding.
        seed: seed of the sample and of all other random numbers.
        rope_scaling: kinds of RoPE scaling that the task `length` tries.
        lengths: tokens of a row in the task `speed`; () means 128, 256, … 2048.
        window: tokens of the held-out windows that tasks of attention maps read; None
            means as many as in training, at most 512 in text.
    """

    batches: int | None = None
    prompt: str | None = None
    tokens: int = 200
    temperature: float = 0.8
    seed: int = 0
    rope_scaling: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    window: int | None = None


class Table(NamedTuple):
    """A table of results.

    Attributes:
        name: the name of its CSV file, without the ending.
        printed: False if the lines of the result show the same numbers.
    """

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    printed: bool = True

    def __repr__(self) -> str:
        columns = ", ".join(self.columns)
        return f"Table({self.name}: {len(self.rows)} rows of {columns})"


class Result(NamedTuple):
    """Measurements of one task on one checkpoint.

    Attributes:
        values: plain numbers in nested dicts and lists for JSON. They hold no times and
            no paths, so that the JSON of a checkpoint is the same bytes each time.
        text: lines that are printed before the tables.
    """

    values: dict[str, Any]
    text: list[str]
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()

    def __repr__(self) -> str:
        """Return the names of the measurements; `report.to_text` shows the numbers."""
        parts = {
            "values": ", ".join(self.values),
            "text": f"{len(self.text)} lines",
            "tables": ", ".join(x.name for x in self.tables),
            "figures": ", ".join(x.name for x in self.figures),
        }
        shown = (f"{name}: {value}" for name, value in parts.items() if value)
        return f"Result({'; '.join(shown)})"


def not_applicable(task: str, reason: str) -> Result:
    """Return the result of a task that does not apply to a run."""
    return Result({task: None}, [f"{task}: none, {reason}"])


def table(name: str, columns: Sequence[str], records: list[dict[str, Any]]) -> Table:
    """Return a table of records whose values are in the order of the columns."""
    return Table(name, columns, [tuple(record.values()) for record in records])


def series(points: Iterable[tuple[str, float, float]]) -> Series:
    """Group points (label, x, y) into one curve per label."""
    curves: Series = {}
    for label, x, y in points:
        for axis, value in zip(curves.setdefault(label, ([], [])), (x, y), strict=True):
            axis.append(value)
    return curves
