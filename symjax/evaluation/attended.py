"""Where rows of attention look: on an answer, near, at themselves.

All of it is about shares: |a| of a pair over the sum of |a| of its row. Maps with
negative weights, as differential ones, are read by their size.
"""

from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from tqdm import tqdm

from symjax import config
from symjax.data import generated
from symjax.evaluation.answers import DEPTHS, learned, planted
from symjax.evaluation.asked import Asked
from symjax.evaluation.finding import Finding, Lines, Table
from symjax.evaluation.inside import Window, mean_by_layer
from symjax.evaluation.reading import Layer, read
from symjax.evaluation.trained import Trained
from symjax.models.decoder import Decoder

NEAR = 16  # tokens before a row that count as its context
ROWS = 8  # read at every depth of a needle
WITHIN = (1, 4, 16, 64)
MAPS = ("A", "A₁", "A₂")  # of a head, and of the branches of a differential one
PLACES = ("answer", "context", "elsewhere")

Shares = Float[np.ndarray, "*N T T"]
Places = Bool[np.ndarray, "T T"]


def shares(maps: Float[np.ndarray, "*N T T"]) -> Shares:
    """|a| over its row's sum, in float64; rows without any weight stay zero."""
    size = np.abs(maps.astype(np.float64))
    total = size.sum(axis=-1, keepdims=True)
    return size / np.where(total == 0, 1, total)


def uniform(visible: Places) -> Float[np.ndarray, "T T"]:
    """The map that gives every visible key the same: the reference."""
    return shares(visible)


def noise(trained: Trained, asked: Asked) -> Finding:
    """Shares of attention on the answer, the context, and elsewhere, by layer.

    In plain text the answer of a row is every place where the token stands that comes
    next; rows without one do not count. Context are the last 16 other tokens, its own
    among them. Needles: see `noise_of_needles`. An encoder is asked for tokens that are
    hidden: their answers are the other places where the same token is shown, and
    context are the tokens less than 8 places away. A label stands at no place.
    """
    if learned(trained, "needle"):
        return noise_of_needles(trained, asked)
    if trained.options.model.classes:
        text = ["noise: none, a label is no token that attention could look at"]
        return Finding({"noise": None}, text)

    def measure(window: Window, layer: Layer) -> np.ndarray:
        answer = answers(window)
        near = context(answer, window.visible)
        return of_maps(layer, answer, near, window.visible)

    found = enumerate(mean_by_layer(trained, asked, measure))
    rows = [row for layer, shares in found for row in _by_map(layer, shares)]
    text = [
        "share of |A| on places that hold the next token (answer), on the last "
        f"{NEAR} others (context),",
        "and elsewhere; rows whose next token is new do not count",
    ]
    if not config.is_causal(trained.options.model):
        text = [
            "share of |A| of hidden tokens on other places that show the same token "
            "(answer),",
            f"on those less than {NEAR // 2} places away (context), and elsewhere",
        ]
    return Finding({"noise": rows}, text, (_table(rows),))


def noise_of_needles(trained: Trained, asked: Asked) -> Finding:
    """Shares of attention of the first key that is asked, by the depth of its needle.

    Answer is that needle (mark, key and value), context all other tokens before the
    questions, elsewhere the questions. By layer means over depths, by depth means over
    layers; 8 rows a depth, or `--batches` if that is fewer.

    Source: Ye et al. 2024, arXiv:2410.05258, table 3.
    """
    options, model = trained.options.data, trained.model()
    length, count = trained.options.model.length, min(asked.batches or ROWS, ROWS)
    found = []  # by depth and row the [maps + 1, 3] of every layer
    for depth in tqdm(DEPTHS, "depths", leave=False, disable=None):
        drawn = planted(options, length, depth, asked.seed)
        rows = zip(*(x[:count] for x in drawn), strict=True)
        found.append([_of_row(options, model, *row) for row in rows])
    layers = [np.array(x).mean(axis=0) for x in zip(*sum(found, []), strict=True)]
    by_layer = [row for i, x in enumerate(layers) for row in _by_map(i, x)]
    by_depth = []
    for depth, rows in zip(DEPTHS, found, strict=True):
        mean, even = np.mean([[x[[0, -1]] for x in row] for row in rows], axis=(0, 1))
        parts = dict(zip(PLACES, mean.tolist(), strict=True))
        by_depth.append({"depth": depth, **parts, "uniform": float(even[0])})
    text = [
        "share of |A| of the first question on its needle (answer), on all else before",
        "the questions (context), and elsewhere; by depth the mean over layers",
    ]
    columns = ("depth", *PLACES, "answer if uniform")
    cells = [(f"{row['depth']:.0%}", *list(row.values())[1:]) for row in by_depth]
    tables = _table(by_layer), Table("noise_by_depth", columns, cells)
    names = ("answer", "context", "uniform")
    curves = {x: (list(DEPTHS), [row[x] for row in by_depth]) for x in names}
    figure = Lines("noise_by_depth", "depth of the needle", "share of |A|", curves)
    values = {"noise": by_layer, "noise_by_depth": by_depth}
    return Finding(values, text, tables, (figure,))


def _of_row(
    options: config.Data, model: Decoder, tokens: np.ndarray, targets: np.ndarray
) -> list[np.ndarray]:
    places = *needle_places(options, tokens, targets), np.tri(len(tokens)) > 0
    return [of_maps(layer, *places) for layer in read(model, tokens)]


def needle_places(
    options: config.Data, tokens: Int[np.ndarray, "T"], targets: Int[np.ndarray, "T"]
) -> tuple[Places, Places]:
    """Of the row of the first question: its needle, and the rest before questions."""
    question = np.flatnonzero(targets >= 0)[0]
    places = generated.shown(options, tokens[None])[0]
    its = places[tokens[places[:, -2]] == tokens[question]]
    answer = np.zeros((len(tokens), len(tokens)), bool)
    answer[question, its] = True
    around = np.zeros_like(answer)
    around[question, : question - 1] = True  # up to the token that asks
    return answer, around & ~answer


def of_maps(
    layer: Layer, answer: Places, context: Places, visible: Places
) -> Float[np.ndarray, "M 3"]:
    """Means over heads of the map, of branches where there are two, and last of a
    uniform map: shares on answer, context and elsewhere."""
    maps = [layer.map[:, None]]
    if layer.lam is not None:
        maps.append(layer.branches)
    found = [on_places(shares(x), answer, context).mean(axis=0) for x in maps]
    found.append(on_places(uniform(visible), answer, context)[None])
    return np.concatenate(found)


def _by_map(layer: int, found: Float[np.ndarray, "M 3"]) -> list[dict[str, Any]]:
    rows, even = [], number(found[-1, 0])
    for name, share in zip(MAPS, found[:-1], strict=False):
        parts = dict(zip(PLACES, map(number, share), strict=True))
        rows.append({"layer": layer, "map": name, **parts, "uniform": even})
    return rows


def _table(rows: list[dict[str, Any]]) -> Table:
    columns = ("layer", "map", *PLACES, "answer if uniform")
    return Table("noise", columns, [tuple(row.values()) for row in rows])


def answers(window: Window) -> Places:
    """Whether the token at place s is the one that row t is asked for.

    Of a decoder, which is asked for the next one, for s ≤ t. Of an encoder for s ≠ t:
    its own place shows the token that is asked for by chance, if at all.
    """
    tokens: Any = window.tokens
    same = window.targets[:, None] == tokens[None]
    if window.visible.all():
        same &= ~np.eye(len(same), dtype=bool)
    return same & window.visible


def context(answer: Places, visible: Places, near: int = NEAR) -> Places:
    """The `near` last tokens of every row, its own among them, without its answer; of
    an encoder those less than near/2 places away."""
    distance = distances(visible)
    return (distance < (near // 2 if visible.all() else near)) & ~answer


def distances(visible: Places) -> Float[np.ndarray, "T T"]:
    """How many places away each key is, ∞ where it is not visible."""
    places = np.arange(len(visible))
    return np.where(visible, np.abs(places[:, None] - places[None]), np.inf)


def on_places(
    shares: Shares, answer: Places, context: Places
) -> Float[np.ndarray, "*N 3"]:
    """Mean shares on the answer, on the context, and elsewhere.

    Over the rows that have an answer; NaN if none has.
    """
    rows = answer.any(axis=1)
    if not rows.any():
        return np.full((*shares.shape[:-2], 3), np.nan)
    places = np.stack([answer, context, ~(answer | context)])[:, rows]
    weights = places.astype(np.float64)
    return np.einsum("...ts,pts->...tp", shares[..., rows, :], weights).mean(axis=-2)


def self_share(trained: Trained, asked: Asked) -> Finding:
    """What a row gives itself, by layer and head, where it sees any other key."""

    def measure(window: Window, layer: Layer) -> np.ndarray:
        maps = np.concatenate([shares(layer.map), uniform(window.visible)[None]])
        free = window.visible.sum(axis=-1) > 1
        if not free.any():
            return np.full(len(maps), np.nan)
        return np.diagonal(maps, axis1=-2, axis2=-1)[:, free].mean(axis=-1)

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

    Of rows that see at least 64 keys, or of the last row of a shorter window. In an
    encoder on the tokens less than w places away, before and after.
    """
    if trained.options.model.patch:
        text = ["dilution: none, the patches of an image do not follow each other"]
        return Finding({"dilution": None}, text)

    def measure(window: Window, layer: Layer) -> np.ndarray:
        maps = np.concatenate([shares(layer.map), uniform(window.visible)[None]])
        near = within(maps, window.visible)
        return np.stack([near[:-1].mean(axis=0), near[-1]])

    found = mean_by_layer(trained, asked, measure)
    rows = [
        {"layer": i, "within": dict(zip(map(str, WITHIN), x[0].tolist(), strict=True))}
        for i, x in enumerate(found)
    ]
    named, text = "last {}", "share of |A| on the last w tokens"
    if not config.is_causal(trained.options.model):
        named, text = "nearer than {}", "share of |A| on tokens less than w places away"
    columns = ("layer", *(named.format(w) for w in WITHIN))
    cells = [(row["layer"], *row["within"].values()) for row in rows]
    cells.append(("uniform", *found[0][1].tolist()))
    text = [f"{text}, the row's own among them"]
    return Finding({"dilution": rows}, text, (Table("dilution", columns, cells),))


def within(shares: Shares, visible: Places) -> Float[np.ndarray, "*N w"]:
    """Mean shares on visible tokens less than 1, 4, 16 and 64 places away."""
    distance, seen = distances(visible), visible.sum(axis=-1)
    rows = seen >= min(max(WITHIN), seen.max())
    found = [np.where(distance < w, shares, 0).sum(axis=-1) for w in WITHIN]
    return np.stack(found, axis=-1)[..., rows, :].mean(axis=-2)


def number(x: float) -> float | None:
    """A float for JSON, which has no NaN."""
    return float(x) if np.isfinite(x) else None
