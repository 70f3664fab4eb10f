"""Execution of chunks: in turn or in parallel, and on time split over devices."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from symjax.attention.core.devices import backend, on_one_device
from symjax.attention.core.meshes import vary_alike
from symjax.attention.core.products import TILE, sum_dtype
from symjax.attention.core.sequence import choose, segment_state_before
from symjax.attention.recurrent.chunks import (
    Stretch,
    cut,
    joined,
    scan,
)
from symjax.attention.recurrent.recurrence import Recurrence, Stretches

STRETCH = 4096  # tokens whose chunks are handled side by side: this bounds the memory
ON_GPU = 2**18  # the same on a GPU, times examples and query heads: 3 to 6 GiB


def in_one(
    recurrence: Stretches, parameters: Any, state: Any, stretch: Stretch
) -> tuple[Any, Any]:
    """A stretch as one chunk: the state after it, and its rows."""
    return recurrence.advance(state, recurrence.prepare(parameters, stretch))


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


def run_on_accelerators(
    recurrence: Recurrence,
    chunk_size: int,
    parameters: Any,
    state: Any,
    stretch: Stretch,
) -> tuple[Any, Any]:
    """Run chunks in parallel where the schedule allows it, else in turn."""
    given = parameters, state, stretch
    size = -(-chunk_size // TILE) * TILE
    one_gpu, schedule = backend() == "gpu" and on_one_device(), recurrence.schedule()
    if not schedule.parallel_chunks or (schedule.on_one_gpu_only and not one_gpu):
        return scan(partial(in_one, recurrence), size, *given)
    batch, _, heads, _ = stretch.query.shape
    parallel = ON_GPU // max(1, batch * heads) if one_gpu else STRETCH
    many = partial(side_by_side, recurrence, size, one_gpu)
    return scan(many, max(size, parallel // size * size), *given)


def run_on_cpus(
    recurrence: Recurrence,
    chunk_size: int,
    parameters: Any,
    state: Any,
    stretch: Stretch,
) -> tuple[Any, Any]:
    """Run one chunk after the other, of one example after the other on one device.

    The arrays of one example's chunk stay in a CPU's caches: with 32 examples a step of
    gated linear attention takes 0.87 times as long (configs/gla.py:3l, two cores). With
    more examples than tokens a turn of the loop would have too little to do.

    16-bit numbers become float32 before the loop. The CPU compiler of jaxlib 0.10
    converts a whole 16-bit array in every turn of a loop that writes a part of it: at
    32,768 tokens a gradient of linear attention then takes 24 times as long.
    """

    def in_float32(x: Array) -> Array:
        return x.astype(sum_dtype(x)) if jnp.issubdtype(x.dtype, jnp.floating) else x

    stretch = jax.tree.map(in_float32, stretch)
    batch, length = stretch.visible.shape
    run = partial(scan, partial(in_one, recurrence), chunk_size, parameters)
    if not on_one_device() or not 1 < batch <= length:
        return run(state, stretch)

    def example(now: tuple[Any, Stretch]) -> tuple[Any, Any]:
        result = run(*jax.tree.map(lambda x: x[None], now))
        return jax.tree.map(lambda x: x[0], result)

    return jax.lax.map(example, (state, stretch))
