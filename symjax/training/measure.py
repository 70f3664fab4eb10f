"""The mean loss of a model over batches of text."""

from collections.abc import Iterable
from typing import Any

import jax
from jaxtyping import Array

from symjax.data.batches import Rows
from symjax.training.step import Program


def mean_loss(
    program: Program,
    params: Any,
    constants: Any,
    shape: tuple[int, int],
    batches: Iterable[Rows],
    key: Array | None = None,
) -> float:
    """Σ weight · loss / Σ weight over all batches, in nats a token.

    Args:
        shape: (rows, length) of each batch.
        batches: functions that give some of the rows.
        key: turns dropout on; None is evaluation.
    """
    total = weight = 0.0
    for index, batch in enumerate(batches):
        rows = program.place(shape, batch)
        here = None if key is None else jax.random.fold_in(key, index)
        with jax.set_mesh(program.mesh):
            part = program.evaluate(params, constants, *rows, here)
        total += float(part[0])
        weight += float(part[1])
    return total / weight
