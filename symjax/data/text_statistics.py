"""Statistics of a packed text for `corpus.json`: held-out targets and n-gram losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from symjax.data import ngrams
from symjax.data.boundaries import Boundaries
from symjax.data.store.folder import SPLITS
from symjax.data.store.writer import Counts
from symjax.data.tokens import Tokenizer


def text_statistics(
    arrays: Mapping[str, np.ndarray],
    tokenizer: Tokenizer,
    marks: Boundaries,
    heldout: Counts,
) -> dict[str, Any]:
    """Return the entries of a manifest about the targets of a model.

    They are "document_start" and "shared" (`Corpus.start`, `Corpus.shared`), "judged"
    (the number of held-out targets and their bytes) and "ngrams"
    (`Corpus.references`).

    Args:
        arrays: by name, the tokens of both splits and, if documents are separate, the
            ends of documents.
        heldout: the counts of the held-out text.
    """
    ends = {x: arrays[f"{x}_ends"] for x in SPLITS if f"{x}_ends" in arrays}
    not_targets = np.zeros(1, np.int64)  # places of held-out tokens
    if ends and not marks.shared:
        not_targets = np.concatenate([not_targets, ends["heldout"][:-1]])
    ids, times = np.unique(arrays["heldout"][not_targets], return_counts=True)
    sizes = [
        0 if token in (marks.first, marks.before) else tokenizer.size_of(token)
        for token in ids.tolist()
    ]
    return {
        "document_start": marks.start,
        "shared": marks.shared,
        "judged": {
            "tokens": heldout.tokens - len(not_targets),
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
