"""The size of attention scores, of hidden states, and of the derivatives of weights."""

import numpy as np
from jaxtyping import Float

from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.measures.reading import Layer, Window, attentions, by_layer
from symjax.evaluation.results import Options, Result, Table, table
from symjax.layers.parts.table import part_of

TOPS = (1, 2, 3, 10, 100)
SHOWN = {"logit": "|score|", "hidden": "|hidden|"}  # by the keys of the JSON
BOUND = 0.25  # of the derivative of a softmax weight


def outliers(run: LoadedRun, options: Options) -> Result:
    """The top-1, 2, 3, 10, 100 and the median of |score| and |hidden|, by layer.

    Scores are those of attention; JSON has them as "logit".

    Differential attention is reported to have smaller ones, which matters where numbers
    are rounded to few bits.

    Source: Ye et al. 2024, arXiv:2410.05258, table 5.
    """

    def measure(window: Window, layer: Layer) -> dict[str, np.ndarray]:
        found = {"hidden": np.abs(layer.hidden).ravel()}
        if layer.scores is not None:
            found["logit"] = np.abs(layer.scores[..., window.visible]).ravel()
        return found

    measured = by_layer(run, options, measure)
    found = {
        name: [
            {"layer": index, **largest(np.concatenate([own[name] for own in windows]))}
            for index, windows in measured.items()
            if name in windows[0]
        ]
        for name in SHOWN
    }
    columns = ("of", "layer", *(f"top-{n}" for n in TOPS), "median")
    cells = [(SHOWN[name], *row.values()) for name in found for row in found[name]]
    text = [] if found["logit"] else ["attention scores: none, no layer forms them"]
    return Result({"outliers": found}, text, (Table("outliers", columns, cells),))


def largest(sizes: np.ndarray) -> dict[str, float | None]:
    """The n-th largest for each n, None where there are fewer, and the median."""
    ordered = np.sort(sizes)[::-1]
    tops = {
        f"top_{n}": float(ordered[n - 1]) if n <= len(ordered) else None for n in TOPS
    }
    return tops | {"median": float(np.median(ordered))}


def gradients(run: LoadedRun, options: Options) -> Result:
    """|∂weight/∂score| over all pairs of softmax, linear and cosine layers.

    A weight of softmax has the derivative ∂a/∂z = a (1 − a), at most 1/4. In linear
    attention z = φ(q)·φ(k) is divided by the sum D of its row, so that
    ∂a/∂z = (1 − a)/D: without a bound where features are close to zero.

    Source: Qin et al. 2022, arXiv:2210.10340, section 3.1.
    """
    names = [layer.mixer.mechanism for layer in attentions(run.model())]
    parts = [part_of(name) for name in names]
    known = [i for i, x in enumerate(parts) if x.exponential or x.features]
    left = sorted({x for i, x in enumerate(names) if i not in known})
    text = [f"gradients: not known for {', '.join(left)}"] if left else []
    if not known:
        return Result({"gradients": []}, text)
    over = "over all pairs, heads, branches"
    text.append(f"|∂a/∂z| of a weight and its own score, {over}")

    def measure(window: Window, layer: Layer) -> np.ndarray:
        return np.abs(slope(layer)[..., window.visible]).ravel()

    rows = []
    for index, windows in by_layer(run, options, measure, known).items():
        slopes = np.concatenate(windows)
        row = {"layer": index, "mechanism": names[index]}
        row |= {"largest": float(slopes.max()), "mean": float(slopes.mean())}
        row["quantile_99"] = float(np.quantile(slopes, 0.99))
        rows.append(row | {"bound": BOUND if parts[index].exponential else None})
    columns = ("layer", "mechanism", "largest", "mean", "99 % below", "bound")
    return Result({"gradients": rows}, text, (table("gradients", columns, rows),))


def slope(layer: Layer) -> Float[np.ndarray, "N P T T"]:
    """∂a/∂z of every pair; 0 in rows whose sum is 0, where the output is 0 too."""
    weights = layer.branches.astype(np.float64)
    if layer.products is None:
        return weights * (1 - weights)
    total = layer.products.astype(np.float64).sum(axis=-1, keepdims=True)
    inverse = np.where(total == 0, 0, 1 / np.where(total == 0, 1, total))
    return (1 - weights) * inverse
