"""Chunks of time handled side by side, for accelerators: they are slow at many small
products.

First what each chunk makes of nothing, then the states before all of them, one after
the other, then their rows. Forward and backward, a constant decay takes 12 Mcycles
instead of 65, as v5e's compiler estimates it (B 4, T 4096, N 16, H 64).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from symjax.attention.chunks import Chunk, hide, join, scan, stacked, unsegmented
from symjax.attention.meshes import vary_alike
from symjax.attention.recurrence import Recurrence, Stretches
from symjax.attention.shards import choose


def side_by_side(
    recurrence: Recurrence,
    chunk_size: int,
    stretch: int,
    parameters: Any,
    state: Any,
    chunk: Chunk,
) -> tuple[Any, Array]:
    """All of time, the chunks of each stretch of time in one product."""
    body = partial(_advance_many, recurrence, chunk_size, parameters)
    return scan(body, state, chunk, stretch)


def _advance_many(
    recurrence: Recurrence, size: int, parameters: Any, state: Any, chunk: Chunk
) -> tuple[Any, Array]:
    """`advance` for a stretch of chunks."""
    length = chunk.key.shape[2]
    if length <= size:
        after, rows = recurrence.advance(parameters, state, chunk)
        return after, recurrence.finish(parameters, state, chunk, rows, size)
    chunks = stacked(chunk, size)
    ends = jax.vmap(partial(_end, recurrence, parameters))(chunks)
    start, unchanged = before_all(recurrence, parameters, state, chunks)

    def step(state: Any, end: tuple[Any, Any]) -> tuple[Any, Any]:
        stretch, anew = end
        after, _ = recurrence.merge((state, unchanged), stretch)
        return after if anew is None else choose(anew, stretch[0], after), state

    after, before = jax.lax.scan(step, start, ends)
    _, rows = jax.vmap(partial(recurrence.advance, parameters))(before, chunks)
    rows = join(rows, length)
    return after, recurrence.finish(parameters, state, chunk, rows, size)


def before_all(
    recurrence: Stretches, parameters: Any, state: Any, chunks: Chunk
) -> tuple[Any, Any]:
    """A state as a stretch to merge with those of the chunks; None: the empty one."""
    hidden = jax.tree.map(lambda x: jnp.zeros_like(x[0]), unsegmented(chunks))
    empty, unchanged = recurrence.stretch(parameters, hidden)
    state = empty if state is None else state
    return vary_alike((state, unchanged, chunks))[:2]


def _end(
    recurrence: Stretches, parameters: Any, chunk: Chunk
) -> tuple[tuple[Any, Any], Bool[Array, " B"] | None]:
    """The stretch of a chunk's last segment, and whether that starts in the chunk."""
    segment, starts_segment = chunk.segment, chunk.starts_segment
    if segment is None or starts_segment is None:
        return recurrence.stretch(parameters, chunk), None
    last = hide(unsegmented(chunk), segment == segment[:, -1:])
    return recurrence.stretch(parameters, last), starts_segment.any(axis=1)
