"""Documents in a row of packed text: the segment id of every token.

A row is a window of the text, so it may begin inside a document and hold several. If
documents are separate (configuration key data.documents), `with_segment_ids` turns the
inputs into `SegmentedTokens`. Each token then sees only itself and the earlier tokens
with its id.
"""

from __future__ import annotations

import bisect
from typing import Any, NamedTuple

import numpy as np

from symjax.data.rows import NOTHING
from symjax.data.store.packed import PackedArray
from symjax.data.store.stream import GrowingArray

# Sorted places in the text: for each document, the place after its last token.
Ends = np.ndarray | PackedArray | GrowingArray


class SegmentedTokens(NamedTuple):
    """Inputs of rows with several documents.

    Attributes:
        tokens: int32 [B, T].
        segment_ids: int32 [B, T], from 0 on in every row. Tokens with the same id in a
            row belong to the same document.
    """

    tokens: Any
    segment_ids: Any


def tokens_of(inputs: Any) -> Any:
    """The token ids of inputs, with or without segment ids."""
    return inputs.tokens if isinstance(inputs, SegmentedTokens) else inputs


def with_segment_ids(
    starts: np.ndarray,
    inputs: np.ndarray,
    targets: np.ndarray,
    ends: Ends,
    *,
    shared: bool,
) -> tuple[SegmentedTokens, np.ndarray]:
    """Add the segment ids of documents to rows of text.

    If a separator is shared, it is the last target of the earlier document, and the
    first input of the later one. Each input gets the id of the document of its target:

        text      a a ␀ b b        inputs a a ␀ b    ids 0 0 1 1
                                   targets  a ␀ b b

    If no separator is shared, the last token of a document has no target (−1), because
    the next token belongs to another document.

    Time O(log documents + T log T) per row.

    Args:
        starts: [B], the places in the text at which the rows begin.
        inputs, targets: token ids [B, T].
        ends: the place after the last token of each document.
        shared: whether one separator token belongs to the two documents around it.
    Returns:
        the inputs as `SegmentedTokens`, and the targets.
    """
    length = inputs.shape[1]
    numbers = np.stack(
        [_document_numbers(ends, start, length + 1) for start in starts.tolist()]
    )
    if shared:
        return SegmentedTokens(inputs, numbers[:, 1:] - numbers[:, 1:2]), targets
    targets = np.where(numbers[:, 1:] == numbers[:, :-1], targets, NOTHING)
    return SegmentedTokens(inputs, numbers[:, :-1]), targets


def _document_numbers(ends: Ends, start: int, count: int) -> np.ndarray:
    """Return the document number of each of `count` tokens from the place `start` on.

    The document of the first token has the number 0.
    """

    def end(index: int) -> int:
        return int(ends[index : index + 1][0])

    first = bisect.bisect_right(range(len(ends)), start, key=end)
    near = ends[first : first + count]
    places = start + np.arange(count)
    return np.searchsorted(near, places, side="right").astype(np.int32)
