"""The largest activations: logits of attention, and hidden states.

Differential attention is said to have smaller ones, which matters where numbers are
rounded to few bits (arXiv 2410.05258, table 5).
"""

import numpy as np

from symjax.evaluation.asked import Asked
from symjax.evaluation.finding import Cell, Finding, Table
from symjax.evaluation.inside import windows
from symjax.evaluation.trained import Trained

TOPS = (1, 2, 3, 10, 100)


def outliers(trained: Trained, asked: Asked) -> Finding:
    """The top-1, 2, 3, 10, 100 and the median of |logit| and |hidden|, by layer."""
    sizes: dict[tuple[str, int], list[np.ndarray]] = {}
    for window in windows(trained, asked):
        for index, layer in enumerate(window.layers):
            hidden = sizes.setdefault(("hidden", index), [])
            hidden.append(np.abs(layer.hidden).ravel())
            if layer.scores is not None:
                logits = sizes.setdefault(("logit", index), [])
                logits.append(np.abs(layer.scores[..., window.visible]).ravel())
    found: dict[str, list[dict[str, Cell]]] = {"logit": [], "hidden": []}
    for (name, index), parts in sorted(sizes.items()):
        found[name].append({"layer": index, **largest(np.concatenate(parts))})
    columns = ("of", "layer", *(f"top-{n}" for n in TOPS), "median")
    cells = [(f"|{name}|", *row.values()) for name in found for row in found[name]]
    text = [] if found["logit"] else ["logits: none, no layer forms them"]
    return Finding({"outliers": found}, text, (Table("outliers", columns, cells),))


def largest(sizes: np.ndarray) -> dict[str, float | None]:
    """The n-th largest for each n, None where there are fewer, and the median."""
    ordered = np.sort(sizes)[::-1]
    tops = {f"top_{n}": float(ordered[n - 1]) for n in TOPS if n <= len(ordered)}
    missing = {f"top_{n}": None for n in TOPS}
    return missing | tops | {"median": float(np.median(ordered))}
