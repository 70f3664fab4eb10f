"""How strongly a weight answers to its own score.

A weight of softmax has the slope ∂a/∂z = a (1 − a), at most 1/4. In linear attention
z = φ(q)·φ(k) is divided by the sum D of its row, so that ∂a/∂z = (1 − a)/D: without a
bound where features are close to zero.

Source: Qin et al. 2022, arXiv:2210.10340, section 3.1.
"""

import numpy as np
from jaxtyping import Float

from symjax.evaluation.asked import Asked
from symjax.evaluation.finding import Finding, Table
from symjax.evaluation.inside import windows
from symjax.evaluation.reading import Layer, attentions
from symjax.evaluation.trained import Trained

BOUND = 0.25  # of softmax


def gradients(trained: Trained, asked: Asked) -> Finding:
    """The size of ∂weight/∂score over all pairs: softmax, linear and cosine layers."""
    names = [layer.mixer.mechanism for layer in attentions(trained.any_model())]
    known = [name in ("softmax", "linear", "cosine") for name in names]
    left = sorted({name for name, yes in zip(names, known, strict=True) if not yes})
    text = ["|∂a/∂z| of a weight and its own score, over all pairs, heads, branches"]
    if left:
        text = [f"gradients: not known for {', '.join(left)}"] + (
            text if any(known) else []
        )
    if not any(known):
        return Finding({"gradients": []}, text)
    slopes: dict[int, list[np.ndarray]] = {}
    for window in windows(trained, asked):
        for index, layer in enumerate(window.layers):
            if known[index]:
                found = np.abs(slope(layer)[..., window.visible]).ravel()
                slopes.setdefault(index, []).append(found)
    rows = []
    for index, parts in slopes.items():
        every = np.concatenate(parts)
        bound = BOUND if names[index] == "softmax" else None
        found = {"largest": float(every.max()), "mean": float(every.mean())}
        found["quantile_99"] = float(np.quantile(every, 0.99))
        about = {"layer": index, "mechanism": names[index]}
        rows.append({**about, **found, "bound": bound})
    columns = ("layer", "mechanism", "largest", "mean", "99 % below", "bound")
    table = Table("gradients", columns, [tuple(row.values()) for row in rows])
    return Finding({"gradients": rows}, text, (table,))


def slope(layer: Layer) -> Float[np.ndarray, "N P T T"]:
    """∂a/∂z of every pair; 0 in rows whose sum is 0, where the output is 0 too."""
    weights = layer.branches.astype(np.float64)
    if layer.products is None:
        return weights * (1 - weights)
    total = layer.products.astype(np.float64).sum(axis=-1, keepdims=True)
    inverse = np.where(total == 0, 0, 1 / np.where(total == 0, 1, total))
    return (1 - weights) * inverse
