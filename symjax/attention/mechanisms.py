"""The table of mechanisms: in which forms each one exists. One line a mechanism."""

import inspect
from collections.abc import Callable
from typing import NamedTuple

from symjax.attention.rows import RowWeights
from symjax.attention.softmax import softmax, softmax_weights


class Mechanism(NamedTuple):
    """One mechanism's functions, so that layers need no special cases.

    A score mechanism has row weights, takes `is_causal`, and decodes against cached
    keys and values. A feature mechanism has a causal form and a state to decode with.
    """

    attend: Callable
    row_weights: RowWeights | None = None
    causal: Callable | None = None
    step: Callable | None = None
    state: Callable | None = None

    def options(self) -> tuple[str, ...]:
        """The names of the keyword options that its whole-sequence form takes."""
        parameters = inspect.signature(self.causal or self.attend).parameters
        return tuple(parameters)


MECHANISMS = {
    "softmax": Mechanism(softmax, softmax_weights),
}


def row_weights_of(attend: Callable) -> RowWeights | None:
    """The row weights of a score mechanism's function; None for any other function."""
    for mechanism in MECHANISMS.values():
        if mechanism.attend is attend:
            return mechanism.row_weights
    return None
