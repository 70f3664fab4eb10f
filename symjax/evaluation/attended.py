"""Where rows of attention look: on an answer, near, at themselves.

All of it is about shares: |a| of a pair over the sum of |a| of its row. Maps with
negative weights, as differential ones, are read by their size.
"""

import numpy as np
from jaxtyping import Bool, Float

from symjax.evaluation.asked import Asked
from symjax.evaluation.finding import Finding, Table
from symjax.evaluation.inside import Layer, Window, mean_by_layer
from symjax.evaluation.trained import Trained

NEAR = 16  # tokens before a row that count as its context
WITHIN = (1, 4, 16, 64)
MAPS = ("A", "A₁", "A₂")  # of a head, and of the branches of a differential one
PLACES = ("answer", "context", "elsewhere")

Shares = Float[np.ndarray, "*N T T"]


def shares(maps: Float[np.ndarray, "*N T T"]) -> Shares:
    """|a| over its row's sum, in float64; rows without any weight stay zero."""
    size = np.abs(maps.astype(np.float64))
    total = size.sum(axis=-1, keepdims=True)
    return size / np.where(total == 0, 1, total)


def uniform(length: int) -> Float[np.ndarray, "T T"]:
    """The causal map that gives every visible key the same: the reference."""
    return shares(np.tri(length))


def noise(trained: Trained, asked: Asked) -> Finding:
    """Shares of attention on the answer, the context, and elsewhere, by layer.

    In plain text the answer of a row is every place where the token stands that comes
    next; rows without one do not count. Context are the last 16 other tokens, its own
    among them.
    """

    def measure(window: Window, layer: Layer) -> np.ndarray:
        answer = answers(window)
        maps = [layer.map[:, None]]
        if layer.lam is not None:
            maps.append(layer.branches)
        found = [on_answer(shares(x), answer).mean(axis=0) for x in maps]
        found.append(on_answer(uniform(len(answer)), answer)[None])
        return np.concatenate(found)  # [maps + 1, 3]

    rows = []
    for layer, found in enumerate(mean_by_layer(trained, asked, measure)):
        for name, share in zip(MAPS, found[:-1], strict=False):
            parts = dict(zip(PLACES, map(number, share), strict=True))
            even = number(found[-1, 0])
            rows.append({"layer": layer, "map": name, **parts, "uniform": even})
    columns = ("layer", "map", *PLACES, "answer if uniform")
    text = [
        "share of |A| on places that hold the next token (answer), on the last "
        f"{NEAR} others (context),",
        "and elsewhere; rows whose next token is new do not count",
    ]
    table = Table("noise", columns, [tuple(row.values()) for row in rows])
    return Finding({"noise": rows}, text, (table,))


def answers(window: Window) -> Bool[np.ndarray, "T T"]:
    """Whether the token at place s is the one that comes after row t, for s ≤ t."""
    same = window.targets[:, None] == window.tokens[None]
    return same & (np.tri(len(same)) > 0)


def on_answer(
    shares: Shares, answer: Bool[np.ndarray, "T T"], near: int = NEAR
) -> Float[np.ndarray, "*N 3"]:
    """Mean shares on the answer, on the `near` last tokens without it, and elsewhere.

    Over the rows that have an answer; NaN if none has.
    """
    length = len(answer)
    distance = np.arange(length)[:, None] - np.arange(length)[None]
    context = (distance >= 0) & (distance < near) & ~answer
    rows = answer.any(axis=1)
    if not rows.any():
        return np.full((*shares.shape[:-2], 3), np.nan)
    places = np.stack([answer, context, ~(answer | context)])
    found = np.einsum("...ts,pts->...tp", shares, places.astype(np.float64))
    return found[..., rows, :].mean(axis=-2)


def self_share(trained: Trained, asked: Asked) -> Finding:
    """What a row gives itself, by layer and head; the first row has no choice."""

    def measure(_: Window, layer: Layer) -> np.ndarray:
        maps = np.concatenate([shares(layer.map), uniform(layer.map.shape[-1])[None]])
        return np.diagonal(maps, axis1=-2, axis2=-1)[:, 1:].mean(axis=-1)

    rows = []
    for layer, found in enumerate(mean_by_layer(trained, asked, measure)):
        *heads, even = found.tolist()
        mean = sum(heads) / len(heads)
        rows.append({"layer": layer, "mean": mean, "heads": heads, "uniform": even})
    columns = ("layer", "mean", "least head", "largest head", "if uniform")
    cells = [
        (
            row["layer"],
            row["mean"],
            min(row["heads"]),
            max(row["heads"]),
            row["uniform"],
        )
        for row in rows
    ]
    text = ["share of |A| that a token gives itself"]
    return Finding({"self_share": rows}, text, (Table("self_share", columns, cells),))


def dilution(trained: Trained, asked: Asked) -> Finding:
    """How much of a row stays on its last w tokens: attention that is diluted, little.

    Of rows that see at least 64 keys, or of the last row of a shorter window.
    """

    def measure(_: Window, layer: Layer) -> np.ndarray:
        maps = np.concatenate([shares(layer.map), uniform(layer.map.shape[-1])[None]])
        near = within(maps)
        return np.stack([near[:-1].mean(axis=0), near[-1]])

    found = mean_by_layer(trained, asked, measure)
    rows = [
        {"layer": i, "within": dict(zip(map(str, WITHIN), x[0].tolist(), strict=True))}
        for i, x in enumerate(found)
    ]
    columns = ("layer", *(f"last {w}" for w in WITHIN))
    cells = [(row["layer"], *row["within"].values()) for row in rows]
    cells.append(("uniform", *found[0][1].tolist()))
    text = ["share of |A| on the last w tokens, the row's own among them"]
    return Finding({"dilution": rows}, text, (Table("dilution", columns, cells),))


def within(shares: Shares) -> Float[np.ndarray, "*N w"]:
    """Mean shares on the last 1, 4, 16 and 64 tokens."""
    length = shares.shape[-1]
    distance = np.arange(length)[:, None] - np.arange(length)[None]
    first = min(max(WITHIN), length) - 1
    found = [
        np.where((distance >= 0) & (distance < w), shares, 0).sum(axis=-1)
        for w in WITHIN
    ]
    return np.stack(found, axis=-1)[..., first:, :].mean(axis=-2)


def number(x: float) -> float | None:
    """A float for JSON, which has no NaN."""
    return float(x) if np.isfinite(x) else None
