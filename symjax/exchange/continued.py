"""Prompts of different lengths continued side by side, as far as positions go."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from symjax.data.tokens import Tokenizer
from symjax.models.decoder import Decoder
from symjax.models.generate import generate, whole


def continued(
    model: Decoder, prompts: Sequence[np.ndarray], count: int, key: Array, **sampling
) -> Int[np.ndarray, "B count"]:
    """The tokens that follow each prompt: `count`, or fewer where learned positions
    end.

    Args:
        prompts: token ids [P], each of its own length.
        sampling: as `generate`.
    Raises:
        ValueError: a prompt is empty or fills the learned positions; or as `generate`.
    """
    lengths = [len(ids) for ids in prompts]
    if not lengths or not min(lengths):
        raise ValueError("the prompt is empty: give text to continue")
    longest = max(lengths)
    if model.learned_positions:
        count = min(whole("count", count, 1), model.length - longest)
        if count < 1:
            raise ValueError(
                f"a prompt of {longest} tokens fills the model's {model.length} "
                "learned positions"
            )
    rows = np.zeros((len(prompts), longest), np.int32)
    for row, ids in zip(rows, prompts, strict=True):
        row[longest - len(ids) :] = ids
    ragged = jnp.asarray(lengths) if min(lengths) < longest else None
    found = generate(model, jnp.asarray(rows), count, key, lengths=ragged, **sampling)
    return np.asarray(found)


def ended(row: np.ndarray, tokenizer: Tokenizer, stop: Sequence[int | str]) -> str:
    """The text of a continuation, up to the first token or string that stops it."""
    tokens = np.isin(row, [x for x in stop if not isinstance(x, str)])
    text = tokenizer.decode(row[: tokens.argmax()] if tokens.any() else row)
    ends = (text.find(x) for x in stop if isinstance(x, str) and x in text)
    return text[: min(ends, default=len(text))]
