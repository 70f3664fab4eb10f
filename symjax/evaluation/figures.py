"""Curves and grids as PNG, by matplotlib, which is an extra."""

import importlib
import io

from symjax.evaluation.finding import Grid, Lines

MANY = 24  # rows of a grid, with which it is drawn large and its labels small


def check() -> None:
    """Raises: ValueError: matplotlib is not installed; asked before the long work."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise ValueError(
            "figures need matplotlib: pip install 'symjax[plots]'"
        ) from error


def png(figure: Lines | Grid) -> bytes:
    """The same bytes for the same figure.

    Raises:
        ValueError: matplotlib is not installed.
    """
    check()
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    large = isinstance(figure, Grid) and len(figure.rows) > MANY
    drawing = Figure(figsize=(8.0, 7.0) if large else (6.4, 4.2), layout="constrained")
    axes = drawing.subplots()
    axes.set(title=figure.name, xlabel=figure.x_label, ylabel=figure.y_label)
    if isinstance(figure, Lines):
        for label, (x, y) in figure.series.items():
            y = [float("nan") if value is None else value for value in y]
            axes.plot(x, y, marker="." if len(x) < 40 else "", label=label)
        if figure.log_x:
            axes.set_xscale("log", base=2)
        elif all(float(n).is_integer() for x, _ in figure.series.values() for n in x):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend()
        axes.grid(alpha=0.3)
    else:
        values = [
            [float("nan") if x is None else x for x in row] for row in figure.values
        ]
        shown = axes.imshow(values, aspect="auto", cmap="viridis")
        size = 7 if large else 10
        turned = 90 if max(map(len, figure.columns)) > (1 if large else 3) else 0
        places = range(len(figure.columns)), range(len(figure.rows))
        axes.set_xticks(places[0], figure.columns, rotation=turned, fontsize=size)
        axes.set_yticks(places[1], figure.rows, fontsize=size)
        drawing.colorbar(shown)
    file = io.BytesIO()
    drawing.savefig(file, format="png", dpi=120, metadata={"Software": None})
    return file.getvalue()
