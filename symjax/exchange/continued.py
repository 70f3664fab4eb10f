"""Continuations of prompts of different lengths, generated in batches.

`texts` groups prompts of similar length, generates token ids for each group
(`models.generate`), and decodes them up to the first stop token or stop string.
"""

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from symjax.data.generated import rows
from symjax.data.subwords import REPLACEMENT
from symjax.data.tokens import Tokenizer
from symjax.models.decoder import Decoder
from symjax.models.generate import (
    PROMPT,
    ROOM,
    before_stop,
    bucket,
    generate,
    whole,
)

# Limits of a batch. A batch of one row may exceed TOKENS and CACHE.
BATCH = 32  # rows
TOKENS = 2**15  # tokens of all prompts
CACHE = 2**30  # bytes of the decoding cache


def row_keys(key: Array, rows: int) -> Key[Array, "rows"]:
    """Return a random key for each row. The first row has `key` itself."""
    others = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(1, rows))
    return jnp.concatenate([key[None], others])


def texts(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[np.ndarray],
    count: int,
    keys: Key[Array, "B"],
    *,
    stop: Sequence[int | str] = (),
    **sampling,
) -> list[str]:
    """Return the continuation of each prompt, up to the first stop token or string.

    Args:
        prompts: token ids [P]; the lengths may differ.
        count: largest number of new tokens; learned positions may leave fewer.
        keys: a random key for each prompt. The continuation of a prompt depends on its
            key, but not (up to rounding) on the other prompts.
        stop: token ids and strings.
        sampling: further arguments of `generate`.
    Raises:
        ValueError: a prompt is empty or fills the learned positions, or an argument is
            one that `generate` refuses.
    """
    tokens = [x for x in stop if not isinstance(x, str)]
    strings = [x for x in stop if isinstance(x, str)]
    found = [""] * len(prompts)
    for batch in _batches(model, prompts, count):
        some = [prompts[i] for i in batch]
        until = _until(tokenizer, some, tokens, strings) if strings else None
        keys_here = keys[np.array(batch)]
        watched = {"stop": tokens, "until": until, **sampling}
        rows = _one_batch(model, some, count, keys_here, **watched)
        for i, row in zip(batch, rows, strict=True):
            found[i] = ended(row, tokenizer, stop, prompts[i])
    return found


def _until(
    tokenizer: Tokenizer,
    prompts: Sequence[np.ndarray],
    tokens: Sequence[int],
    strings: Sequence[str],
) -> Callable[[np.ndarray], bool]:
    """Return a function that says whether every row has ended, given the new tokens.

    `generate` itself ends rows at stop tokens. To find stop strings, the new tokens
    must be decoded.
    """
    going = dict(enumerate(prompts))

    def until(rows: np.ndarray) -> bool:
        for i, prompt in list(going.items()):
            row = before_stop(rows[i], tokens)
            text = difference(tokenizer, prompt, row)
            if len(row) < len(rows[i]) or any(x in text for x in strings):
                del going[i]
        return not going

    return until


def _batches(
    model: Decoder, prompts: Sequence[np.ndarray], count: int
) -> Iterator[list[int]]:
    """Yield batches as lists of prompt indices, longest prompts first.

    The prompts of a batch have similar lengths and the same limit of new tokens.

    Raises:
        ValueError: a prompt is empty or fills the learned positions, or count is not a
            whole number.
    """
    count, lengths = whole("count", count, 1), [len(ids) for ids in prompts]
    if not lengths or not min(lengths):
        raise ValueError("the prompt is empty: give text to continue")
    if model.learned_positions and (longest := max(lengths)) >= model.length:
        raise ValueError(
            f"a prompt of {longest} tokens fills the model's {model.length} "
            "learned positions"
        )
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for _, group in itertools.groupby(order, lambda i: _room(model, lengths[i], count)):
        left = list(group)
        while left:
            size = _most_rows(model, lengths[left[0]], count)
            yield left[:size]
            left = left[size:]


def _room(model: Decoder, length: int, count: int) -> int:
    """Return the number of new tokens after a prompt, limited by learned positions."""
    return min(count, model.length - length) if model.learned_positions else count


def _most_rows(model: Decoder, length: int, count: int) -> int:
    """Return the number of rows in a batch, a power of two within the limits."""
    room = bucket(length + count, ROOM)
    cache = jax.tree.leaves(jax.eval_shape(lambda: model.init_cache(1, room)))
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in cache)
    most = max(1, min(BATCH, CACHE // size, TOKENS // bucket(length, PROMPT)))
    return 1 << (most.bit_length() - 1)


def _one_batch(
    model: Decoder,
    prompts: Sequence[np.ndarray],
    count: int,
    keys: Key[Array, "B"],
    **sampling,
) -> np.ndarray:
    lengths = [len(ids) for ids in prompts]
    longest = max(lengths)
    rows = np.zeros((len(prompts), longest), np.int32)
    for row, ids in zip(rows, prompts, strict=True):
        row[longest - len(ids) :] = ids
    count = _room(model, longest, count)
    found = generate(model, rows, count, keys, lengths=np.array(lengths), **sampling)
    return np.asarray(found)


def ended(
    row: np.ndarray,
    tokenizer: Tokenizer,
    stop: Sequence[int | str],
    prompt: Sequence[int] | np.ndarray = (),
) -> str:
    """Return the text of a continuation, up to the first stop token or string.

    Args:
        row: token ids of the continuation.
        prompt: token ids before `row`, which decide whether its text begins with a
            space.
    """
    row = before_stop(row, [x for x in stop if not isinstance(x, str)])
    text = difference(tokenizer, prompt, row)
    ends = (text.find(x) for x in stop if isinstance(x, str) and x in text)
    return text[: min(ends, default=len(text))]


def difference(
    tokenizer: Tokenizer, prompt: Sequence[int] | np.ndarray, more: np.ndarray
) -> str:
    """Return the text that the token ids `more` add to the text of a prompt.

    The prompt and the new tokens are decoded together, for two reasons: a decoder may
    remove a space at the beginning of a text, and the bytes of one character may be
    split between the prompt and the new tokens.
    """

    def decode(count: int) -> str:
        return tokenizer.decode(np.concatenate([before, more[:count]]))

    before = np.asarray(prompt, np.int64).reshape(-1)
    start, whole = decode(0), decode(len(more))
    if whole.endswith(REPLACEMENT):
        # The last character is incomplete. A byte-fallback decoder then also replaces
        # the whole run of bytes before it, so leave out the bytes of this character.
        for cut in range(1, min(3, len(more)) + 1):
            shorter = decode(len(more) - cut)
            if not shorter.endswith(REPLACEMENT):
                if not whole.startswith(shorter):
                    whole = shorter + REPLACEMENT
                break
    if whole.startswith(start):
        return whole[len(start) :]
    if start.endswith(REPLACEMENT):  # new tokens complete the prompt's last character
        return whole[len(os.path.commonprefix([start, whole])) :]
    return tokenizer.decode(more)  # the new tokens change the text of the prompt
