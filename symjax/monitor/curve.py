"""Loss curve of a run, as a figure for `metrics.png` and for reports."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from symjax.distributed.exit_codes import print_warning
from symjax.figures import Lines, png, smoothed
from symjax.monitor.metrics import rows_of
from symjax.storage import local_folder, replaced

NAME = "metrics.png"
# Largest number of points of the training loss. Each point is the mean over about
# equally many lines of metrics.jsonl.
POINTS = 400
WIDTH = 0.02  # width of the smoothing window, as a share of the steps


def loss_curve(rows: Iterable[dict[str, Any]], unit: str) -> Lines | None:
    """Return a figure of training loss, measured and smoothed, and held-out loss.

    It is None if neither loss has two points.

    Args:
        rows: lines of `metrics.jsonl`.
        unit: name of one target, such as byte or label.
    """
    rows, lines, points = list(rows), {}, {}
    x, y = _column(rows, "train/loss")
    if len(x) > 1:
        parts = np.array_split(np.arange(len(x)), min(POINTS, len(x)))
        x, y = ([float(np.mean(a[part])) for part in parts] for a in (x, y))
        points["training"] = x, y
        lines["training"] = x, smoothed(x, y, WIDTH * (x[-1] - x[0]))
    x, y = _column(rows, "heldout/loss")
    if len(x) > 1:
        counts = {row.get("heldout/batches") for row in rows if "heldout/loss" in row}
        count = counts.pop() if len(counts) == 1 else None
        where = f", {count:.0f} batches" if count else ""
        lines[f"held out{where}"] = x.tolist(), y.tolist()
    if not lines:
        return None
    label = f"nats/{unit}"
    return Lines("loss", "step", label, lines, title="Loss by step", points=points)


def draw(workdir: epath.Path, unit: str) -> None:
    """Write `metrics.png`, if matplotlib is installed and there is a curve.

    A failure is only a warning, since the run is complete without its figure.
    """
    if (figure := loss_curve(rows_of(workdir), unit)) is None:
        return
    try:
        image = png(figure)
    except ValueError:  # no matplotlib
        return
    except Exception as error:
        print_warning(f"{NAME} is not drawn ({type(error).__name__}: {error})")
        return
    try:
        with replaced(local_folder(workdir), NAME) as folder:
            Path(folder, NAME).write_bytes(image)
    except OSError as error:
        print_warning(f"{workdir / NAME} cannot be written ({error.strerror})")


def _column(rows: list[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps that have a value of this name, and the values."""
    known = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    x, y = np.array(known, float).reshape(-1, 2).T
    return x, y
