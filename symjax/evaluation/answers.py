"""Generated tasks: how many of the answers are right, and where."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from symjax import config
from symjax.data import generated
from symjax.data.draws import Draws
from symjax.data.generated import Rows
from symjax.evaluation.asked import Asked
from symjax.evaluation.finding import Finding, Grid, Lines, Table
from symjax.evaluation.trained import Trained

ROWS = 200  # of a point of a curve
SAMPLES = 50  # of a cell of the grid
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
NEEDLES = ((1, 1), (2, 2), (4, 2), (6, 2))  # in the hay, and asked


def mqar(trained: Trained, asked: Asked) -> Finding:
    """Accuracy by the number of pairs.

    Source: Arora et al. 2023, arXiv:2312.04927.
    """
    if (none := _not_learned(trained, "mqar")) is not None:
        return none
    options, length = trained.options.data, trained.options.model.length
    counts = [2**i for i in range(options.items.bit_length()) if 2**i < options.items]
    say, rows = answering(trained), []
    for count in [*counts, options.items]:
        own = replace(options, items=count)
        examples = heldout(own, length, ROWS, asked.seed)
        rows.append((count, _share(say, examples), 1 / options.symbols))
    return _by("mqar", "pairs", rows)


def copy(trained: Trained, asked: Asked) -> Finding:
    """Accuracy by the place in the copy."""
    if (none := _not_learned(trained, "copy")) is not None:
        return none
    options, length = trained.options.data, trained.options.model.length
    examples = heldout(options, length, ROWS, asked.seed)
    right = _right(answering(trained), examples)
    shares = right[:, -options.items :].mean(axis=0)
    rows = [
        (place, float(share), 1 / options.symbols)
        for place, share in enumerate(shares, 1)
    ]
    return _by("copy", "place", rows)


def listops(trained: Trained, asked: Asked) -> Finding:
    """Accuracy by the depth of nesting.

    Source: Nangia & Bowman 2018, arXiv:1804.06028.
    """
    if (none := _not_learned(trained, "listops")) is not None:
        return none
    options, length = trained.options.data, trained.options.model.length
    examples = heldout(options, length, 5 * ROWS, asked.seed)
    right = _right(answering(trained), examples)[:, -1]
    tokens = examples[0]
    opens = (tokens >= generated.MAXIMUM) & (tokens < generated.CLOSE)
    steps = opens.astype(int) - (tokens == generated.CLOSE)
    depths = np.cumsum(steps, axis=1).max(axis=1)
    rows = [
        (int(depth), float(right[depths == depth].mean()), 1 / 10)
        for depth in np.unique(depths)
    ]
    return _by("listops", "depth", rows)


def needle(trained: Trained, asked: Asked) -> Finding:
    """Accuracy by the depth and length at which the first asked needle lies, and by
    the number of needles.

    50 rows a cell; the other needles lie anywhere. Lengths go up to that of training,
    and twice as far where positions allow it.

    Source: Ye et al. 2024, arXiv:2410.05258, section 3.4.
    """
    if (none := _not_learned(trained, "needle")) is not None:
        return none
    options, model = trained.options.data, trained.options.model
    least = generated.GENERATORS["needle"].least(options)
    factors = (0.25, 0.5, 1, 2) if model.positions != "learned" else (0.25, 0.5, 1)
    lengths = [int(f * model.length) for f in factors]
    lengths = [length for length in lengths if length >= least]
    cells = [(depth, length) for depth in DEPTHS for length in lengths]
    say = answering(trained)
    grid = [
        _share(say, planted(options, length, depth, asked.seed), first=True)
        for depth, length in tqdm(cells, "needles", leave=False, disable=None)
    ]
    values = np.reshape(grid, (len(DEPTHS), len(lengths))).tolist()
    columns = ("depth", *(f"{length} tokens" for length in lengths))
    table = [(f"{d:.0%}", *row) for d, row in zip(DEPTHS, values, strict=True)]
    several = []
    for count, wanted in NEEDLES:
        own = replace(options, items=count, asked=wanted)
        fits = generated.GENERATORS["needle"].least(own) <= model.length
        if count <= options.symbols and fits:
            examples = heldout(own, model.length, ROWS, asked.seed)
            several.append((f"{count}, {wanted}", _share(say, examples)))
    chance = 1 / options.symbols
    found = {
        "chance": chance,
        "lengths": lengths,
        "depths": list(DEPTHS),
        "grid": values,
        "needles": dict(several),
    }
    tables = (
        Table("needle_depths", columns, table),
        Table("needle_counts", ("needles, asked", "accuracy"), several),
    )
    figure = Grid(
        "needle_grid",
        "length",
        "depth",
        [str(length) for length in lengths],
        [f"{depth:.0%}" for depth in DEPTHS],
        values,
    )
    return Finding(
        {"needle": found}, [f"needles: chance {chance:.4f}"], tables, (figure,)
    )


def learned(trained: Trained, *sources: str) -> bool:
    """Whether the model was trained on one of these generated tasks."""
    return trained.options.data.source in sources


def _not_learned(trained: Trained, source: str) -> Finding | None:
    if learned(trained, source):
        return None
    text = f"{source}: none, the model was not trained on data.source={source}"
    return Finding({source: None}, [text])


def _by(name: str, label: str, rows: list[tuple[int, float, float]]) -> Finding:
    """Accuracy by one number, beside chance."""
    x, y, chance = (list(map(float, column)) for column in zip(*rows, strict=True))
    columns = (label, "accuracy", "chance")
    found = [dict(zip(columns, row, strict=True)) for row in rows]
    figure = Lines(
        f"{name}_accuracy", label, "accuracy", {name: (x, y), "chance": (x, chance)}
    )
    return Finding({name: found}, [], (Table(name, columns, rows),), (figure,))


def heldout(options: config.Data, length: int, count: int, seed: int) -> Rows:
    """The first held-out rows of a seed."""
    indices = np.arange(count)
    return generated.rows(options, length, seed=seed, indices=indices, heldout=True)


def planted(options: config.Data, length: int, depth: float, seed: int) -> Rows:
    """Held-out rows whose first asked needle lies at a depth."""
    found: list[Rows] = []
    for attempt in range(40 * generated.HELDOUT):
        draws = Draws(seed, np.arange(SAMPLES), attempt)
        depths = draws.uniform(options.items)
        depths[:, 0] = depth
        others = 1 + draws.distinct(max(options.items - 1, 1), options.asked - 1)
        order = np.concatenate([np.zeros((SAMPLES, 1), int), others], axis=1)
        rows = generated.plant(options, length, draws, depths, order)
        kept = generated.is_heldout(rows[0])
        found.append((rows[0][kept], rows[1][kept]))
        if sum(len(tokens) for tokens, _ in found) >= SAMPLES:
            break
    tokens, targets = (
        np.concatenate(parts)[:SAMPLES] for parts in zip(*found, strict=True)
    )
    return tokens, targets


Say = Callable[[np.ndarray], np.ndarray]  # tokens [B, T] → what comes next [B, T]


def answering(trained: Trained) -> Say:
    """A function that gives the likeliest token after each; compiled once a length."""
    model = trained.model()
    answer = jax.jit(lambda tokens: model(tokens).argmax(axis=-1))

    def say(tokens: np.ndarray) -> np.ndarray:
        count = max(1, len(tokens) // SAMPLES)
        parts = np.array_split(tokens, count)
        return np.concatenate([np.asarray(answer(jnp.asarray(x))) for x in parts])

    return say


def _share(say: Say, rows: Rows, *, first: bool = False) -> float:
    """Of all answers, or of the first in each row."""
    right, there = _right(say, rows), rows[1] >= 0
    if first:
        there &= np.cumsum(there, axis=1) == 1
    return float(right[there].mean())


def _right(say: Say, rows: Rows) -> np.ndarray:
    """Where the likeliest token is the target [B, T]."""
    tokens, targets = rows
    return say(tokens) == targets
