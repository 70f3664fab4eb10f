"""A text that is given by hand, evaluated with the tokenizer of a checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np

from symjax.data.batches import Examples, weighted_windows
from symjax.data.corpus import Corpus
from symjax.data.examples import START, text_examples
from symjax.data.tokens import from_description

GIVEN = "given"  # the source of such a text
NO_DATA = (
    "the folder data of the run has no corpus.json: --text gives a text to evaluate, "
    "--prompt one to continue with"
)


def is_given(examples: Examples) -> bool:
    """Whether they are such a text, or that there is none."""
    return examples.fingerprint.get("source") == GIVEN


def given_examples(language: dict[str, Any], text: str | None) -> Examples:
    """A text as all that is held out; there is none to train on.

    Its first token is predicted from the token that stood before documents in training,
    if one did; otherwise nothing predicts it.

    Args:
        language: of the examples that the model was trained on, which have a tokenizer.
        text: None: whatever asks for held-out text is refused.
    Raises:
        ValueError: the text has no token that can be predicted, or unknown characters.
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
    found = text_examples(corpus)

    def heldout(numbers: np.ndarray, length: int) -> tuple[np.ndarray, ...]:
        return weighted_windows(numbers * length, ids, length)

    def refuse(length: int) -> int:
        raise ValueError(NO_DATA)

    if text is None:
        return dataclasses.replace(found, heldout_rows=refuse)
    return dataclasses.replace(found, heldout=heldout)
