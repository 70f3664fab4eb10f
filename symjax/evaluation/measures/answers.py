"""Accuracy of the answers in generated tasks, by what makes them hard."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from symjax import config
from symjax.data import generated
from symjax.data.draws import Draws
from symjax.data.generated import Rows
from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.results import Options, Result, Table, progress, table
from symjax.figures import Grid, Lines

ROWS = 200  # of a point of a curve
SAMPLES = 50  # of a cell of the grid
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
NEEDLES = ((1, 1), (2, 2), (4, 2), (6, 2))  # (needles in the row, needles asked for)

Predict = Callable[[np.ndarray], np.ndarray]  # tokens [B, T] → the next ones [B, T]


def mqar(run: LoadedRun, options: Options) -> Result:
    """Accuracy by the number of pairs.

    Source: Arora et al. 2023, arXiv:2312.04927.
    """
    data, length = run.config.data, run.config.model.length
    counts = [2**i for i in range(data.items.bit_length()) if 2**i < data.items]
    predict, rows = predictor(run), []
    for count in [*counts, data.items]:
        examples = heldout(replace(data, items=count), length, ROWS, options.seed)
        rows.append((count, _accuracy(predict, examples)))
    return _by("mqar", "pairs", rows, 1 / data.symbols)


def copy(run: LoadedRun, options: Options) -> Result:
    """Accuracy by the place in the copy."""
    data, length = run.config.data, run.config.model.length
    right = _right(predictor(run), heldout(data, length, ROWS, options.seed))
    accuracy = right[:, -data.items :].mean(axis=0).tolist()
    return _by("copy", "place", list(enumerate(accuracy, 1)), 1 / data.symbols)


def listops(run: LoadedRun, options: Options) -> Result:
    """Accuracy by the depth of nesting.

    Source: Nangia & Bowman 2018, arXiv:1804.06028.
    """
    length = run.config.model.length
    examples = heldout(run.config.data, length, 5 * ROWS, options.seed)
    right, tokens = _right(predictor(run), examples)[:, -1], examples[0]
    opens = (tokens >= generated.MAXIMUM) & (tokens < generated.CLOSE)
    steps = opens.astype(int) - (tokens == generated.CLOSE)
    depths = np.cumsum(steps, axis=1).max(axis=1)
    rows = [
        (int(depth), float(right[depths == depth].mean()))
        for depth in np.unique(depths)
    ]
    return _by("listops", "depth", rows, 1 / 10)


def _by(name: str, label: str, rows: list[tuple[int, float]], chance: float) -> Result:
    """Accuracy by one number, beside chance."""
    columns = (label, "accuracy", "chance")
    records = [dict(zip(columns, (*row, chance), strict=True)) for row in rows]
    x = [float(number) for number, _ in rows]
    curves = {name: (x, [y for _, y in rows]), "chance": (x, [chance] * len(x))}
    title = f"Accuracy by {label}, beside chance"
    figure = Lines(f"{name}_accuracy", label, "accuracy", curves, title=title)
    return Result({name: records}, [], (table(name, columns, records),), (figure,))


def needle(run: LoadedRun, options: Options) -> Result:
    """Accuracy by the depth and length at which the first asked needle lies, and by
    the number of needles.

    50 rows a cell; the other needles lie anywhere. Lengths go up to that of training,
    and twice as far where positions allow it.

    Source: Ye et al. 2024, arXiv:2410.05258, section 3.4.
    """
    data, model = run.config.data, run.config.model
    least = generated.GENERATORS["needle"].least
    factors = (0.25, 0.5, 1, 2) if model.positions != "learned" else (0.25, 0.5, 1)
    lengths = [int(f * model.length) for f in factors]
    lengths = [length for length in lengths if length >= least(data)]
    cells = [(depth, length) for depth in DEPTHS for length in lengths]
    predict, chance = predictor(run), 1 / data.symbols
    grid = [
        _accuracy(predict, planted(data, length, depth, options.seed), first=True)
        for depth, length in progress(cells, "needles")
    ]
    values = np.reshape(grid, (len(DEPTHS), len(lengths))).tolist()
    several = {}
    for count, wanted in NEEDLES:
        own = replace(data, items=count, asked=wanted)
        if count <= data.symbols and least(own) <= model.length:
            examples = heldout(own, model.length, ROWS, options.seed)
            several[f"{count}, {wanted}"] = _accuracy(predict, examples)
    found = {
        "chance": chance,
        "lengths": lengths,
        "depths": list(DEPTHS),
        "grid": values,
        "needles": several,
    }
    depths, columns = [f"{x:.0%}" for x in DEPTHS], [f"{x} tokens" for x in lengths]
    rows = [(depth, *row) for depth, row in zip(depths, values, strict=True)]
    tables = (
        Table("needle_depths", ("depth", *columns), rows),
        Table("needle_counts", ("needles, asked", "accuracy"), list(several.items())),
    )
    labels = list(map(str, lengths))
    title = "Needles found, by the depth of the needle and tokens of the row"
    figure = Grid(
        "needle_grid",
        "length in tokens",
        "depth",
        labels,
        depths,
        values,
        title,
        limit=1.0,
        unit="accuracy",
    )
    text = [f"needles: chance {chance:.4f}"]
    return Result({"needle": found}, text, tables, (figure,))


def heldout(data: config.Data, length: int, count: int, seed: int) -> Rows:
    """The first held-out rows of a seed."""
    indices = np.arange(count)
    return generated.rows(data, length, seed=seed, indices=indices, heldout=True)


def planted(data: config.Data, length: int, depth: float, seed: int) -> Rows:
    """Held-out rows whose first asked needle lies at a depth."""
    found: list[Rows] = []
    for attempt in range(40 * generated.HELDOUT):
        draws = Draws(seed, np.arange(SAMPLES), attempt)
        depths = draws.uniform(data.items)
        depths[:, 0] = depth
        others = 1 + draws.distinct(max(data.items - 1, 1), data.asked - 1)
        order = np.concatenate([np.zeros((SAMPLES, 1), int), others], axis=1)
        tokens, targets = generated.plant(data, length, draws, depths, order)
        kept = generated.is_heldout(tokens)
        found.append((tokens[kept], targets[kept]))
        if sum(len(tokens) for tokens, _ in found) >= SAMPLES:
            break
    tokens, targets = map(np.concatenate, zip(*found, strict=True))
    return tokens[:SAMPLES], targets[:SAMPLES]


def predictor(run: LoadedRun) -> Predict:
    """A function that gives the likeliest token after each; compiled once a length."""
    model = run.decoder()
    likeliest = jax.jit(lambda tokens: model(tokens).argmax(axis=-1))

    def predict(tokens: np.ndarray) -> np.ndarray:
        parts = np.array_split(tokens, max(1, len(tokens) // SAMPLES))
        return np.concatenate([np.asarray(likeliest(jnp.asarray(x))) for x in parts])

    return predict


def _accuracy(predict: Predict, rows: Rows, *, first: bool = False) -> float:
    """Of all answers, or of the first in each row."""
    right, there = _right(predict, rows), rows[1] >= 0
    if first:
        there &= np.cumsum(there, axis=1) == 1
    return float(right[there].mean())


def _right(predict: Predict, rows: Rows) -> np.ndarray:
    """Where the likeliest token is the target [B, T]."""
    tokens, targets = rows
    return predict(tokens) == targets
