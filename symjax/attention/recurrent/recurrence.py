"""Protocol of a recurrence: a mechanism that reads tokens into a state."""

from typing import Any, NamedTuple, Protocol

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


class Schedule(NamedTuple):
    """Execution of chunks on accelerators. CPUs always run one after the other.

    Attributes:
        parallel_chunks: chunks run in parallel, as one product. It pays unless a chunk
            needs much more memory than its tokens.
        on_one_gpu_only: TPUs and several GPUs run chunks in turn nevertheless. Either
            `advance` branches on its data, and both branches would run if chunks were
            one more axis of it, or `effect` costs as much as `advance`. A single GPU
            runs chunks as more examples, and waits at each small product of a chunk.
    """

    parallel_chunks: bool = True
    on_one_gpu_only: bool = False


class Recurrence(Stretches, Protocol):
    """A mechanism with a state. Hashable, since programs are compiled for it."""

    @property
    def kernel(self) -> str | None:
        """Family of its kernels: "features", "decay" or "delta"; None: it has none."""
        ...

    def empty(self, parameters: Any, sizes: tuple[int, int, int, int], dtype) -> Any:
        """The state that has read nothing. sizes: B K H V."""
        ...

    def schedule(self) -> Schedule:
        """Return how accelerators may run the chunks."""
        ...
