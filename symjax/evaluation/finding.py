"""What an evaluation found: numbers, and how people look at them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Cell = str | int | float | None


class Table(NamedTuple):
    """Rows of cells; a name that is also the name of its file.

    Attributes:
        printed: False where the text of the finding has the numbers already.
    """

    name: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]
    printed: bool = True


class Lines(NamedTuple):
    """Curves over one axis.

    Attributes:
        series: label → (x, y).
        log_x: the axis is logarithmic.
    """

    name: str
    x_label: str
    y_label: str
    series: Mapping[str, tuple[Sequence[float], Sequence[float | None]]]
    log_x: bool = False


class Grid(NamedTuple):
    """A matrix of numbers [rows, columns] as colours; None is not drawn."""

    name: str
    x_label: str
    y_label: str
    columns: list[str]
    rows: list[str]
    values: list[list[float | None]]


class Finding(NamedTuple):
    """One evaluation of one checkpoint.

    Attributes:
        values: plain numbers in nested dicts and lists, for JSON: no times, no paths.
        text: lines for people, before the tables.
    """

    values: dict[str, Any]
    text: list[str]
    tables: tuple[Table, ...] = ()
    figures: tuple[Lines | Grid, ...] = ()
