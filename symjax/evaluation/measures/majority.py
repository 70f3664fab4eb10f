"""Accuracy of the majority of a set, by the number of its samples (task `sets`).

Rows are held-out rows of data.source=sets. The answer after n samples is their most
frequent symbol. Rows with a tie are left out. The same samples are read twice: as they
were drawn, and sorted, so that equal symbols are neighbours. Sorting does not change
the answer, but it changes which samples are near.

A uniform attention map is the best one for every n. Log-n scaling
(model.attention.length_base) multiplies scores by log n / log base, so that a map that
is almost uniform becomes less uniform in rows longer than those of training.
"""

from typing import Any

import numpy as np
from jaxtyping import Int

from symjax.data.samples import majorities
from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.measures.answers import Predict, draw_heldout, predictor
from symjax.evaluation.results import Options, Result, series, table
from symjax.figures import Lines

ROWS = 500  # rows for each point of a curve
LONGEST = 4  # length of the longest rows, divided by that of training rows


def sets(run: LoadedRun, options: Options) -> Result:
    """Measure accuracy by the number of samples: 3, 7, 15, … and the training length.

    Unless positions are learned, rows of 2 and 4 times that length are measured too.
    """
    data, model = run.config.data, run.config.model
    lengths = [model.length]
    if model.positions != "learned":
        lengths += [2**i * model.length for i in range(1, LONGEST.bit_length())]
    counts = [2**i - 1 for i in range(2, 20) if 2**i <= model.length]
    tokens, _ = draw_heldout(data, lengths[-1], ROWS, options.seed)
    predict, chance, rows = predictor(run), 1 / data.symbols, []
    for count in (*counts, *lengths):
        row: dict[str, Any] = {"samples": count}
        # A decoder does not see later tokens, so one program works for all counts.
        cut = tokens[:, : max(count, model.length)]
        row["as drawn"] = accuracy_after(predict, cut, count)
        ordered = np.concatenate(
            [np.sort(cut[:, :count], axis=1), cut[:, count:]], axis=1
        )
        row["in order"] = accuracy_after(predict, ordered, count)
        rows.append(row | {"chance": chance})
    orders = ("as drawn", "in order", "chance")
    points = [(name, row["samples"], row[name]) for name in orders for row in rows]
    title = f"Accuracy of the majority; rows of training have {model.length} samples"
    figure = Lines(
        "sets_accuracy", "samples", "accuracy", series(points), log_x=True, title=title
    )
    columns = ("samples", *orders)
    return Result({"sets": rows}, [], (table("sets", columns, rows),), (figure,))


def accuracy_after(
    predict: Predict, tokens: Int[np.ndarray, "B T"], count: int
) -> float | None:
    """Return the accuracy after `count` samples; None if all rows have a tie."""
    wanted = majorities(tokens[:, :count])[:, -1]
    found = predict(tokens)[:, count - 1]
    return float((found == wanted)[wanted >= 0].mean()) if any(wanted >= 0) else None
