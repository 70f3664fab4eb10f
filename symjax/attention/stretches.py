"""Chunks of time side by side, and time over devices: states that are merged."""

from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array

from symjax.attention.chunks import (
    Advance,
    Stretch,
    cut,
    joined,
)
from symjax.attention.meshes import batched_alike, vary_alike
from symjax.attention.shards import choose, segment_state_before


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


def in_one(
    recurrence: Stretches, parameters: Any, state: Any, stretch: Stretch
) -> tuple[Any, Any]:
    """A stretch as one chunk: the state after it, and its rows."""
    return recurrence.advance(state, recurrence.prepare(parameters, stretch))


def with_derivative_of(other: Advance, advance: Advance, forward_mode: bool) -> Advance:
    """`advance`, differentiated as another form of the same.

    forward_mode: whether the other form has such a derivative (`jax.jvp`).
    """

    def advanced(form: Advance, *given: Any) -> tuple[Any, Any]:
        return batched_alike(form(*given))

    other, advance = partial(advanced, other), partial(advanced, advance)
    if forward_mode:
        function = jax.custom_jvp(advance)
        function.defjvp(partial(jax.jvp, other))
    else:
        function = jax.custom_vjp(advance)
        function.defvjp(partial(jax.vjp, other), lambda pull, change: pull(change))
    return function


def side_by_side(
    recurrence: Recurrence,
    size: int,
    as_examples: bool,
    parameters: Any,
    state: Any,
    stretch: Stretch,
) -> tuple[Any, Array]:
    """`in_one` for chunks of `size` tokens, in one product.

    First the state after each chunk from an empty one, then the states before all of
    them, one after the other, then their rows. Accelerators are slow at many small
    products: forward and backward, a constant decay takes 12 Mcycles instead of 65, as
    v5e's compiler estimates it (B 4, T 4096, N 16, H 64).

    as_examples: chunks are as many examples, which may branch by their data, and which
        a mesh must not split; else one more axis.
    """
    batch, length = stretch.visible.shape
    if length <= size:
        return in_one(recurrence, parameters, state, stretch)

    def every(function: Any) -> Any:
        return function if as_examples else jax.vmap(function)

    def together(x: Array) -> Array:
        return jax.lax.collapse(x, 0, 2) if as_examples else x

    def apart(x: Array) -> Array:
        return x.reshape(-1, batch, *x.shape[1:]) if as_examples else x

    prepare = every(partial(recurrence.prepare, parameters))
    parts = cut(stretch, size)
    chunks = jax.tree.map(together, parts)
    prepared = prepare(chunks)
    ending, anew = prepared, None
    if parts.starts_segment is not None:
        ending = prepare(every(_last_segment)(chunks))
        anew = parts.starts_segment.any(axis=2)
    effects = jax.tree.map(apart, every(recurrence.effect)(ending))
    state, _ = vary_alike((state, parts))

    def step(state: Any, now: tuple[Any, Any]) -> tuple[Any, Any]:
        effect, anew = now
        before = state, effect[1]  # any transition: that of both is not wanted
        after, _ = recurrence.merge(before, effect)
        return after if anew is None else choose(anew, effect[0], after), state

    after, before = jax.lax.scan(step, state, (effects, anew))
    before = jax.tree.map(together, before)
    _, rows = every(recurrence.advance)(before, prepared)
    return after, joined(jax.tree.map(apart, rows), length)


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

    def effect(chunk: Stretch) -> tuple[Any, Any]:
        return recurrence.effect(recurrence.prepare(parameters, chunk))

    def body(before: Any, chunk: Stretch) -> tuple[Any, None]:
        return recurrence.merge(before, effect(chunk)), None

    nothing = effect(jax.tree.map(lambda x: jnp.zeros_like(x[0]), chunks))
    nothing, _ = vary_alike((nothing, chunks))
    own, _ = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), nothing, chunks)
    given = recurrence.merge, own, nothing, stretch.segment, axis_name
    return segment_state_before(*given)[0]
