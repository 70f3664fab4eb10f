"""Text with tokens hidden, which an encoder learns to fill in."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from symjax.data.batches import Rows, Shape, spread
from symjax.data.corpus import Corpus
from symjax.data.draws import Draws
from symjax.data.generated import NOTHING

SHARE = 0.15  # of the tokens of a row are asked
MASKED, RANDOM = 0.8, 0.1  # of these; the rest stays as it is


class Masked:
    """The rows of a text with 15 % of each row's tokens asked.

    Of these 80 % are replaced by a token of their own, the last of the vocabulary, and
    10 % by any token. Training hides others in every epoch, held-out rows the same
    ones each time.

    Source: Devlin et al. 2018, arXiv:1810.04805, section 3.1.
    """

    def __init__(self, corpus: Corpus):
        self.corpus = corpus
        self.unit = f"masked {corpus.unit}"
        self.size = corpus.size
        self.fingerprint = corpus.fingerprint
        self.vocabulary = corpus.vocabulary + 1
        self.references = {"unigram": corpus.references["unigram"]}

    @property
    def language(self) -> dict[str, Any]:
        return {**self.corpus.language, "mask": self.corpus.vocabulary}

    def check_length(self, length: int) -> None:
        self.corpus.check_length(length)

    def batch(self, shape: Shape, *, seed: int, step: int) -> Rows:
        rows, first = self.corpus.batch(shape, seed=seed, step=step), step * shape[0]

        def some(start: int, stop: int) -> tuple[np.ndarray, ...]:
            return self._hidden(rows(start, stop)[0], seed, first + start)

        return some

    def heldout_batches(self, shape: Shape, count: int | None = None) -> Iterator[Rows]:
        numbers = spread(self.heldout_count(shape), count)
        found = self.corpus.heldout_batches(shape, count)
        for number, rows in zip(numbers, found, strict=True):
            yield functools.partial(self._judged, rows, number * shape[0])

    def heldout_count(self, shape: Shape) -> int:
        return self.corpus.heldout_count(shape)

    def vanished(self) -> str:
        return self.corpus.vanished()

    def _judged(self, rows: Rows, first: int, start: int, stop: int):
        """Where the text has ended there are pads: an encoder would see the repeated
        tokens that fill up the row of a decoder."""
        tokens, _, there = rows(start, stop)
        inputs, targets = self._hidden(tokens, 0, first + start)
        inputs = np.where(there > 0, inputs, NOTHING)
        return inputs, targets, there * (targets != NOTHING)

    def _hidden(
        self, tokens: np.ndarray, seed: int, first: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of rows [B, T], the first of which has this number."""
        length = tokens.shape[1]
        draws = Draws(seed, np.arange(first, first + len(tokens)))
        places = draws.distinct(length, max(1, round(SHARE * length)))
        asked = np.take_along_axis(tokens, places, axis=1)
        chance, count = draws.uniform(places.shape[1]), places.shape[1]
        shown = np.select(
            [chance < MASKED, chance < MASKED + RANDOM],
            [self.corpus.vocabulary, draws.below(self.corpus.vocabulary, count)],
            asked,
        )
        inputs, targets = tokens.copy(), np.full_like(tokens, NOTHING)
        np.put_along_axis(inputs, places, shown.astype(tokens.dtype), axis=1)
        np.put_along_axis(targets, places, asked, axis=1)
        return inputs, targets
