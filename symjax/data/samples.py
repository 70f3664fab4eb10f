"""Task `sets`: predict the most frequent symbol so far, in rows of random symbols.

The order of the symbols does not matter, and no symbol matters more than another. So
the best attention map is uniform over all tokens so far, whatever their number. Log-n
scaling makes maps sharper as the number of keys grows, so that they read fewer tokens.
"""

import numpy as np

from symjax import config
from symjax.data.draws import Draws
from symjax.data.rows import NOTHING, Rows


def sets(options: config.Data, length: int, draws: Draws) -> Rows:
    """Make rows of independent symbols, all equally likely.

    The target at each place is the most frequent symbol so far. Where several symbols
    are equally frequent, there is no target. With 2 symbols the target is the rounded
    mean of the tokens so far.
    """
    tokens = draws.below(options.symbols, length)
    return tokens.astype(np.int32), majorities(tokens)


def majorities(tokens: np.ndarray) -> np.ndarray:
    """Return the most frequent token of each prefix of the rows [B, T].

    It is −1 if several tokens are equally frequent. Cost O(B T).
    """
    batch = np.arange(len(tokens))
    counts = np.zeros((len(tokens), tokens.max(initial=0) + 1), np.int64)
    most, leader = np.zeros(len(tokens), np.int64), np.full(len(tokens), NOTHING)
    targets = np.full(tokens.shape, NOTHING)
    for place, token in enumerate(tokens.T):
        counts[batch, token] += 1
        count = counts[batch, token]
        # A token whose count exceeds the largest count leads alone. If its count only
        # equals the largest, it was not the leader, so it now ties with another token.
        leader = np.select([count > most, count == most], [token, NOTHING], leader)
        most = np.maximum(most, count)
        targets[:, place] = leader
    return targets.astype(np.int32)
