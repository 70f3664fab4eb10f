"""Chunks of time side by side, and time over devices: states that are merged."""

from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from symjax.attention.chunks import (
    Stretch,
    cut,
    joined,
)
from symjax.attention.meshes import vary_alike
from symjax.attention.shards import choose, segment_state_before


class Stretches(Protocol):
    """What stretches of time do to a state: as pairs of a state and a transition.

    A state is a NamedTuple of arrays [B …]. `parameters` are what all tokens share.
    A transition is what turns the state before a chunk into part of the one after it,
    None where that state is left as it is.
    """

    def stretch(self, parameters: Any, stretch: Stretch) -> tuple[Any, Any]:
        """The state after one segment from an empty one, and its transition.

        Hidden tokens leave any state as it is.
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

    def advance(
        self, parameters: Any, state: Any, stretch: Stretch
    ) -> tuple[Any, Array]:
        """All of it at once: the state after it, and its rows [B T K G V]."""
        ...

    def may_stand_side_by_side(self, state: Any, stretch: Stretch) -> bool:
        """Whether chunks may be one product: none branches by its data
        (`jax.lax.cond`), and memory holds what all of them need at once."""
        ...


def side_by_side(
    recurrence: Recurrence, parameters: Any, size: int, state: Any, stretch: Stretch
) -> tuple[Any, Array]:
    """`advance` for chunks of `size` tokens, in one product: rows [B T K G V].

    First the state after each chunk from an empty one, then the states before all of
    them, one after the other, then their rows. For accelerators, which are slow at many
    small products: forward and backward, a constant decay takes 12 Mcycles instead of
    65, as v5e's compiler estimates it (B 4, T 4096, N 16, H 64).
    """
    length = stretch.key.shape[1]
    if length <= size:
        return recurrence.advance(parameters, state, stretch)
    chunks = cut(stretch, size)
    ends = jax.vmap(partial(_end, recurrence, parameters))(chunks)
    state, unchanged = _before_all(recurrence, parameters, state, chunks)

    def step(state: Any, end: tuple[Any, Any]) -> tuple[Any, Any]:
        stretch, anew = end
        after, _ = recurrence.merge((state, unchanged), stretch)
        return after if anew is None else choose(anew, stretch[0], after), state

    after, before = jax.lax.scan(step, state, ends)
    _, rows = jax.vmap(partial(recurrence.advance, parameters))(before, chunks)
    return after, joined(rows, length)


def _before_all(
    recurrence: Stretches, parameters: Any, state: Any, chunks: Stretch
) -> tuple[Any, Any]:
    """A state as a stretch to merge with those of the chunks; None: the empty one."""
    chunks = chunks._replace(segment=None, starts_segment=None)
    hidden = jax.tree.map(lambda x: jnp.zeros_like(x[0]), chunks)
    empty, unchanged = recurrence.stretch(parameters, hidden)
    state = empty if state is None else state
    return vary_alike((state, unchanged, chunks))[:2]


def _end(
    recurrence: Stretches, parameters: Any, stretch: Stretch
) -> tuple[tuple[Any, Any], Bool[Array, " B"] | None]:
    """What a stretch's last segment does, and whether that starts in it."""
    end = recurrence.stretch(parameters, _last_segment(stretch))
    if stretch.starts_segment is None:
        return end, None
    return end, stretch.starts_segment.any(axis=1)


def _last_segment(stretch: Stretch) -> Stretch:
    """The stretch as one segment, with all tokens before its last one hidden."""
    if stretch.segment is None:
        return stretch
    seen = stretch.segment == stretch.segment[:, -1:]

    def zeros(x: Array) -> Array:
        return jnp.where(seen.reshape(*seen.shape, *[1] * (x.ndim - 2)), x, 0)

    return stretch._replace(
        key=zeros(stretch.key),
        value=zeros(stretch.value),
        operands=jax.tree.map(zeros, stretch.operands),
        visible=stretch.visible & seen,
        segment=None,
        starts_segment=None,
    )


def state_before(
    recurrence: Stretches,
    parameters: Any,
    stretch: Stretch,
    chunk_size: int,
    axis_name: str,
) -> Any:
    """What earlier devices' stretches leave of the segment a device continues with."""
    chunks = cut(_last_segment(stretch), chunk_size)
    nothing = _before_all(recurrence, parameters, None, chunks)

    def body(before: Any, chunk: Stretch) -> tuple[Any, None]:
        return recurrence.merge(before, recurrence.stretch(parameters, chunk)), None

    own, _ = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), nothing, chunks)
    given = recurrence.merge, own, nothing, stretch.segment, axis_name
    return segment_state_before(*given)[0]
