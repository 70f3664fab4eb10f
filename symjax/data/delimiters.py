"""The tokens before and after a document, as a trained model has seen them.

They are needed to encode prompts and scored texts. `boundaries.py` chooses the tokens
that packing writes.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from symjax.data.boundaries import SEPARATOR
from symjax.data.tokens import Tokenizer


class Delimiters(NamedTuple):
    """Tokens before and after a document.

    Attributes:
        start: the token before a document; None if training had no such token.
        end: the token that ends a document; None if there is none.
        every: every document of training began with `start` (data.bos), so every prompt
            begins with it.
    """

    start: int | None
    end: int | None
    every: bool

    def prompt(self, ids: np.ndarray) -> np.ndarray:
        """Return the token ids of a prompt, after `start` where it is needed.

        It is needed if all prompts begin with it, or if there are no ids.
        """
        if self.start is None or (len(ids) and not self.every):
            return ids
        return self.with_start(ids)

    def with_start(self, ids: np.ndarray) -> np.ndarray:
        """Return the token ids of a document, after `start` if there is one."""
        if self.start is None:
            return ids
        return np.concatenate([[self.start], ids]).astype(np.int32)


def delimiters(tokenizer: Tokenizer, language: Mapping[str, Any]) -> Delimiters:
    """The delimiters of documents that a model was trained with.

    `end` is the tokenizer's end token. If the tokenizer has none, `end` is the token
    that began every document. Without such a token, `end` is NUL, if NUL is one token.

    Args:
        language: as in `Examples.language`. "document_start" is the token before
            documents in training, and "bos" tells that all documents began with it.
    """
    end, start = tokenizer.document_end, language.get("document_start")
    every = bool(language.get("bos")) and start is not None
    if end is None:
        end = start if every else _nul(tokenizer)
    return Delimiters(start, end, every)


def _nul(tokenizer: Tokenizer) -> int | None:
    """The token id of NUL; None if NUL is not exactly one token."""
    try:
        ids = tokenizer.encode(SEPARATOR)
    except ValueError:  # not in the alphabet
        return None
    one_token = len(ids) == 1 and tokenizer.decode(ids) == SEPARATOR
    return int(ids[0]) if one_token else None
