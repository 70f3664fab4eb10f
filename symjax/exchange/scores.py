"""The likelihood of the tokens of texts under a decoder, in batches of rows."""

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

SHORTEST = 32  # tokens to which shorter rows are padded: few shapes are compiled
BATCH = 16  # rows at a time, of not more than 2¹⁵ tokens if there are several
TOKENS = 2**15


class Scores(NamedTuple):
    """The scores of every token of a row but the first [T − 1].

    Attributes:
        losses: −log p given the tokens before it, in nats.
        likeliest: whether no other token has a higher logit.
    """

    losses: np.ndarray
    likeliest: np.ndarray


def scores(model: Decoder, rows: Sequence[np.ndarray]) -> list[Scores]:
    """The scores of rows of token ids, each of at least two tokens.

    Rows are padded on the right to a power of two, which a causal model does not see,
    and so is their number. Logits are made in parts, as in evaluation.
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
    """−log p of every token but the first of each text [T − 1], in nats.

    A text longer than `length` is read in windows of that many tokens, as held-out text
    is in evaluation: a token is given those of its window.
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
    """Numbers of rows of about one length, and the length that holds them."""
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
