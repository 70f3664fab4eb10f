"""Copy, reverse, sort and swap: repeat the symbols of a row in another order.

    separator … a₁ a₂ … aₙ separator b₁ b₂ … bₙ

The symbols a are drawn independently, and b are the same symbols rearranged. The
targets are all of b. Longer rows begin with separators.

Source: Kayyam et al. 2026, arXiv:2606.04032, names these tasks and gives no code. Here
they are next-token tasks, and the definition of swap is ours.
"""

from collections.abc import Callable

import numpy as np

from symjax import config
from symjax.data.draws import Draws
from symjax.data.rows import NOTHING, Rows


def _halves_exchanged(symbols: np.ndarray) -> np.ndarray:
    """Return the halves of each row exchanged; the first half has ⌊n/2⌋ symbols."""
    return np.roll(symbols, -(symbols.shape[1] // 2), axis=1)


# Value of data.source → function of the drawn symbols [B, n]: the symbols to predict.
ARRANGEMENTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "copy": lambda symbols: symbols,
    "reverse": lambda symbols: symbols[:, ::-1],
    "sort": lambda symbols: np.sort(symbols, axis=1),
    "swap": _halves_exchanged,
}


def rearranged(
    arrange: Callable[[np.ndarray], np.ndarray],
    options: config.Data,
    length: int,
    draws: Draws,
) -> Rows:
    """Make rows of `items` symbols, a separator, and the symbols rearranged."""
    count, separator = options.items, options.symbols
    symbols = draws.below(options.symbols, count)
    answers = arrange(symbols)
    tokens = np.full((len(symbols), length + 1), separator)
    tokens[:, -count:] = answers
    tokens[:, -2 * count - 1 : -count - 1] = symbols
    targets = np.full((len(symbols), length), NOTHING)
    targets[:, -count:] = answers
    return tokens[:, :length].astype(np.int32), targets.astype(np.int32)
