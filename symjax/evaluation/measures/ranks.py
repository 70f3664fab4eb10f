"""Ranks of score matrices and attention maps, by layer.

The product QKᵀ of one head, without a mask, has at most rank H, the head size. Its
softmax has full rank in general, and so has every causal map with a positive diagonal.
The exact rank therefore says little about a map. `Ranks` measures the singular values s
of a matrix in four ways. A small number means few directions. Each matrix belongs to
one head and one held-out window, in float64. The table has means over heads and
windows.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.measures.reading import Layer, by_layer
from symjax.evaluation.measures.windows import Window
from symjax.evaluation.results import Options, Result, series, table
from symjax.figures import Lines
from symjax.models.build import attentions

PRODUCTS = {
    "none": "QKᵀ",
    "plain": "QQᵀ",
    "pairwise": "QUQᵀ",
    "kv": "QKᵀ",
    "qkv": "QQᵀ",
}


class Ranks(NamedTuple):
    """Ranks of matrices with singular values s.

    Attributes:
        effective: exp of the entropy of s / Σ s (Roy & Vetterli 2007).
        stable: Σ s² / max s².
        numerical: number of s above max s · n · 1.2e-7 for n rows, the rounding error
            of float32.
        energy_90, energy_99: number of the largest s that hold 90 % or 99 % of Σ s².
    """

    effective: Float[np.ndarray, "*N"]
    stable: Float[np.ndarray, "*N"]
    numerical: Float[np.ndarray, "*N"]
    energy_90: Float[np.ndarray, "*N"]
    energy_99: Float[np.ndarray, "*N"]


def rank(run: LoadedRun, options: Options) -> Result:
    """Measure the ranks of QKᵀ, of attention maps and of differential maps.

    QKᵀ (QQᵀ or QUQᵀ with symmetric keys) has neither scale nor mask; the maps of a
    decoder are causal.
    """
    lengths = []

    def measure(window: Window, layer: Layer) -> dict[str, np.ndarray]:
        lengths.append(len(window.visible))
        by_head = {
            name: np.stack(ranks(values, lengths[-1]))
            for name, values in singular_values(layer).items()
        }
        return {name: x.reshape(len(x), -1).mean(axis=1) for name, x in by_head.items()}

    products = [PRODUCTS[layer.symmetric] for layer in attentions(run.model())]
    rows = [
        {"layer": index, "matrix": products[index] if name == "QKᵀ" else name}
        | dict(zip(Ranks._fields, mean, strict=True))
        for index, windows in by_layer(run, options, measure).items()
        for name in windows[0]
        for mean in [np.mean([window[name] for window in windows], axis=0).tolist()]
    ]
    columns = ("layer", "matrix", "effective", "stable", "numerical", "90 %", "99 %")
    points = [(row["matrix"], row["layer"], row["effective"]) for row in rows]
    title = "Effective rank, the mean over heads and windows"
    lines = Lines("rank", "layer", "effective rank", series(points), title=title)
    sizes = " to ".join(map(str, sorted({min(lengths), max(lengths)})))
    text = [f"ranks of matrices of {sizes} tokens, the mean over heads and windows"]
    return Result({"rank": rows}, text, (table("rank", columns, rows),), (lines,))


def singular_values(layer: Layer) -> dict[str, np.ndarray]:
    """Return the singular values of each matrix of a layer by name, largest first."""
    query, key = (
        np.linalg.qr(x.astype(np.float64), mode="r") for x in (layer.query, layer.key)
    )
    # With Q = P_q R_q and K = P_k R_k, QKᵀ has the singular values of R_q R_kᵀ (H × H).
    values = {"QKᵀ": _singular(query @ np.swapaxes(key, -1, -2))}
    if layer.lam is None:
        return values | {"A": _singular(layer.map)}
    values["A₁, A₂"] = _singular(layer.branches)
    return values | {"A₁ − λA₂": _singular(layer.map)}


def ranks(singular: Float[np.ndarray, "*N k"], size: int) -> Ranks:
    """Return the ranks of matrices with these singular values.

    Args:
        size: number of rows of each matrix, at least the number k of singular values.
    """
    total = singular.sum(axis=-1, keepdims=True)
    share = singular / np.where(total == 0, 1, total)
    entropy = -(share * np.log(np.where(share > 0, share, 1))).sum(axis=-1)
    squares = singular**2
    largest = singular.max(axis=-1, keepdims=True)
    tiny = largest * size * np.finfo(np.float32).eps
    energy = squares.sum(axis=-1, keepdims=True)
    before = np.cumsum(squares, axis=-1) - squares
    return Ranks(
        np.where(energy[..., 0] == 0, 0, np.exp(entropy)),
        energy[..., 0] / np.where(largest == 0, 1, largest)[..., 0] ** 2,
        (singular > tiny).sum(axis=-1).astype(np.float64),
        *((before < part * energy).sum(axis=-1).astype(float) for part in (0.9, 0.99)),
    )


def _singular(x: np.ndarray) -> np.ndarray:
    return np.linalg.svd(x.astype(np.float64), compute_uv=False)
