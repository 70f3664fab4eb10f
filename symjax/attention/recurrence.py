"""What a mechanism with a state is to the engine of `causal.py`."""

from typing import Any, Protocol

from jaxtyping import Array

from symjax.attention.chunks import Chunk


class Stretches(Protocol):
    """What stretches of time do to a state: as pairs of a state and a transition.

    A state is a NamedTuple of arrays [B …]. `parameters` are what all tokens share.
    A transition is what turns the state before a chunk into part of the one after it,
    None where that state is left as it is.
    """

    def stretch(self, parameters: Any, chunk: Chunk) -> tuple[Any, Any]:
        """The state that a chunk of one segment makes of nothing, and its transition.

        A chunk of hidden tokens leaves any state as it is.
        """
        ...

    def merge(self, one: tuple[Any, Any], two: tuple[Any, Any]) -> tuple[Any, Any]:
        """Two consecutive stretches as one. Associative."""
        ...


class Recurrence(Stretches, Protocol):
    """A mechanism with a state. Hashable, since programs are compiled for it."""

    def empty(self, parameters: Any, sizes: tuple[int, int, int, int], dtype) -> Any:
        """The state that has read nothing. sizes: B K H V."""
        ...

    def advance(self, parameters: Any, state: Any, chunk: Chunk) -> tuple[Any, Any]:
        """One chunk: the state after it, and its rows, arrays [B K G T …]."""
        ...

    def finish(
        self, parameters: Any, state: Any, chunk: Chunk, rows: Any, chunk_size: int
    ) -> Array:
        """The output [B K G T V] from the rows of consecutive chunks of this size.

        Args:
            state, chunk: the state before all of them, and their tokens as one chunk.
        """
        return rows

    def may_stand_side_by_side(self, state: Any, chunk: Chunk) -> bool:
        """Whether chunks may be one product: memory holds what all need at once."""
        ...
