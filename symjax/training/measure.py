"""The mean loss of a model over batches, and how often it is right."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array

from symjax.data.batches import Rows
from symjax.training.step import Program


class Means(NamedTuple):
    """
    Attributes:
        loss: Σ weight · loss / Σ weight over all batches, in nats a token.
        accuracy: the share of targets that have the highest score, weighed likewise.
    """

    loss: float
    accuracy: float


def means(
    program: Program,
    params: Any,
    constants: Any,
    shape: tuple[int, int],
    batches: Iterable[Rows],
    key: Array | None = None,
) -> Means:
    """Loss and accuracy over all batches.

    Args:
        shape: (rows, length) of each batch.
        batches: functions that give some of the rows.
        key: turns dropout on; None is evaluation.
    """
    total = weight = right = 0.0
    for index, batch in enumerate(batches):
        rows = program.place(shape, batch)
        here = None if key is None else jax.random.fold_in(key, index)
        with jax.set_mesh(program.mesh):
            part = program.evaluate(params, constants, *rows, here)
        total += float(part[0])
        weight += float(part[1])
        right += float(part[2])
    return Means(total / weight, right / weight)
