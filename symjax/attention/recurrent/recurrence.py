"""Protocol of a recurrence: a mechanism that reads tokens into a state."""

from typing import Any, Protocol

from symjax.attention.recurrent.chunks import Stretch


class Stretches(Protocol):
    """What stretches of time do to a state: as pairs of a state and a transition.

    A state is a NamedTuple of arrays [B …]. `parameters` are what all tokens share.
    A transition is what turns the state before a chunk into part of the one after it,
    None where that state is left as it is.
    """

    def prepare(self, parameters: Any, stretch: Stretch) -> Any:
        """What the stretch is computed from, and needs no state."""
        ...

    def advance(self, state: Any, prepared: Any, /) -> tuple[Any, Any]:
        """A stretch at once: the state after it, and its rows [B T K G V]."""
        ...

    def effect(self, prepared: Any, /) -> tuple[Any, Any]:
        """The state after one segment from an empty one, and its transition.

        Hidden tokens leave any state as it is.
        """
        ...

    def merge(self, one: tuple[Any, Any], two: tuple[Any, Any]) -> tuple[Any, Any]:
        """Two consecutive stretches as one. Associative."""
        ...


class Recurrence(Stretches, Protocol):
    """A mechanism with a state. Hashable, since programs are compiled for it."""

    @property
    def kernel(self) -> str | None:
        """Family of its kernels: "features", "decay" or "delta"; None: it has none."""
        ...

    def empty(self, parameters: Any, sizes: tuple[int, int, int, int], dtype) -> Any:
        """The state that has read nothing. sizes: B K H V."""
        ...

    def may_stand_side_by_side(
        self, state: Any, stretch: Stretch, platform: str
    ) -> bool:
        """Whether chunks should be one product: on a "tpu", which stands for all
        accelerators but a single GPU, if memory holds what 4096 tokens need at once,
        and no derivative inside is of reverse mode alone; on a "gpu", which waits at
        each product of a chunk alone, wherever chunks may be examples; of few tokens on
        a "cpu", if `effect` costs little."""
        ...
