"""The best value of the keys of --tune, chosen on a quarter of the held-out rows.

`split` divides the held-out rows. Values are chosen on a quarter of the rows, the
choosing rows. Held-out losses of the comparison are measured on the other rows, the
judging rows. Each value is trained once, with the first seed. A configuration then uses
the value with the least loss on the choosing rows.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from symjax.data.batches import Examples
from symjax.distributed.exit_codes import print_warning
from symjax.evaluation.loading import load
from symjax.programs.commandline import Command
from symjax.programs.comparison.runs import Plan, train_missing
from symjax.training.step import means

PARTS = 4  # choosing rows are 1/PARTS of the held-out rows
FIRST_CHOOSING = 2**30  # number of the first choosing row of a generated task

Place = Callable[[np.ndarray], np.ndarray]  # row numbers in a part → among all rows


class Split(NamedTuple):
    """Held-out rows in two parts that share no target."""

    choosing: Examples
    judging: Examples


class Choice(NamedTuple):
    """Chosen value of the tuned keys of a configuration.

    Attributes:
        value: the chosen value, as KEY=VALUE.
        losses: loss on the choosing rows by value; infinite if training diverged.
    """

    name: str
    value: str
    losses: dict[str, float]

    def __str__(self) -> str:
        tried = ", ".join(f"{value} {loss:.4f}" for value, loss in self.losses.items())
        return f"{self.name}: {self.value}{self._at_the_end()}; losses: {tried}"

    def _at_the_end(self) -> str:
        """Return a remark if the chosen value is the least or the largest tried."""
        try:
            tried = {x: float(x.partition("=")[2]) for x in self.losses}
        except ValueError:  # several keys, or a value that is no number
            return ""
        if self.value == max(tried, key=tried.__getitem__):
            return " (the largest tried)"
        if self.value == min(tried, key=tried.__getitem__):
            return " (the least tried)"
        return ""


def tune(
    plan: Plan, batches: int | None, tell: Callable[[str], None]
) -> tuple[dict[str, list[Command]], list[Choice]]:
    """Train every value with the first seed, and return the runs of the best values.

    Args:
        batches: number of batches of choosing rows; None means all.
        tell: called with a line for each configuration.
    Raises:
        ValueError: a configuration diverges with every value.
    """
    runs, choices = {}, []
    for name, values in plan.items():
        losses = {x: _choosing_loss(runs[0], batches) for x, runs in values.items()}
        value = min(losses, key=losses.__getitem__)
        if losses[value] == math.inf:
            raise ValueError(f"{name} diverges with every value: {', '.join(losses)}")
        choices.append(Choice(name, value, losses))
        tell(f"--tune: {choices[-1]}")
        runs[name] = values[value]
    return runs, choices


def _choosing_loss(command: Command, batches: int | None) -> float:
    """Train a run unless it is complete, and return its loss on the choosing rows."""
    try:
        train_missing(command)
    except FloatingPointError as error:
        print_warning(str(error))
        return math.inf
    run = load(command.workdir)
    shape = run.config.batch_size, run.config.model.length
    rows = split(run.examples, shape[1]).choosing.heldout_batches(shape, batches)
    return means(run.program, run.params, run.constants, shape, rows).loss


def split(examples: Examples, length: int) -> Split:
    """Divide held-out rows into choosing rows and judging rows.

    The last quarter of the rows of a text is for choosing; the last row may be short.
    Judging windows longer than `length` end before the choosing rows too. Every fourth
    row of labelled examples is for choosing, since neighbours may have the same label.
    Generated tasks have any number of rows: their choosing rows begin at row 2³⁰.

    Args:
        length: tokens of a row of training.
    Raises:
        ValueError: there are fewer than two rows.
    """
    rows = examples.heldout_rows
    if rows is None:
        return Split(
            _part(examples, lambda numbers: numbers + FIRST_CHOOSING), examples
        )
    total = rows(length)
    if total < 2:
        raise ValueError(f"--tune divides held-out rows: {total} row is not enough")
    if examples.labels:
        others = PARTS - 1
        return Split(
            _part(
                examples,
                lambda numbers: PARTS * numbers,
                lambda length: -(-rows(length) // PARTS),
            ),
            _part(
                examples,
                lambda numbers: numbers + numbers // others + 1,
                lambda length: rows(length) - -(-rows(length) // PARTS),
            ),
        )
    judging = total - max(1, total // PARTS)
    end = judging * length  # the first token that only choosing rows read
    return Split(
        _part(examples, lambda numbers: judging + numbers, lambda _: total - judging),
        dataclasses.replace(
            _part(examples, lambda numbers: numbers, lambda length: end // length),
            longest=end,
        ),
    )


def _part(
    examples: Examples, place: Place, count: Callable[[int], int] | None = None
) -> Examples:
    """Return examples whose held-out rows are a part of those of `examples`.

    Args:
        place: maps the number of a row in the part to its number among all rows.
        count: returns the number of rows of a given length; None if there is no end.
    """

    def heldout(numbers: np.ndarray, length: int) -> tuple[Any, ...]:
        """Return rows of the part; those after its end have weight 0."""
        known = numbers if count is None else np.minimum(numbers, count(length) - 1)
        inputs, targets, weights = examples.read_heldout(place(known), length)
        return inputs, targets, weights * (known == numbers)[:, None]

    return dataclasses.replace(examples, read_heldout=heldout, heldout_rows=count)
