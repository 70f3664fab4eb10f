"""The table of mechanisms: in which forms each one exists. One line a mechanism."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from symjax.attention.cosine import (
    cosine,
    cosine_causal,
    cosine_state,
    cosine_step,
)
from symjax.attention.decay import decay_causal, decay_state, decay_step
from symjax.attention.linear import (
    linear,
    linear_causal,
    linear_state,
    linear_step,
)
from symjax.attention.performer import (
    performer,
    performer_causal,
    performer_state,
    performer_step,
)
from symjax.attention.rows import RowWeights
from symjax.attention.softmax import softmax, softmax_weights
from symjax.attention.sparse import (
    entmax15,
    entmax15_weights,
    sparsemax,
    sparsemax_weights,
)
from symjax.attention.spectral import matrix_function


class Mechanism(NamedTuple):
    """One mechanism's functions, so that layers need no special cases.

    A score mechanism has row weights, takes `is_causal`, and decodes against cached
    keys and values. A feature mechanism has a causal form and a state to decode with.
    Time and memory are those of a head: operations for T tokens, numbers kept to
    decode. Letters are those of the shapes, G a group and C a chunk of tokens.
    """

    attend: Callable
    row_weights: RowWeights | None = None
    causal: Callable | None = None
    step: Callable | None = None
    state: Callable | None = None
    time: str = "T S (H + V)"
    memory: str = "S (H + V)"

    def options(self, form: str = "causal") -> tuple[str, ...]:
        """The names of the arguments that one of its functions takes."""
        function = getattr(self, form) or self.attend
        return tuple(inspect.signature(function).parameters)


MECHANISMS = {
    "softmax": Mechanism(softmax, softmax_weights),
    "sparsemax": Mechanism(sparsemax, sparsemax_weights, time="T S (H + V + log S)"),
    "entmax15": Mechanism(entmax15, entmax15_weights, time="T S (H + V + log S)"),
    "cosine": Mechanism(
        *(cosine, None, cosine_causal, cosine_step, cosine_state),
        *("T (H V + C (H + V))", "(H + 1) (V + 1)"),
    ),
    "decay": Mechanism(
        *(decay_causal, None, decay_causal, decay_step, decay_state),
        *("T (H V + C (H + V))", "H V"),
    ),
    "linear": Mechanism(
        *(linear, None, linear_causal, linear_step, linear_state),
        *("T (M V + C (M + V))", "M (V + 1)"),
    ),
    "performer": Mechanism(
        *(performer, None, performer_causal, performer_step, performer_state),
        *("T (M (H + V) + C (M + V))", "M (V + 2)"),
    ),
}

# Those without keys and without a causal form: they are choices of encoders only.
BIDIRECTIONAL = {
    "matrix_function": Mechanism(matrix_function, time="T H (H + V)", memory="-"),
}


def row_weights_of(attend: Callable) -> RowWeights | None:
    """The row weights of a score mechanism's function; None for any other function."""
    for mechanism in MECHANISMS.values():
        if mechanism.attend is attend:
            return mechanism.row_weights
    return None


def unbound(attend: Callable) -> tuple[Callable, dict[str, Any]]:
    """A function and the keywords that `functools.partial` bound to it.

    The function can then be looked up, and its options be seen. One with positional
    arguments bound is left as it is.
    """
    if isinstance(attend, partial) and not attend.args:
        return attend.func, dict(attend.keywords)
    return attend, {}
