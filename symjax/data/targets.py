"""Held-out targets of a packed text: how many, their bytes, and lines of n-grams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from symjax.data import ngrams
from symjax.data.boundaries import Boundaries
from symjax.data.store.folder import SPLITS
from symjax.data.store.writer import Counts
from symjax.data.tokens import Tokenizer


def measured(
    arrays: Mapping[str, np.ndarray],
    tokenizer: Tokenizer,
    marks: Boundaries,
    heldout: Counts,
) -> dict[str, Any]:
    """Return what a manifest says of the targets of a model: see `Corpus`.

    Args:
        arrays: tokens, and ends of documents where they are kept apart, by name.
        heldout: the counts of the held-out text.
    """
    ends = {x: arrays[f"{x}_ends"] for x in SPLITS if f"{x}_ends" in arrays}
    firsts = np.zeros(1, np.int64)  # the held-out tokens that are no targets
    if ends and not marks.shared:
        firsts = np.concatenate([firsts, ends["heldout"][:-1]])
    kinds, times = np.unique(arrays["heldout"][firsts], return_counts=True)
    sizes = [
        0 if kind in (marks.first, marks.before) else tokenizer.size_of(kind)
        for kind in kinds.tolist()
    ]
    return {
        "document_start": marks.start,
        "shared": marks.shared,
        "judged": {
            "tokens": heldout.tokens - len(firsts),
            "bytes": heldout.bytes - int(np.dot(sizes, times)),
        },
        "ngrams": ngrams.cross_entropies(
            arrays["train"],
            arrays["heldout"],
            tokenizer.vocabulary,
            ends=ends,
            shared=marks.shared,
        ),
    }
