"""The mean loss of a model on consecutive windows of text, without dropout."""

from typing import Any

import jax
import numpy as np

from symjax.data.batches import heldout_batches
from symjax.training.step import Program


def mean_loss(
    program: Program,
    params: Any,
    constants: Any,
    tokens: np.ndarray,
    *,
    length: int,
    batch_size: int,
    batches: int | None = None,
) -> float:
    """Nats a token over the first `batches` batches of `tokens`; None: all of them.

    Each target is counted once. Under the program's mesh.
    """
    shape = (batch_size, length)
    total, weight = 0.0, 0.0
    for arrays in heldout_batches(
        tokens, length=length, batch_size=batch_size, count=batches
    ):
        rows = program.place(shape, lambda a, b, x=arrays: [y[a:b] for y in x])
        with jax.set_mesh(program.mesh):
            losses, weights = program.evaluate(params, constants, *rows)
        total += float(losses)
        weight += float(weights)
    return total / weight
