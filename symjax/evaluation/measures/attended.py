"""Shares of attention: on the answer, on the context, on the last tokens, on itself.

All tasks of this file measure shares. The share of row t on a set of keys s is

    Σ_{s in the set} |a_ts| / Σ_s |a_ts|

where a is the attention map of a head: A, or A₁ − λA₂ in differential attention, whose
weights may be negative. A share lies between 0 and 1. The tables also have the share of
the uniform map, which gives the same weight to all keys that a row of the layer sees.
If the share of a layer is larger than that of the uniform map, its attention favours
these keys. In the table of `noise` only the answer has a uniform share.

    noise        shares on the answer, on the context and elsewhere: how much of the
                 attention goes to the tokens that matter
    self_share   share of a token on itself
    dilution     shares on the last 1, 4, 16, 64 tokens: how far attention spreads

Shares are means over the rows of a few held-out windows. They are also means over
heads, except in the columns per head. For models of the data source `needle`, `noise`
reads rows with needles at chosen depths instead of windows.
"""

import itertools
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from symjax import config
from symjax.data import generated
from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.measures.answers import DEPTHS, rows_with_needle_at
from symjax.evaluation.measures.reading import (
    Layer,
    by_layer,
    mean_over_rows,
    nan_mean,
    read,
    visible_by_layer,
)
from symjax.evaluation.measures.windows import Window, check_window
from symjax.evaluation.results import (
    Options,
    Result,
    Table,
    not_applicable,
    progress,
    table,
)
from symjax.figures import Lines, smoothed

CONTEXT = 16  # number of last tokens that count as context
ROWS = 8  # rows that are read at each depth of a needle
OCTAVES = 0.5  # width of the smoothing of a curve, in octaves of the position
WITHIN = (1, 4, 16, 64)  # numbers of last tokens in the task `dilution`
MAPS = ("A", "A₁", "A₂")  # the map of a head, and its branches if it is differential
CATEGORIES = ("answer", "context", "elsewhere")

Shares = Float[np.ndarray, "*N T T"]
Pairs = Bool[np.ndarray, "T T"]  # [t, s] is True if key s is in a set of row t


def shares(maps: Float[np.ndarray, "*N T T"]) -> Shares:
    """Return |a| divided by the sum of its row, in float64; rows of zeros stay zero."""
    size = np.abs(maps.astype(np.float64))
    total = size.sum(axis=-1, keepdims=True)
    return size / np.where(total == 0, 1, total)


def uniform_map(visible: Pairs) -> Float[np.ndarray, "T T"]:
    """Return the map that gives every visible key the same weight."""
    return shares(visible)


def noise(run: LoadedRun, options: Options) -> Result:
    """Measure shares of |A| on the answer, the context and elsewhere, by layer.

    The number to read is `answer`, the share of a row on the keys that hold its target.
    If `answer` exceeds "answer if uniform", attention finds answers. What falls on
    other keys, `context` and `elsewhere`, is called noise here; the noise map of
    differential attention is something else. In a differential layer, compare the rows
    A (A₁ − λA₂) and A₁ of the table: if `answer` is larger in A, the subtraction has
    removed noise.

    In text with the tokens x, for row t, whose target is the next token x_{t+1}:
        answer     the keys with x_s = x_{t+1} that the row sees; rows without such keys
                   are left out
        context    the last 16 keys, t included, except answers
        elsewhere  all other keys
    In an encoder that predicts masked tokens, for a masked position t:
        answer     other positions that show the token masked at t
        context    the positions less than 8 away, except answers
        elsewhere  all other positions
    For rows of needles see `noise_of_needles`. The task is not defined for classifiers,
    whose labels are no tokens of the input.

    Returns:
        A table with one row per layer and map (A; A₁ and A₂ if differential). Its
        shares are means over heads and over the rows that are not left out. For
        decoders the result also has a figure of `answer` by the position of the row, as
        means over layers.
    """
    if run.config.data.source == "needle":
        return noise_of_needles(run, options)
    if run.config.model.classes:
        return not_applicable("noise", "labels are not tokens of the input")

    def measure(window: Window, layer: Layer) -> np.ndarray:
        answer = answer_pairs(window)
        context = context_pairs(answer, window.visible)
        return category_shares_of_layer(layer, answer, context, window.visible)

    by_layer_and_window = list(
        by_layer(run, options, measure).values()
    )  # [layers, windows]
    means = [nan_mean(np.concatenate(x, axis=-2), axis=-2) for x in by_layer_and_window]
    rows = [row for layer, x in enumerate(means) for row in _records(layer, x)]
    text = [
        "share of |A| on places that hold the next token (answer), on the last "
        f"{CONTEXT} places except answers (context),",
        "and elsewhere; rows whose next token is new do not count",
    ]
    if not config.is_causal(run.config.model):
        text = [
            "share of |A| of masked tokens on other places that show the same token "
            "(answer),",
            f"on places less than {CONTEXT // 2} away except answers, itself included "
            "(context), and elsewhere",
        ]
        return Result({"noise": rows}, text, (_table(rows),))
    figure = _answer_by_position_figure(by_layer_and_window)
    return Result({"noise": rows}, text, (_table(rows),), (figure,))


def _answer_by_position_figure(layers: list[list[Float[np.ndarray, "M T 3"]]]) -> Lines:
    """Plot the share on the answer by the position of the row, over all layers."""
    answers: dict[str, list[np.ndarray]] = {}
    for maps in itertools.chain(*layers):
        names = (*MAPS[: len(maps) - 1], "uniform")
        for name, rows in zip(names, maps, strict=True):
            answers.setdefault(name, []).append(rows[:, 0])
    points, lines = {}, {}
    for name, rows in answers.items():
        weights = (~np.isnan(rows)).sum(axis=0)
        positions = np.flatnonzero(weights) + 1
        y = nan_mean(rows)[positions - 1].tolist()
        points[name] = positions.tolist(), y
        x = np.log2(positions)
        y = smoothed(x, y, OCTAVES, weights[positions - 1])
        lines[name] = positions.tolist(), y
    return Lines(
        "noise_by_place",
        "position of the row, from 1",
        "share of |A| on the answer",
        lines,
        log_x=True,
        title="Attention on places that hold the next token, the mean of all layers",
        points=points,
    )


def noise_of_needles(run: LoadedRun, options: Options) -> Result:
    """Measure shares of |A| in the row of the first question about needles, by depth.

        answer     mark, key and value of the needle that the question asks for
        context    all other tokens before the questions
        elsewhere  the two tokens of the question

    Numbers by layer are means over depths, numbers by depth are means over layers. Each
    depth has 8 rows, or `--batches` if that is fewer.

    Source: Ye et al. 2024, arXiv:2410.05258, table 3.
    """
    if options.window is not None:
        check_window(run, options.window)
    data, length, model = run.config.data, run.config.model.length, run.decoder()
    count, visible = min(options.batches or ROWS, ROWS), visible_by_layer(model, length)
    measured = []  # [depths, rows, layers, maps + 1, 3]
    for depth in progress(DEPTHS, "depths"):
        drawn = rows_with_needle_at(data, length, depth, options.seed)
        measured.append([])
        for row in zip(*(x[:count] for x in drawn), strict=True):
            answer, context = needle_pairs(data, *row)
            layers = [
                category_shares_of_layer(layer, answer, context, pairs)
                for layer, pairs in zip(read(model, row[0]), visible, strict=True)
            ]
            measured[-1].append([nan_mean(x, axis=-2) for x in layers])
    layers = [np.array(x).mean(axis=0) for x in zip(*sum(measured, []), strict=True)]
    records = [record for i, x in enumerate(layers) for record in _records(i, x)]
    by_depth = []
    for depth, rows in zip(DEPTHS, measured, strict=True):
        mean, uniform = np.mean(
            [[x[[0, -1]] for x in row] for row in rows], axis=(0, 1)
        )
        parts = dict(zip(CATEGORIES, mean.tolist(), strict=True))
        by_depth.append({"depth": depth, **parts, "uniform": float(uniform[0])})
    text = [
        "share of |A| of the first question on its needle (answer), on all else before",
        "the questions (context), and elsewhere; by depth the mean over layers",
    ]
    columns = ("depth", *CATEGORIES, "answer if uniform")
    shown = [{**row, "depth": f"{row['depth']:.0%}"} for row in by_depth]
    tables = _table(records), table("noise_by_depth", columns, shown)
    names = ("answer", "context", "uniform")
    curves = {x: (list(DEPTHS), [row[x] for row in by_depth]) for x in names}
    title = "Attention on the needle and on the context, by the depth of the needle"
    figure = Lines(
        "noise_by_depth", "depth of the needle", "share of |A|", curves, title=title
    )
    values = {"noise": records, "noise_by_depth": by_depth}
    return Result(values, text, tables, (figure,))


def needle_pairs(
    data: config.Data, tokens: Int[np.ndarray, "T"], targets: Int[np.ndarray, "T"]
) -> tuple[Pairs, Pairs]:
    """Return (answer, context) of the first question in a row of needles."""
    question = np.flatnonzero(targets >= 0)[0]
    needles = generated.example_places(data, tokens[None])[0]
    asked = needles[tokens[needles[:, -2]] == tokens[question]]
    answer = np.zeros((len(tokens), len(tokens)), bool)
    answer[question, asked] = True
    before = np.zeros_like(answer)
    # The question has two tokens, and `question` is the place of the second one.
    before[question, : question - 1] = True
    return answer, before & ~answer


def category_shares_of_layer(
    layer: Layer, answer: Pairs, context: Pairs, visible: Pairs
) -> Float[np.ndarray, "M T 3"]:
    """Return the shares of every row on answer, context and elsewhere.

    The M maps are the map of the layer, its two branches if it is differential, and
    last the uniform map. Shares of the layer's maps are means over heads.
    """
    maps = [layer.map[:, None]]
    if layer.lam is not None:
        maps.append(layer.branches)
    means = [category_shares(shares(x), answer, context).mean(axis=0) for x in maps]
    means.append(category_shares(uniform_map(visible), answer, context)[None])
    return np.concatenate(means)


def _records(layer: int, means: Float[np.ndarray, "M 3"]) -> list[dict[str, Any]]:
    """Return a record for each map, with None for NaN, which JSON does not have."""
    known = [[x if np.isfinite(x) else None for x in row] for row in means.tolist()]
    return [
        {"layer": layer, "map": name}
        | dict(zip(CATEGORIES, row, strict=True))
        | {"uniform": known[-1][0]}
        for name, row in zip(MAPS, known[:-1], strict=False)
    ]


def _table(rows: list[dict[str, Any]]) -> Table:
    return table("noise", ("layer", "map", *CATEGORIES, "answer if uniform"), rows)


def answer_pairs(window: Window) -> Pairs:
    """Return the pairs (t, s) whose token s equals the target of row t.

    Hidden pairs are left out. In an encoder so is the pair (t, t): some tokens that the
    model must predict are shown unchanged.
    """
    tokens: Any = window.tokens
    same = window.targets[:, None] == tokens[None]
    if sees_later_keys(window.visible):
        same &= ~np.eye(len(same), dtype=bool)
    return same & window.visible


def context_pairs(answer: Pairs, visible: Pairs, size: int = CONTEXT) -> Pairs:
    """Return, for each row t, the keys t − size + 1 … t that are no answers.

    In an encoder these are the keys less than size/2 positions away on either side.
    """
    distance = distances(visible)
    near = size // 2 if sees_later_keys(visible) else size
    return (distance < near) & ~answer


def sees_later_keys(visible: Pairs) -> bool:
    """Return whether rows see keys after them, as in an encoder."""
    return bool(np.triu(visible, 1).any())


def distances(visible: Pairs) -> Float[np.ndarray, "T T"]:
    """Return |t − s| of every visible pair, and ∞ at hidden pairs."""
    positions = np.arange(len(visible))
    return np.where(visible, np.abs(positions[:, None] - positions[None]), np.inf)


def category_shares(
    shares: Shares, answer: Pairs, context: Pairs
) -> Float[np.ndarray, "*N T 3"]:
    """Return the shares of every row on the answer, on the context, and elsewhere.

    Rows without an answer are NaN.
    """
    sets = np.stack([answer, context, ~(answer | context)]).astype(np.float64)
    sums = np.einsum("...ts,pts->...tp", shares, sets)
    sums[..., ~answer.any(axis=1), :] = np.nan
    return sums


def self_share(run: LoadedRun, options: Options) -> Result:
    """Measure the share of a token on itself, |a_tt| / Σ_s |a_ts|, by layer and head.

    A row that sees only itself is left out. A share above the column "if uniform" means
    that tokens attend to themselves more than to an average key.
    """

    def measure(window: Window, layer: Layer) -> np.ndarray:
        maps = np.concatenate([shares(layer.map), uniform_map(window.visible)[None]])
        sees_others = window.visible.sum(axis=-1) > 1
        return np.where(sees_others, np.diagonal(maps, axis1=-2, axis2=-1), np.nan)

    rows, cells = [], []
    for layer, means in enumerate(mean_over_rows(run, options, measure)):
        *heads, uniform = means.tolist()
        mean = sum(heads) / len(heads)
        rows.append({"layer": layer, "mean": mean, "heads": heads, "uniform": uniform})
        cells.append((layer, mean, min(heads), max(heads), uniform))
    columns = ("layer", "mean", "least head", "largest head", "if uniform")
    text = ["share of |A| that a token gives itself"]
    return Result({"self_share": rows}, text, (Table("self_share", columns, cells),))


def dilution(run: LoadedRun, options: Options) -> Result:
    """Measure the shares of rows on their last 1, 4, 16, 64 tokens, by layer.

    Small shares mean that attention is spread (diluted) over distant tokens. Shares are
    means over the rows that see at least 64 keys; if there are none, over the rows that
    see the most. In an encoder the share is that of the tokens less than 1, 4, 16, 64
    positions away on either side.
    """
    if run.config.model.patch:
        return not_applicable(
            "dilution", "the patches of an image do not follow each other"
        )

    def measure(window: Window, layer: Layer) -> np.ndarray:
        maps = np.concatenate([shares(layer.map), uniform_map(window.visible)[None]])
        near = shares_within(maps, window.visible)
        return np.stack([near[:-1].mean(axis=0), near[-1]])

    means = mean_over_rows(run, options, measure)
    rows = [
        {"layer": i, "within": dict(zip(map(str, WITHIN), x[0].tolist(), strict=True))}
        for i, x in enumerate(means)
    ]
    column, text = "last {}", "share of |A| on the last w tokens"
    if not config.is_causal(run.config.model):
        column, text = (
            "nearer than {}",
            "share of |A| on tokens less than w places away",
        )
    columns = ("layer", *(column.format(w) for w in WITHIN))
    cells = [(row["layer"], *row["within"].values()) for row in rows]
    uniform = [tuple(x[1].tolist()) for x in means]
    if len(set(uniform)) == 1:
        cells.append(("uniform", *uniform[0]))
    else:  # layers have different sliding windows
        cells += [(f"uniform, layer {i}", *x) for i, x in enumerate(uniform)]
    text = [f"{text}, the row's own among them"]
    return Result({"dilution": rows}, text, (Table("dilution", columns, cells),))


def shares_within(shares: Shares, visible: Pairs) -> Float[np.ndarray, "*N w T"]:
    """Return the shares of rows on visible keys less than 1, 4, 16, 64 positions away.

    Rows that see fewer than 64 keys are NaN. If all do, those with the most keys are
    kept.
    """
    distance, keys = distances(visible), visible.sum(axis=-1)
    near = [np.where(distance < w, shares, 0).sum(axis=-1) for w in WITHIN]
    counted = keys >= min(max(WITHIN), keys.max())
    return np.where(counted, np.stack(near, axis=-2), np.nan)
