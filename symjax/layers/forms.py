"""The functions of a mechanism, and how they take their arguments in one order."""

from collections.abc import Callable
from typing import Any

from symjax import attention


def form_of(mechanism: str) -> attention.Mechanism:
    """The functions of a mechanism that is no block of its own."""
    return attention.MECHANISMS[mechanism]


def has_keys(mechanism: str) -> bool:
    """Whether keys may be others than the queries."""
    return form_of(mechanism).keys


def of_queries(attend: Callable, factor: float) -> Callable:
    """A function of the queries alone, with the arguments of a mechanism.

    A factor of the matrix QQᵀ is its root in every query.
    """

    def run(query, key, value, **options) -> Any:
        return attend(query * factor**0.5, value, **options)

    return run


def state_first(step: Any) -> Callable:
    """A step with the arguments of the causal form."""

    def run(query, key, value, *, state, **options) -> Any:
        return step(state, query, key, value, **options)

    return run
