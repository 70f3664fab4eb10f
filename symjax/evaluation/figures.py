"""Curves and grids as PNG, by matplotlib, which is an extra."""

import io

from symjax.evaluation.finding import Grid, Lines


def png(figure: Lines | Grid) -> bytes:
    """The same bytes for the same figure.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "figures need matplotlib: pip install 'symjax[plots]'"
        ) from error
    drawing = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = drawing.subplots()
    axes.set(title=figure.name, xlabel=figure.x_label, ylabel=figure.y_label)
    if isinstance(figure, Lines):
        for label, (x, y) in figure.series.items():
            y = [float("nan") if value is None else value for value in y]
            axes.plot(x, y, marker="." if len(x) < 40 else "", label=label)
        if figure.log_x:
            axes.set_xscale("log", base=2)
        axes.legend()
        axes.grid(alpha=0.3)
    else:
        values = [
            [float("nan") if x is None else x for x in row] for row in figure.values
        ]
        shown = axes.imshow(values, aspect="auto", cmap="viridis")
        axes.set_xticks(range(len(figure.columns)), figure.columns, rotation=90)
        axes.set_yticks(range(len(figure.rows)), figure.rows)
        drawing.colorbar(shown)
    file = io.BytesIO()
    drawing.savefig(file, format="png", dpi=120, metadata={"Software": None})
    return file.getvalue()
