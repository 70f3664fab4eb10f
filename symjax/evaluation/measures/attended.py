"""Shares of attention: on the answer, on nearby tokens, and on the token itself.

A share is |a| of a pair over the sum of |a| of its row; differential maps have negative
weights.
"""

import itertools
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from symjax import config
from symjax.data import generated
from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.measures.answers import DEPTHS, planted
from symjax.evaluation.measures.reading import (
    Layer,
    Window,
    by_layer,
    known_mean,
    mean_over_rows,
    read,
)
from symjax.evaluation.results import Options, Result, Table, none, progress, table
from symjax.figures import Lines, smoothed

NEAR = 16  # tokens before a row that count as its context
ROWS = 8  # read at every depth of a needle
OCTAVES = 0.5  # of keys that rows see: the width within which a curve is smoothed
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
    """The map that gives every visible key the same weight: the reference."""
    return shares(visible)


def noise(run: LoadedRun, options: Options) -> Result:
    """Shares of attention on the answer, the context, and elsewhere, by layer.

    In plain text the answer of a row is every place that holds the next token; rows
    without one do not count. The context is the last 16 other tokens, the row's own
    among them. Needles: see `noise_of_needles`. The targets of an encoder are masked
    tokens: their answers are the other places where the same token is shown, and the
    context are the tokens less than 8 places away. None for
    labels, which are not tokens of the input.
    """
    if run.config.data.source == "needle":
        return noise_of_needles(run, options)
    if run.config.model.classes:
        return none("noise", "labels are not tokens of the input")

    def measure(window: Window, layer: Layer) -> np.ndarray:
        answer = answers(window)
        near = context(answer, window.visible)
        return rows_of_maps(layer, answer, near, window.visible)

    layers = list(by_layer(run, options, measure).values())  # [windows, M T 3] of each
    means = [known_mean(np.concatenate(x, axis=-2), axis=-2) for x in layers]
    rows = [row for layer, found in enumerate(means) for row in _by_map(layer, found)]
    text = [
        "share of |A| on places that hold the next token (answer), on the last "
        f"{NEAR} others (context),",
        "and elsewhere; rows whose next token is new do not count",
    ]
    if not config.is_causal(run.config.model):
        text = [
            "share of |A| of hidden tokens on other places that show the same token "
            "(answer),",
            f"on those less than {NEAR // 2} places away (context), and elsewhere",
        ]
        return Result({"noise": rows}, text, (_table(rows),))
    return Result({"noise": rows}, text, (_table(rows),), (_by_place(layers),))


def _by_place(layers: list[list[Float[np.ndarray, "M T 3"]]]) -> Lines:
    """The share on the answer by the number of keys that a row sees, of all layers."""
    found: dict[str, list[np.ndarray]] = {}
    for shares in itertools.chain(*layers):
        for name, rows in zip(
            (*MAPS[: len(shares) - 1], "uniform"), shares, strict=True
        ):
            found.setdefault(name, []).append(rows[:, 0])
    points, lines = {}, {}
    for name, rows in found.items():
        weights = (~np.isnan(rows)).sum(axis=0)
        keys = np.flatnonzero(weights) + 1
        y = known_mean(rows)[keys - 1].tolist()
        points[name] = keys.tolist(), y
        x = np.log2(keys)
        lines[name] = keys.tolist(), smoothed(x, y, OCTAVES, weights[keys - 1])
    return Lines(
        "noise_by_place",
        "keys a row sees",
        "share of |A| on the answer",
        lines,
        log_x=True,
        title="Attention on places that hold the next token, the mean of all layers",
        points=points,
    )


def noise_of_needles(run: LoadedRun, options: Options) -> Result:
    """Shares of attention at the first question, by the depth of its needle.

    Answer is that needle (mark, key and value), context all other tokens before the
    questions, elsewhere the questions. By layer means over depths, by depth means over
    layers; 8 rows a depth, or `--batches` if that is fewer.

    Source: Ye et al. 2024, arXiv:2410.05258, table 3.
    """
    data, length, model = run.config.data, run.config.model.length, run.decoder()
    count, visible = min(options.batches or ROWS, ROWS), np.tri(length) > 0
    found = []  # [depths, rows, layers, maps + 1, 3]
    for depth in progress(DEPTHS, "depths"):
        drawn = planted(data, length, depth, options.seed)
        found.append([])
        for row in zip(*(x[:count] for x in drawn), strict=True):
            places = *needle_places(data, *row), visible
            layers = [rows_of_maps(x, *places) for x in read(model, row[0])]
            found[-1].append([known_mean(x, axis=-2) for x in layers])
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
    shown = [{**row, "depth": f"{row['depth']:.0%}"} for row in by_depth]
    tables = _table(by_layer), table("noise_by_depth", columns, shown)
    names = ("answer", "context", "uniform")
    curves = {x: (list(DEPTHS), [row[x] for row in by_depth]) for x in names}
    title = "Attention on the needle and on the context, by the depth of the needle"
    figure = Lines(
        "noise_by_depth", "depth of the needle", "share of |A|", curves, title=title
    )
    values = {"noise": by_layer, "noise_by_depth": by_depth}
    return Result(values, text, tables, (figure,))


def needle_places(
    data: config.Data, tokens: Int[np.ndarray, "T"], targets: Int[np.ndarray, "T"]
) -> tuple[Places, Places]:
    """Of the row of the first question: its needle, and the rest before questions."""
    question = np.flatnonzero(targets >= 0)[0]
    places = generated.shown(data, tokens[None])[0]
    its = places[tokens[places[:, -2]] == tokens[question]]
    answer = np.zeros((len(tokens), len(tokens)), bool)
    answer[question, its] = True
    around = np.zeros_like(answer)
    around[question, : question - 1] = True  # up to the token that asks
    return answer, around & ~answer


def rows_of_maps(
    layer: Layer, answer: Places, context: Places, visible: Places
) -> Float[np.ndarray, "M T 3"]:
    """Means over heads of the map, of branches where there are two, and last of a
    uniform map: shares of every row on answer, context and elsewhere."""
    maps = [layer.map[:, None]]
    if layer.lam is not None:
        maps.append(layer.branches)
    found = [on_places(shares(x), answer, context).mean(axis=0) for x in maps]
    found.append(on_places(uniform(visible), answer, context)[None])
    return np.concatenate(found)


def _by_map(layer: int, found: Float[np.ndarray, "M 3"]) -> list[dict[str, Any]]:
    """A record a map; None for NaN, which JSON does not have."""
    known = [[x if np.isfinite(x) else None for x in row] for row in found.tolist()]
    return [
        {"layer": layer, "map": name}
        | dict(zip(PLACES, row, strict=True))
        | {"uniform": known[-1][0]}
        for name, row in zip(MAPS, known[:-1], strict=False)
    ]


def _table(rows: list[dict[str, Any]]) -> Table:
    return table("noise", ("layer", "map", *PLACES, "answer if uniform"), rows)


def answers(window: Window) -> Places:
    """Whether the token at place s equals the target of row t.

    Of a decoder, whose targets are the next tokens, for s ≤ t. Of an encoder for s ≠ t:
    its own place shows the target by chance, if at all.
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
) -> Float[np.ndarray, "*N T 3"]:
    """Shares of every row on the answer, on the context, and elsewhere.

    NaN in rows that have no answer.
    """
    places = np.stack([answer, context, ~(answer | context)]).astype(np.float64)
    found = np.einsum("...ts,pts->...tp", shares, places)
    found[..., ~answer.any(axis=1), :] = np.nan
    return found


def self_share(run: LoadedRun, options: Options) -> Result:
    """The share of a token on itself, by layer and head, where it sees another key."""

    def measure(window: Window, layer: Layer) -> np.ndarray:
        maps = np.concatenate([shares(layer.map), uniform(window.visible)[None]])
        free = window.visible.sum(axis=-1) > 1
        return np.where(free, np.diagonal(maps, axis1=-2, axis2=-1), np.nan)

    rows, cells = [], []
    for layer, found in enumerate(mean_over_rows(run, options, measure)):
        *heads, even = found.tolist()
        mean = sum(heads) / len(heads)
        rows.append({"layer": layer, "mean": mean, "heads": heads, "uniform": even})
        cells.append((layer, mean, min(heads), max(heads), even))
    columns = ("layer", "mean", "least head", "largest head", "if uniform")
    text = ["share of |A| that a token gives itself"]
    return Result({"self_share": rows}, text, (Table("self_share", columns, cells),))


def dilution(run: LoadedRun, options: Options) -> Result:
    """The share of a row on its last w tokens; a small one means diluted attention.

    Of rows that see at least 64 keys, or of the last row of a shorter window. In an
    encoder on the tokens less than w places away, before and after.
    """
    if run.config.model.patch:
        return none("dilution", "the patches of an image do not follow each other")

    def measure(window: Window, layer: Layer) -> np.ndarray:
        maps = np.concatenate([shares(layer.map), uniform(window.visible)[None]])
        near = within(maps, window.visible)
        return np.stack([near[:-1].mean(axis=0), near[-1]])

    found = mean_over_rows(run, options, measure)
    rows = [
        {"layer": i, "within": dict(zip(map(str, WITHIN), x[0].tolist(), strict=True))}
        for i, x in enumerate(found)
    ]
    named, text = "last {}", "share of |A| on the last w tokens"
    if not config.is_causal(run.config.model):
        named, text = "nearer than {}", "share of |A| on tokens less than w places away"
    columns = ("layer", *(named.format(w) for w in WITHIN))
    cells = [(row["layer"], *row["within"].values()) for row in rows]
    cells.append(("uniform", *found[0][1].tolist()))
    text = [f"{text}, the row's own among them"]
    return Result({"dilution": rows}, text, (Table("dilution", columns, cells),))


def within(shares: Shares, visible: Places) -> Float[np.ndarray, "*N w T"]:
    """Return the shares of rows on visible tokens less than 1, 4, 16, 64 places away.

    NaN in rows that see fewer than 64 keys, and fewer than another row.
    """
    distance, seen = distances(visible), visible.sum(axis=-1)
    found = [np.where(distance < w, shares, 0).sum(axis=-1) for w in WITHIN]
    rows = seen >= min(max(WITHIN), seen.max())
    return np.where(rows, np.stack(found, axis=-2), np.nan)
