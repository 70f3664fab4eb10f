"""The tokens before and after a document, as a model has learned them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from symjax.data.boundaries import SEPARATOR
from symjax.data.tokens import Tokenizer


class Delimiters(NamedTuple):
    """Tokens before and after a document.

    Attributes:
        start: the token that precedes a document; None: the model has not learned
            how a document begins.
        end: the token that ends a document; None: there is none.
        every: every document of training began with `start` (data.bos), so that every
            prompt does.
    """

    start: int | None
    end: int | None
    every: bool

    def prompt(self, ids: np.ndarray) -> np.ndarray:
        """Return the token ids of a prompt, after `start` if all prompts begin with it
        or if there are no ids."""
        if self.start is None or (len(ids) and not self.every):
            return ids
        return self.begun(ids)

    def begun(self, ids: np.ndarray) -> np.ndarray:
        """Token ids of a whole document, after `start` if it is known."""
        if self.start is None:
            return ids
        return np.concatenate([[self.start], ids]).astype(np.int32)


def delimiters(tokenizer: Tokenizer, language: Mapping[str, Any]) -> Delimiters:
    """The delimiters of documents for a model, as its training had them.

    A document ends with the tokenizer's own token for it. Without one it ends with the
    token that began every document, or else with a NUL, if that is a token.

    Args:
        language: as `Examples.language`; its "document_start" is the token that
            preceded documents in training, and "bos" says that all began with it.
    """
    end, start = tokenizer.document_end, language.get("document_start")
    begun = bool(language.get("bos")) and start is not None
    if end is None:
        end = start if begun else _nul(tokenizer)
    return Delimiters(start, end, begun)


def _nul(tokenizer: Tokenizer) -> int | None:
    """The token of a NUL; None where there is none."""
    try:
        ids = tokenizer.encode(SEPARATOR)
    except ValueError:  # not in the alphabet
        return None
    known = len(ids) == 1 and tokenizer.decode(ids) == SEPARATOR
    return int(ids[0]) if known else None
