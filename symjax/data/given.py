"""A text that is given by hand, evaluated with the tokenizer of a checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from symjax.data.batches import Examples, weighted_windows
from symjax.data.corpus import Corpus
from symjax.data.examples import text_examples
from symjax.data.tokens import Tokenizer

GIVEN = "given"  # the source of such a text
NO_DATA = (
    "the folder data of the run has no corpus.json: --text gives a text to evaluate, "
    "--prompt one to continue with"
)


def is_given(examples: Examples) -> bool:
    """Whether they are such a text, or that there is none."""
    return examples.fingerprint.get("source") == GIVEN


def given_examples(tokenizer: Tokenizer, text: str | None) -> Examples:
    """A text as all that is held out; there is none to train on.

    Args:
        text: None: whatever asks for held-out text is refused.
    Raises:
        ValueError: the text has fewer than two tokens, or unknown characters.
    """
    ids, content = tokenizer.encode(text or ""), (text or "").encode()
    if text is not None and len(ids) < 2:
        raise ValueError(f"--text has {len(ids)} tokens, at least 2 are needed")
    corpus = Corpus(
        train=ids[:0],
        heldout=ids,
        tokenizer=tokenizer,
        fingerprint={"source": GIVEN, "sha256": hashlib.sha256(content).hexdigest()},
        references={},
        bytes_per_token=len(content) / max(1, len(ids)),
    )
    found = text_examples(corpus)

    def heldout(numbers: np.ndarray, length: int) -> tuple[np.ndarray, ...]:
        return weighted_windows(numbers * length, ids, length)

    def refuse(length: int) -> int:
        raise ValueError(NO_DATA)

    if text is None:
        return dataclasses.replace(found, heldout_rows=refuse)
    return dataclasses.replace(found, heldout=heldout)
