"""How likely a decoder finds the tokens of a text, rows of any length side by side."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from symjax.models.decoder import Decoder

SHORTEST = 32  # tokens to which shorter rows are padded: few shapes are compiled
BATCH = 16  # rows at a time


class Scores(NamedTuple):
    """Of every token of a row but the first [T − 1].

    Attributes:
        losses: −log p given the tokens before it, in nats.
        likeliest: whether no other token has a higher logit.
    """

    losses: np.ndarray
    likeliest: np.ndarray


def scores(model: Decoder, rows: Sequence[np.ndarray]) -> list[Scores]:
    """The scores of rows of token ids, each of at least two tokens.

    Rows are padded on the right to a power of two, which a causal model does not see.
    """
    parts, found = nnx.split(model), {}
    for chosen, room in _batches(rows):
        if model.learned_positions:
            longest = max(len(rows[i]) for i in chosen) - 1
            room = max(longest, min(room, model.length))
        filled = np.zeros((2, len(chosen), room), np.int32)
        for place, i in enumerate(chosen):
            filled[:, place, : len(rows[i]) - 1] = rows[i][:-1], rows[i][1:]
        losses, likeliest = map(np.asarray, _scores(*parts, *jnp.asarray(filled)))
        for place, i in enumerate(chosen):
            there = slice(len(rows[i]) - 1)
            found[i] = Scores(losses[place, there], likeliest[place, there])
    return [found[i] for i in range(len(rows))]


def _batches(rows: Sequence[np.ndarray]) -> Iterator[tuple[list[int], int]]:
    """Numbers of rows of about one length, and the length that holds them."""
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        room = max(SHORTEST, 1 << (len(row) - 2).bit_length())
        groups.setdefault(room, []).append(i)
    for room, group in groups.items():
        for start in range(0, len(group), BATCH):
            yield group[start : start + BATCH], room


@partial(jax.jit, static_argnums=0)
def _scores(
    graph: Any, weights: Any, inputs: Array, targets: Array
) -> tuple[Array, Array]:
    logits = nnx.merge(graph, weights)(inputs)
    chances = jax.nn.log_softmax(logits)
    losses = -jnp.take_along_axis(chances, targets[..., None], axis=-1)[..., 0]
    return losses, logits.argmax(axis=-1) == targets
