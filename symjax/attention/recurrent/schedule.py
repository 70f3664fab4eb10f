"""Chunks of time side by side, and time over devices: states that are merged."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from symjax.attention.core.devices import backend, on_one_device
from symjax.attention.core.meshes import batched_alike, vary_alike
from symjax.attention.core.products import TILE
from symjax.attention.core.sequence import choose, segment_state_before
from symjax.attention.recurrent.chunks import (
    Advance,
    Stretch,
    cut,
    even_size,
    joined,
    scan,
    scan_apart,
    scan_wide,
)
from symjax.attention.recurrent.recurrence import Recurrence, Stretches

STRETCH = 4096  # tokens whose chunks are handled side by side: this bounds the memory
ON_GPU = 2**18  # the same on a GPU, times examples and query heads: 3 to 6 GiB
AT_ONCE = 300_000  # features of tokens and heads whose chunks a gradient keeps


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


def _on_accelerators(
    recurrence: Recurrence, chunk_size: int, state: Any, stretch: Stretch
) -> Advance:
    size = -(-chunk_size // TILE) * TILE
    gpu = backend() == "gpu" and on_one_device()
    if recurrence.may_stand_side_by_side(state, stretch, "gpu" if gpu else "tpu"):
        batch, _, heads, _ = stretch.query.shape
        stretch_size = ON_GPU // max(1, batch * heads) if gpu else STRETCH
        many = partial(side_by_side, recurrence, size, gpu)
        return partial(scan, many, max(size, stretch_size // size * size))
    return partial(scan, partial(in_one, recurrence), size)


def _on_cpus(
    recurrence: Recurrence,
    chunk_size: int,
    alone: bool,
    state: Any,
    stretch: Stretch,
) -> Advance:
    batch, length = stretch.visible.shape
    size, single = even_size(stretch, chunk_size), on_one_device()
    # With more examples than tokens a turn would have too little to do.
    apart = single and alone and 0 < batch <= length
    one = partial(in_one, recurrence)
    in_turn = partial(scan_wide, scan_apart if apart else scan, one, size)
    numbers = length * max(x.size for x in jax.tree.leaves(state))
    few = single and 0 < numbers <= AT_ONCE * stretch.value.shape[-1]
    may = partial(recurrence.may_stand_side_by_side, state, stretch)
    if not few or not may("cpu"):
        return in_turn
    many = partial(side_by_side, recurrence, size, True)
    return with_derivative_of(many, in_turn, forward_mode=may("tpu"))
