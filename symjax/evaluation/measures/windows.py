"""Held-out windows on which the layers of a model are measured.

`heldout_rows` chooses a few rows of the held-out examples, with their padding, and
`window_of` makes a `Window` without padding of such a row.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.results import Options

WINDOWS = 4  # the most held-out windows that are read
IMAGES = 32  # the most images, which have few tokens
# Windows that are read for each one that is kept. Those that span documents are not.
CANDIDATES = 8
LONGEST = 512  # the most tokens of a window of text if --window is not given

# Token ids of a row, negative at padding; or an image.
Inputs = Int[np.ndarray, "T"] | Float[np.ndarray, "height width channels"]
Row = tuple[Inputs, np.ndarray]  # inputs and targets


class Window(NamedTuple):
    """A held-out row without its padding.

    Attributes:
        tokens: token ids; None for an image.
        targets: the token to predict at each position, negative where there is none;
            for a classifier the label.
        visible: the pairs (query, key) that the measured layer may use: key ≤ query in
            a decoder, all pairs in an encoder; less what its options `window` and
            `mask_self` hide.
    """

    tokens: Int[np.ndarray, "T"] | None
    targets: Int[np.ndarray, "T"]
    visible: Bool[np.ndarray, "T T"]


def heldout_rows(run: LoadedRun, options: Options) -> list[Row]:
    """Return a few rows, with their padding, spread over the held-out examples.

    There are 4 rows (32 if they are images), or `--batches` if that is fewer. With
    `--window` they have that many tokens. Otherwise rows are as long as in training,
    but rows of text have at most 512 tokens, because each head has a map [T T].

    Raises:
        ValueError: the model or its data has no rows of `--window` tokens.
    """
    model = run.config.model
    whole = run.examples.fixed_length or model.length <= LONGEST
    length = model.length if whole else LONGEST
    if options.window is not None:
        check_window(run, options.window)
        length = options.window
    most = IMAGES if model.patch else WINDOWS
    count = min(options.batches or most, most)
    if run.examples.separate:
        return _rows_within_documents(run, length, count)
    batches = [rows(0, 1) for rows in run.examples.heldout_batches((1, length), count)]
    if not model.classes and len(batches) > 1:  # leave out a window past the end
        batches = [batch for batch in batches if _is_filled(*batch)]
    return [(inputs[0], targets[0]) for inputs, targets, _ in batches]


def check_window(run: LoadedRun, length: int) -> None:
    """Check that there are held-out rows of `length` tokens. Raises: ValueError."""
    model, longest = run.config.model, run.examples.longest
    if run.examples.fixed_length and length != model.length:
        reason = f"all rows of data.source={run.config.data.source} have {model.length}"
    elif model.positions == "learned" and length > model.length:
        reason = f"the model has {model.length} learned positions"
    elif longest is not None and length > longest:
        reason = f"the held-out text has {longest} tokens"
    else:
        return
    raise ValueError(f"--window {length} tokens: {reason}")


def _rows_within_documents(run: LoadedRun, length: int, count: int) -> list[Row]:
    """Return windows that each lie within one document, spread over the candidates.

    If no candidate lies within one document, return windows of several documents.
    """
    rows = run.examples.heldout_batches((1, length), CANDIDATES * count)
    drawn = [row(0, 1) for row in rows]
    within = [row for row in drawn if not row[0].segment_ids.any() and row[2].all()]
    chosen = within or drawn
    step = -(-len(chosen) // count)
    return [(inputs.tokens[0], targets[0]) for inputs, targets, _ in chosen[::step]]


def _is_filled(inputs: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> bool:
    """Return whether a row has neither padding nor repeated tokens at its end.

    A window that reaches beyond the end of the text repeats the last token, with
    weight 0.
    """
    return bool((inputs >= 0).all() and (weights[targets >= 0] > 0).all())


def window_of(inputs: Inputs, targets: np.ndarray, visible: np.ndarray) -> Window:
    """Return a row without its padding; `visible` has the pairs of its tokens."""
    if inputs.ndim > 1:
        return Window(None, targets, visible)
    exists = inputs >= 0
    if len(targets) == len(inputs):
        targets = targets[exists]
    return Window(inputs[exists], targets, visible)


def visible_pairs(
    count: int, *, causal: bool, window: int | None = None, mask_self: bool = False
) -> Bool[np.ndarray, "T T"]:
    """Return the pairs (query, key) of `count` tokens that attention may use.

    Args:
        window: as `model.attention.window`, only keys less than so many positions away;
            None or 0: all.
        mask_self: hide the key of a query from it, unless it sees no other key.
    """
    positions = np.arange(count)
    distance = positions[:, None] - positions[None]
    pairs = distance >= 0 if causal else np.ones((count, count), bool)
    if window:
        pairs &= np.abs(distance) < window
    if mask_self:
        pairs &= (distance != 0) | (pairs.sum(axis=-1, keepdims=True) == 1)
    return pairs
