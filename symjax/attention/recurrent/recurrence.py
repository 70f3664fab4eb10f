"""Protocol of a recurrence: a mechanism that reads tokens into a state.

A state is an array [B …] or a NamedTuple of arrays. Its size does not depend on T. The
engine (`engine.py`) splits time into spans (`chunks.Span`, arrays [B T …]). A CPU runs
one span after the other:

    state = recurrence.empty(parameters, (B, K, H, V), dtype)
    for span in spans:
        prepared = recurrence.prepare(parameters, span)
        state, rows = recurrence.advance(state, prepared)   # rows [B T K G V]

Accelerators run them in parallel if `recurrence.schedule()` allows it:

    prepared = [recurrence.prepare(parameters, span) for span in spans]
    effects = [recurrence.effect(x) for x in prepared]      # (state, transition)
    merged = itertools.accumulate(effects, recurrence.merge)
    empty = recurrence.empty(parameters, (B, K, H, V), dtype)
    before = [empty, *(after for after, _ in merged)]
    rows = [recurrence.advance(*x)[1] for x in zip(before, prepared)]

To decode one token, `engine.attend_step` calls `prepare` and `advance` on a span of one
token, and `empty` to check the shapes of the given state. It calls neither `effect` nor
`merge` nor `schedule`, and no kernel. But an `advance` may itself call `effect` and
`merge`, as that of `gated_linear.Decayed` does.

Axes: B examples, T tokens, K key heads, G query heads per key head, H channels of a
key, V channels of a value.
"""

from typing import Any, NamedTuple, Protocol

from symjax.attention.recurrent.chunks import Span


class ChunkwiseForm(Protocol):
    """Operations of a recurrence on a span of time.

    The effect of a span is a pair (state, transition): the state that the span makes of
    an empty one, and what the span does to an earlier state. The recurrence chooses the
    form of its transitions: a sum of log-decays, a matrix, or None if the span leaves
    an earlier state unchanged.

    Hidden tokens must leave a state unchanged. Their key, value and operands are zeros,
    and `visible` is False. The last span is padded with such tokens.
    """

    def prepare(self, parameters: Any, span: Span, /) -> Any:
        """Compute the part of `advance` and `effect` that depends on no state.

        Args:
            parameters: arrays that all tokens share, or None.
        Returns:
            Any tree of arrays.
        """
        ...

    def advance(self, state: Any, prepared: Any, /) -> tuple[Any, Any]:
        """Return the state after a span, and the output rows [B T K G V] of the span.

        Args:
            state: the state before the span.
            prepared: the result of `prepare`.
        """
        ...

    def effect(self, prepared: Any, /) -> tuple[Any, Any]:
        """Return the effect (state, transition) of a span.

        Args:
            prepared: the result of `prepare` for a span in which only the last segment
                is visible. The engine hides the tokens of earlier segments before it
                calls `prepare` for an effect.
        """
        ...

    def merge(
        self, earlier: tuple[Any, Any], later: tuple[Any, Any], /
    ) -> tuple[Any, Any]:
        """Return the effect of two consecutive spans, given the effect of each.

        The operation must be associative.
        """
        ...


class Schedule(NamedTuple):
    """Execution of chunks on accelerators. CPUs run one chunk after the other.

    Attributes:
        parallel_chunks: run chunks in parallel: on a GPU whose arrays XLA does not
            split n chunks of B examples run as one chunk of B · n examples, and on
            other devices by `jax.vmap` over chunks. This is faster, unless the
            intermediate results of a chunk need much more memory than its tokens.
        only_as_batch: do not use `jax.vmap`. Then chunks run one after the other, but
            not on such a GPU. Set it in either of two cases, in which `jax.vmap` is not
            faster:

            - `advance` has a branch that depends on data, of which `jax.vmap` would
              compute both sides;
            - `effect` costs as much as `advance`. For the delta rule on a TPU v5e the
              compiler estimates 388 million cycles in parallel, and 367 for one chunk
              after the other.
    """

    parallel_chunks: bool = True
    only_as_batch: bool = False


class Recurrence(ChunkwiseForm, Protocol):
    """A mechanism with a state; hashable, as a static argument of `jax.jit` must be."""

    @property
    def kernel(self) -> str | None:
        """Family of its kernels in `kernels.dispatch`; None if it has no kernel.

        The families of recurrences are "features", "decay" and "delta".
        """
        ...

    def empty(self, parameters: Any, sizes: tuple[int, int, int, int], dtype) -> Any:
        """Return the state before any token.

        Args:
            sizes: B, K, H, V.
            dtype: dtype of the sums; a state may use a wider one.
        """
        ...

    def schedule(self) -> Schedule:
        """Return how accelerators may run the chunks."""
        ...
