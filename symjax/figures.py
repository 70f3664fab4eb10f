"""Figures as PNG: curves, and matrices of numbers as colours."""

import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from symjax.optional import needed

MANY = 24  # a grid with more rows is drawn larger, with smaller labels
FEW = 40  # a curve with fewer points has a mark at each of them
DPI = 120
HIDDEN = "#e4e4e4"  # colour of the cells of a grid without a number

Curve = tuple[Sequence[float], Sequence[float | None]]
Band = tuple[Sequence[float], Sequence[float]]


class Lines(NamedTuple):
    """Curves over one axis.

    Attributes:
        series: label → (x, y).
        log_x: the x axis is logarithmic.
        title: by default the name.
        points: label → (x, y) as measured, for series that are smoothed.
        bands: label → (least y, largest y) of a band around a series. The band of
            a single point is drawn as a bar.
        log_y: the y axis is logarithmic.
    """

    name: str
    x_label: str
    y_label: str
    series: Mapping[str, Curve]
    log_x: bool = False
    title: str = ""
    points: Mapping[str, Curve] = {}
    bands: Mapping[str, Band] = {}
    log_y: bool = False


class Grid(NamedTuple):
    """A matrix of numbers [rows, columns] as colours; None and NaN are grey.

    Attributes:
        title: by default the name.
        limit: number at the end of the colour scale; by default the largest absolute
            value.
        unit: label of the colour scale.
    """

    name: str
    x_label: str
    y_label: str
    columns: list[str]
    rows: list[str]
    values: ArrayLike
    title: str = ""
    limit: float | None = None
    unit: str = ""


class Panels(NamedTuple):
    """Grids with the same rows, drawn next to each other in one colour scale.

    Attributes:
        signed: 0 is the middle of the scale, even if no value is negative.
    """

    name: str
    title: str
    grids: tuple[Grid, ...]
    signed: bool = False


class Spread(NamedTuple):
    """A mean of several numbers, and its interval if it has one."""

    points: Sequence[float]
    mean: float
    low: float | None = None
    high: float | None = None


class Dots(NamedTuple):
    """Numbers that are compared with 0: one row per label, the largest mean lowest.

    A row has a small dot for each point, a large one for the mean, and its interval.
    """

    name: str
    x_label: str
    rows: Mapping[str, Spread]
    title: str = ""


Figure = Lines | Grid | Panels | Dots


def check_figures() -> None:
    """Check that matplotlib is installed, before any long work.

    Raises:
        ValueError: matplotlib is not installed.
    """
    needed("matplotlib", "figures need matplotlib: pip install matplotlib")


def png(figure: Figure, *, dpi: int = DPI) -> bytes:
    """Return a figure as PNG. Equal figures give equal bytes.

    Args:
        dpi: dots per inch.

    Raises:
        ValueError: matplotlib is not installed.
    """
    check_figures()
    from matplotlib.figure import Figure as Drawing

    if isinstance(figure, Grid):
        figure = Panels(figure.name, "", (figure,))
    drawing = Drawing(figsize=_size(figure), layout="constrained")
    if isinstance(figure, Lines):
        _draw_lines(drawing.subplots(), figure)
    elif isinstance(figure, Dots):
        _draw_dots(drawing.subplots(), figure)
    else:
        _draw_grids(drawing, figure.grids, signed=figure.signed)
        drawing.suptitle(figure.title)
    _wrap_texts(drawing)
    file = io.BytesIO()
    drawing.savefig(file, format="png", dpi=dpi, metadata={"Software": None})
    return file.getvalue()


def smoothed(
    x: ArrayLike,
    y: Sequence[float | None],
    width: float,
    weights: ArrayLike | None = None,
) -> list[float]:
    """Return y smoothed by a Gaussian of x; None and NaN are left out. Time O(n²).

    Args:
        width: standard deviation of the Gaussian, in units of x.
        weights: weights of the points; None means equal weights.
    """
    places, values = np.asarray(x, float), np.array(y, float)
    own = np.ones(len(places)) if weights is None else np.asarray(weights, float)
    own = np.where(np.isnan(values), 0, own)
    near = np.exp(-(((places[:, None] - places) / width) ** 2) / 2) * own
    return ((near @ np.nan_to_num(values)) / near.sum(axis=1)).tolist()


def _size(figure: Lines | Panels | Dots) -> tuple[float, float]:
    """Return the width and height of a figure in inches."""
    if isinstance(figure, Lines):
        return 6.4, 4.2
    if isinstance(figure, Dots):
        return 6.4, max(3.0, 1.4 + 0.26 * len(figure.rows))
    wide, high = (8.0, 7.0) if len(figure.grids[0].rows) > MANY else (6.4, 4.2)
    return wide * (1 + 0.6 * (len(figure.grids) - 1)), high


def _draw_lines(axes: Any, figure: Lines) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set(title=figure.title or figure.name)
    axes.set(xlabel=figure.x_label, ylabel=figure.y_label)
    for label, (x, y) in figure.series.items():
        marker = "." if len(x) < FEW and label not in figure.points else ""
        (line,) = axes.plot(x, np.array(y, float), marker=marker, label=label)
        if label in figure.points:
            x, y = figure.points[label]
            colour = line.get_color()
            axes.plot(x, np.array(y, float), ".", color=colour, alpha=0.25, zorder=1)
        if label in figure.bands:
            least, largest = figure.bands[label]
            colour = line.get_color()
            if len(x) == 1:  # a filled band would have no width
                axes.vlines(x, least, largest, color=colour, alpha=0.5)
                axes.plot([*x, *x], [*least, *largest], "_", color=colour)
            else:
                axes.fill_between(
                    x, least, largest, color=colour, alpha=0.2, linewidth=0
                )
    if figure.log_x:
        axes.set_xscale("log", base=2)
    elif all(float(n).is_integer() for x, _ in figure.series.values() for n in x):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if figure.log_y:
        axes.set_yscale("log")
    axes.legend()
    axes.grid(alpha=0.3)


def _draw_dots(axes: Any, figure: Dots) -> None:
    rows = sorted(figure.rows.items(), key=lambda row: row[1].mean, reverse=True)
    axes.set(title=figure.title or figure.name, xlabel=figure.x_label)
    axes.axvline(0, color="black", linewidth=0.8)
    for place, (_, (points, mean, low, high)) in enumerate(rows):
        if low is not None and high is not None:
            axes.plot([low, high], [place, place], color="C0", linewidth=1.2)
        axes.plot(mean, place, "o", color="C0", markersize=7)
        axes.plot(points, [place] * len(points), ".", color="black", markersize=4)
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.grid(alpha=0.3)


def _wrap_texts(drawing: Any) -> None:
    """Break titles and axis labels into lines that fit into the figure.

    More lines leave less room for the axes, so the layout is computed twice.
    """
    words = [(x, drawing.bbox, "width") for x in drawing.texts]
    for axes in drawing.axes:
        words += [
            (axes.title, axes.bbox, "width"),
            (axes.xaxis.label, axes.bbox, "width"),
        ]
        words += [(axes.yaxis.label, axes.bbox, "height")]
    for _ in range(2):
        drawing.draw_without_rendering()  # lays out the axes
        for text, box, side in words:
            taken, room = getattr(text.get_window_extent(), side), getattr(box, side)
            line = text.get_text().replace("\n", " ")
            if taken > room:
                longest = max(map(len, text.get_text().split("\n")))
                letters = max(int(0.95 * room / taken * longest), 8)
                text.set_text(textwrap.fill(line, letters))


def _draw_grids(drawing: Any, grids: tuple[Grid, ...], *, signed: bool) -> None:
    """Draw grids from white to blue; signed or negative numbers from blue to red."""
    numbers = [np.array(grid.values, float) for grid in grids]
    sizes = np.concatenate([np.abs(x[~np.isnan(x)]) for x in numbers])
    largest = sizes.max(initial=0.0)
    limit = max(grid.limit or largest for grid in grids) or 1.0
    signed = signed or any((x < -1e-6 * limit).any() for x in numbers)
    colours = {"cmap": "RdBu_r" if signed else "Blues"}
    colours |= {"vmin": -limit if signed else 0, "vmax": limit}
    places = drawing.subplots(1, len(grids), sharey=True, squeeze=False)[0]
    for axes, grid, values in zip(places, grids, numbers, strict=True):
        axes.set(title=grid.title or grid.name, xlabel=grid.x_label)
        axes.set_facecolor(HIDDEN)
        shown = axes.imshow(values, aspect="auto", interpolation="nearest", **colours)
        large = len(grid.rows) > MANY
        size = 7 if large else 10
        turned = 90 if max(map(len, grid.columns)) > (1 if large else 3) else 0
        axes.set_xticks(
            range(len(grid.columns)), grid.columns, rotation=turned, fontsize=size
        )
        axes.set_yticks(range(len(grid.rows)), grid.rows, fontsize=size)
    places[0].set_ylabel(grids[0].y_label)
    beyond = ("both" if signed else "max") if largest > limit else "neither"
    drawing.colorbar(shown, ax=places, extend=beyond, label=grids[0].unit)
