"""Ends of the documents of a packed text, and rows that keep documents apart."""

from __future__ import annotations

import bisect
from typing import Any, NamedTuple

import numpy as np

from symjax.data.generated import NOTHING
from symjax.data.store.packed import Packed
from symjax.data.store.stream import Growing

Ends = np.ndarray | Packed | Growing  # sorted, one past the last token of each document


class Separate(NamedTuple):
    """Inputs of rows with several documents.

    Attributes:
        tokens: int32 [B, T].
        segment_ids: int32 [B, T], from 0 in every row; tokens of one id are of one
            document.
    """

    tokens: Any
    segment_ids: Any


def tokens_of(inputs: Any) -> Any:
    """The tokens of inputs, whether their documents are told apart or not."""
    return inputs.tokens if isinstance(inputs, Separate) else inputs


def separated(
    starts: np.ndarray,
    inputs: np.ndarray,
    targets: np.ndarray,
    ends: Ends,
    *,
    shared: bool,
) -> tuple[Separate, np.ndarray]:
    """Rows [B, T] that begin at `starts` [B] of a text, with their documents apart.

    Time O(log documents + T) a row.

    Args:
        shared: one separator stands between two documents. As an input it belongs to
            the later document, whose first token is its target; as a target it ends
            the earlier one. Otherwise a document's tokens are its own, and the last
            one has no target.
    """
    length = inputs.shape[1]
    numbers = np.stack([_numbers(ends, start, length + 1) for start in starts.tolist()])
    if shared:  # an input is of the document of its target
        return Separate(inputs, numbers[:, 1:] - numbers[:, 1:2]), targets
    targets = np.where(numbers[:, 1:] == numbers[:, :-1], targets, NOTHING)
    return Separate(inputs, numbers[:, :-1]), targets


def _numbers(ends: Ends, start: int, count: int) -> np.ndarray:
    """The documents of `count` tokens from `start` on, numbered from 0."""

    def end(index: int) -> int:
        return int(ends[index : index + 1][0])

    first = bisect.bisect_right(range(len(ends)), start, key=end)
    near = ends[first : first + count]
    places = start + np.arange(count)
    return np.searchsorted(near, places, side="right").astype(np.int32)
