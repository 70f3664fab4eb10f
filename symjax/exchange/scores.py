"""Log-likelihoods of the tokens of texts under a decoder, computed in batches."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array

from symjax.data.generated import NOTHING
from symjax.models.decoder import Decoder
from symjax.models.generate import bucket
from symjax.training.loss import token_losses

SHORTEST = 32  # shorter rows are padded to this length, so few shapes are compiled
BATCH = 16  # largest number of rows in a batch
TOKENS = 2**15  # largest number of tokens in a batch of several rows


class Scores(NamedTuple):
    """Scores [T − 1] of the tokens of a row after the first one.

    Attributes:
        losses: −log p of each token given the tokens before it, in nats.
        likeliest: whether no other token has a higher logit.
    """

    losses: np.ndarray
    likeliest: np.ndarray


def scores(model: Decoder, rows: Sequence[np.ndarray]) -> list[Scores]:
    """Return the scores of rows of token ids. Each row has at least two tokens.

    Rows are padded on the right to a power of two, but with learned positions at most
    to the model's length. A causal model does not see the padding. The number of rows
    of a batch is padded to a power of two, too. Many logits are computed in parts
    (`symjax.training.loss.token_losses`).
    """
    parts, found = nnx.split(model), {}
    for chosen, room in _batches(rows):
        if model.learned_positions:
            longest = max(len(rows[i]) for i in chosen) - 1
            room = max(longest, min(room, model.length))
        shape = bucket(len(chosen), 1), room
        inputs, targets = np.zeros(shape, np.int32), np.full(shape, NOTHING, np.int32)
        for place, i in enumerate(chosen):
            inputs[place, : len(rows[i]) - 1] = rows[i][:-1]
            targets[place, : len(rows[i]) - 1] = rows[i][1:]
        losses, likeliest = map(np.asarray, _scores(*parts, inputs, targets))
        for place, i in enumerate(chosen):
            there = slice(len(rows[i]) - 1)
            found[i] = Scores(losses[place, there], likeliest[place, there])
    return [found[i] for i in range(len(rows))]


def text_losses(
    model: Decoder, texts: Sequence[np.ndarray], length: int
) -> list[np.ndarray]:
    """Return −log p [T − 1] of the tokens of each text after the first, in nats.

    A text longer than `length` is read in windows of that length, like held-out text in
    evaluation. A token is then predicted only from the tokens before it in its window.
    """
    starts = [range(0, len(ids) - 1, length) for ids in texts]
    pairs = zip(texts, starts, strict=True)
    windows = [ids[start : start + length + 1] for ids, some in pairs for start in some]
    found = iter(scores(model, windows))
    nothing = np.zeros(0, np.float32)
    return [
        np.concatenate([nothing, *(next(found).losses for _ in some)])
        for some in starts
    ]


def _batches(rows: Sequence[np.ndarray]) -> Iterator[tuple[list[int], int]]:
    """Yield indices of rows of similar length, and the length to pad them to."""
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(bucket(len(row) - 1, SHORTEST), []).append(i)
    for room, group in groups.items():
        size = max(1, min(BATCH, TOKENS // room))
        for start in range(0, len(group), size):
            yield group[start : start + size], room


@partial(jax.jit, static_argnums=0)
def _scores(
    graph: Any, weights: Any, inputs: Array, targets: Array
) -> tuple[Array, Array]:
    model = nnx.merge(graph, weights)
    found = token_losses(model, model.hidden(inputs), targets)
    return found.loss, found.right
