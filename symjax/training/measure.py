"""The mean loss of a model over batches of text."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from symjax.training.step import Program

# inputs and targets int32 [B T], weights float32 [B T]
Batch = tuple[np.ndarray, np.ndarray, np.ndarray]


def mean_loss(
    program: Program,
    params: Any,
    constants: Any,
    batches: Iterable[Batch],
    key: Array | None = None,
) -> float:
    """Σ weight · loss / Σ weight over all batches, in nats a token.

    Args:
        batches: of one shape, that of the program's mesh and model.
        key: turns dropout on; None is evaluation.
    """
    total = weight = 0.0
    for index, batch in enumerate(batches):
        rows = program.place(batch[0].shape, lambda a, b, x=batch: [y[a:b] for y in x])
        here = None if key is None else jax.random.fold_in(key, index)
        with jax.set_mesh(program.mesh):
            part = program.evaluate(params, constants, *rows, here)
        total += float(part[0])
        weight += float(part[1])
    return total / weight
