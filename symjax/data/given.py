"""The text of `eval.py --text`, with the tokenizer of a checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np

from symjax.data.batches import Examples, weighted_windows
from symjax.data.corpus import Corpus
from symjax.data.examples import START, text_examples
from symjax.data.tokens import from_description

GIVEN = "given"  # the source in the fingerprint of such a text
NO_DATA = (
    "the folder data of the run has no corpus.json: --text gives a text to evaluate, "
    "--prompt one to continue"
)


def is_given(examples: Examples) -> bool:
    """Return whether examples come from `given_examples`."""
    return examples.fingerprint.get("source") == GIVEN


def given_examples(language: dict[str, Any], text: str | None) -> Examples:
    """A text as held-out examples, without training examples.

    The first token is predicted from the token that preceded documents in training.
    If there was no such token, the first token is no target.

    Args:
        language: `Examples.language` of the examples that the model was trained on.
            They must have a tokenizer.
        text: the text. If it is None, a call of `Examples.heldout_rows` raises a
            ValueError.
    Raises:
        ValueError: the text has no token that can be predicted, or has characters that
            the tokenizer does not know.
    """
    tokenizer, start = from_description(language), language.get(START)
    ids, content = tokenizer.encode(text or ""), (text or "").encode()
    least = 2 if start is None else 1
    if text is not None and len(ids) < least:
        raise ValueError(f"--text has {len(ids)} tokens, at least {least} are needed")
    size = len(content)
    if text and start is None:
        size -= tokenizer.size_of(int(ids[0]), text)
    if text and start is not None:
        ids = np.concatenate([np.array([start], ids.dtype), ids])
    corpus = Corpus(
        train=ids[:0],
        heldout=ids,
        tokenizer=tokenizer,
        fingerprint={"source": GIVEN, "sha256": hashlib.sha256(content).hexdigest()},
        references={},
        bytes_per_token=size / max(1, len(ids) - 1),
        start=start,
    )
    examples = text_examples(corpus)

    def heldout(numbers: np.ndarray, length: int) -> tuple[np.ndarray, ...]:
        return weighted_windows(numbers * length, ids, length)

    def no_rows(length: int) -> int:
        raise ValueError(NO_DATA)

    if text is None:
        return dataclasses.replace(examples, heldout_rows=no_rows)
    return dataclasses.replace(examples, read_heldout=heldout)
