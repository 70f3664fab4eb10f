"""Accuracy of answers in the generated tasks, by what makes a row difficult.

Accuracy is the fraction of answers whose likeliest token is the target. Rows are
held-out rows of the task that the model was trained on. Chance is the accuracy of a
random guess among all possible answers.

    mqar     by the number of key-value pairs
    needle   by depth of the needle and length of the row; by number of needles
    copy     by position in the copy; reverse, sort and swap by position in their answer
    listops  by depth of the nested lists
"""

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

ROWS = 200  # rows for each point of a curve (listops: 5 times as many in all)
CELL_ROWS = 50  # rows for each cell of the grid of needles
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
NEEDLES = ((1, 1), (2, 2), (4, 2), (6, 2))  # (needles in a row, questions of the row)

Predict = Callable[[np.ndarray], np.ndarray]  # tokens [B T] → predicted next tokens


def mqar(run: LoadedRun, options: Options) -> Result:
    """Measure accuracy by the number of key-value pairs: 1, 2, 4, … up to data.items.

    Source: Arora et al. 2023, arXiv:2312.04927.
    """
    data, length = run.config.data, run.config.model.length
    counts = [2**i for i in range(data.items.bit_length()) if 2**i < data.items]
    predict, rows = predictor(run), []
    for count in [*counts, data.items]:
        examples = draw_heldout(replace(data, items=count), length, ROWS, options.seed)
        rows.append((count, _accuracy(predict, examples)))
    return _accuracy_by("mqar", "pairs", rows, 1 / data.symbols)


def rearranged(run: LoadedRun, options: Options) -> Result:
    """Measure accuracy by the position in the answer of copy, reverse, sort or swap."""
    data, length = run.config.data, run.config.model.length
    right = _is_right(predictor(run), draw_heldout(data, length, ROWS, options.seed))
    accuracy = right[:, -data.items :].mean(axis=0).tolist()
    places, chance = list(enumerate(accuracy, 1)), 1 / data.symbols
    return _accuracy_by(data.source, "place", places, chance)


def listops(run: LoadedRun, options: Options) -> Result:
    """Measure accuracy by the depth of nesting.

    Source: Nangia & Bowman 2018, arXiv:1804.06028.
    """
    length = run.config.model.length
    examples = draw_heldout(run.config.data, length, 5 * ROWS, options.seed)
    right, tokens = _is_right(predictor(run), examples)[:, -1], examples[0]
    opens = (tokens >= generated.MAXIMUM) & (tokens < generated.CLOSE)
    steps = opens.astype(int) - (tokens == generated.CLOSE)
    depths = np.cumsum(steps, axis=1).max(axis=1)
    rows = [
        (int(depth), float(right[depths == depth].mean()))
        for depth in np.unique(depths)
    ]
    return _accuracy_by("listops", "depth", rows, 1 / 10)


def _accuracy_by(
    name: str, label: str, rows: list[tuple[int, float]], chance: float
) -> Result:
    """Return the result of a task whose accuracy depends on one number, `label`."""
    columns = (label, "accuracy", "chance")
    records = [dict(zip(columns, (*row, chance), strict=True)) for row in rows]
    x = [float(number) for number, _ in rows]
    curves = {name: (x, [y for _, y in rows]), "chance": (x, [chance] * len(x))}
    title = f"Accuracy by {label}, beside chance"
    figure = Lines(f"{name}_accuracy", label, "accuracy", curves, title=title)
    return Result({name: records}, [], (table(name, columns, records),), (figure,))


def needle(run: LoadedRun, options: Options) -> Result:
    """Measure accuracy by depth of the needle and row length, and by number of needles.

    A cell of the grid is the accuracy of the first question over 50 rows. The needle of
    this question lies at the depth of the cell (0 % is the start of the row), and other
    needles lie anywhere. Lengths are 1/4, 1/2 and 1 of the training length, and 2 times
    that length unless positions are learned. Lengths too short for the needles are left
    out. The second table is the accuracy of all questions by the number of needles.

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
        _first_accuracy(predict, rows_with_needle_at(data, length, depth, options.seed))
        for depth, length in progress(cells, "needles")
    ]
    values = np.reshape(grid, (len(DEPTHS), len(lengths))).tolist()
    by_count = {}
    for count, asked in NEEDLES:
        changed = replace(data, items=count, asked=asked)
        if count <= data.symbols and least(changed) <= model.length:
            examples = draw_heldout(changed, model.length, ROWS, options.seed)
            by_count[f"{count}, {asked}"] = _accuracy(predict, examples)
    results = {
        "chance": chance,
        "lengths": lengths,
        "depths": list(DEPTHS),
        "grid": values,
        "needles": by_count,
    }
    depths, columns = [f"{x:.0%}" for x in DEPTHS], [f"{x} tokens" for x in lengths]
    rows = [(depth, *row) for depth, row in zip(depths, values, strict=True)]
    tables = (
        Table("needle_depths", ("depth", *columns), rows),
        Table("needle_counts", ("needles, asked", "accuracy"), list(by_count.items())),
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
    return Result({"needle": results}, text, tables, (figure,))


def draw_heldout(data: config.Data, length: int, count: int, seed: int) -> Rows:
    """Return the first `count` held-out rows of a seed."""
    indices = np.arange(count)
    return generated.rows(data, length, seed=seed, indices=indices, heldout=True)


def rows_with_needle_at(
    data: config.Data, length: int, depth: float, seed: int
) -> Rows:
    """Return 50 held-out rows whose first question asks for the needle at `depth`."""
    batches: list[Rows] = []
    for attempt in range(40 * generated.HELDOUT):
        draws = Draws(seed, np.arange(CELL_ROWS), attempt)
        depths = draws.uniform(data.items)
        depths[:, 0] = depth
        others = 1 + draws.distinct(max(data.items - 1, 1), data.asked - 1)
        order = np.concatenate([np.zeros((CELL_ROWS, 1), int), others], axis=1)
        tokens, targets = generated.plant(data, length, draws, depths, order)
        heldout = generated.is_heldout(tokens)
        batches.append((tokens[heldout], targets[heldout]))
        if sum(len(tokens) for tokens, _ in batches) >= CELL_ROWS:
            break
    tokens, targets = map(np.concatenate, zip(*batches, strict=True))
    return tokens[:CELL_ROWS], targets[:CELL_ROWS]


def predictor(run: LoadedRun) -> Predict:
    """Return a function that predicts every next token, compiled for each length."""
    model = run.decoder()
    likeliest = jax.jit(lambda tokens: model(tokens).argmax(axis=-1))

    def predict(tokens: np.ndarray) -> np.ndarray:
        parts = np.array_split(tokens, max(1, len(tokens) // CELL_ROWS))
        return np.concatenate([np.asarray(likeliest(jnp.asarray(x))) for x in parts])

    return predict


def _accuracy(predict: Predict, rows: Rows) -> float:
    """Return the accuracy of all answers."""
    return float(_is_right(predict, rows)[rows[1] >= 0].mean())


def _first_accuracy(predict: Predict, rows: Rows) -> float:
    """Return the accuracy of the first answer of each row."""
    answers = rows[1] >= 0
    first = answers & (np.cumsum(answers, axis=1) == 1)
    return float(_is_right(predict, rows)[first].mean())


def _is_right(predict: Predict, rows: Rows) -> np.ndarray:
    """Return True where the likeliest token is the target [B T]."""
    tokens, targets = rows
    return predict(tokens) == targets
