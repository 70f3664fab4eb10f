"""Execution of chunks: in turn, in parallel, and with time split over devices."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from symjax.attention.core.devices import backend, xla_keeps_arrays_whole
from symjax.attention.core.meshes import vary_alike
from symjax.attention.core.products import TILE, sum_dtype
from symjax.attention.core.sequence import choose, segment_state_before
from symjax.attention.recurrent.chunks import (
    Span,
    join_rows,
    scan,
    split_into_spans,
)
from symjax.attention.recurrent.recurrence import ChunkwiseForm, Recurrence

# Largest number of tokens per example that run in parallel. It bounds the memory.
PARALLEL_TOKENS = 4096
# On a GPU, where chunks become examples: largest number of tokens · examples · query
# heads. At this limit the chunks take 3 to 6 GiB.
PARALLEL_TOKENS_ON_GPU = 2**18


def run_as_one_chunk(
    recurrence: ChunkwiseForm, parameters: Any, state: Any, span: Span
) -> tuple[Any, Any]:
    """Return the state after a span and its rows, computed as one chunk."""
    return recurrence.advance(state, recurrence.prepare(parameters, span))


def run_parallel_chunks(
    recurrence: Recurrence,
    size: int,
    as_examples: bool,
    parameters: Any,
    state: Any,
    span: Span,
) -> tuple[Any, Array]:
    """Return the state after a span and its rows, in parallel chunks of `size` tokens.

    First the effects of all chunks are computed in parallel. A loop then merges them,
    which gives the state before each chunk. Finally all rows are computed in parallel.

    For a TPU v5e the compiler estimates that a constant decay, forward and backward,
    takes 65 million cycles with one chunk after the other, and 12 million in parallel
    (B 4, T 4096, N 16, H 64).

    Args:
        as_examples: True makes chunks further examples of the batch; no mesh may split
            the batch then. False makes chunks one more axis, by `jax.vmap`; then a
            branch of `advance` that depends on data computes both sides.
    """
    batch, length = span.visible.shape
    if length <= size:
        return run_as_one_chunk(recurrence, parameters, state, span)

    def over_chunks(function: Any) -> Any:
        return function if as_examples else jax.vmap(function)

    def flatten(x: Array) -> Array:
        return jax.lax.collapse(x, 0, 2) if as_examples else x

    def unflatten(x: Array) -> Array:
        return x.reshape(-1, batch, *x.shape[1:]) if as_examples else x

    prepare = over_chunks(partial(recurrence.prepare, parameters))
    spans = split_into_spans(span, size)
    chunks = jax.tree.map(flatten, spans)
    prepared = prepare(chunks)
    last_segments, starts_segment = prepared, None
    if spans.starts_segment is not None:
        last_segments = prepare(over_chunks(_last_segment)(chunks))
        starts_segment = spans.starts_segment.any(axis=2)
    effects = jax.tree.map(unflatten, over_chunks(recurrence.effect)(last_segments))
    state, _ = vary_alike((state, spans))

    def step(state: Any, chunk: tuple[Any, Any]) -> tuple[Any, Any]:
        effect, starts = chunk
        # `merge` takes pairs (state, transition). The merged transition is not used, so
        # any transition of the right shape will do.
        before = state, effect[1]
        after, _ = recurrence.merge(before, effect)
        return after if starts is None else choose(starts, effect[0], after), state

    after, before = jax.lax.scan(step, state, (effects, starts_segment))
    before = jax.tree.map(flatten, before)
    _, rows = over_chunks(recurrence.advance)(before, prepared)
    return after, join_rows(jax.tree.map(unflatten, rows), length)


def _last_segment(span: Span) -> Span:
    """Return the last segment of a span: the tokens before it become hidden."""
    if span.segment is None:
        return span
    last = span.segment == span.segment[:, -1:]

    def earlier_as_zeros(x: Array) -> Array:
        return jnp.where(last.reshape(*last.shape, *[1] * (x.ndim - 2)), x, 0)

    return span._replace(
        key=earlier_as_zeros(span.key),
        value=earlier_as_zeros(span.value),
        operands=jax.tree.map(earlier_as_zeros, span.operands),
        visible=span.visible & last,
        segment=None,
        starts_segment=None,
    )


def state_before_device(
    recurrence: ChunkwiseForm,
    parameters: Any,
    span: Span,
    chunk_size: int,
    axis_name: str,
) -> Any:
    """Return the state before the first token of this device.

    The state has read those tokens of earlier devices that belong to the segment of the
    first token. `span` has the tokens of this device alone.
    """
    chunks = split_into_spans(_last_segment(span), chunk_size)

    def effect(chunk: Span) -> tuple[Any, Any]:
        return recurrence.effect(recurrence.prepare(parameters, chunk))

    def body(before: Any, chunk: Span) -> tuple[Any, None]:
        return recurrence.merge(before, effect(chunk)), None

    empty = effect(jax.tree.map(lambda x: jnp.zeros_like(x[0]), chunks))
    empty, _ = vary_alike((empty, chunks))
    local, _ = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), empty, chunks)
    merge = recurrence.merge
    return segment_state_before(merge, local, empty, span.segment, axis_name)[0]


def run_on_accelerators(
    recurrence: Recurrence,
    chunk_size: int,
    parameters: Any,
    state: Any,
    span: Span,
) -> tuple[Any, Any]:
    """Run chunks in parallel if the schedule allows it, else one after the other."""
    arrays = parameters, state, span
    size = -(-chunk_size // TILE) * TILE
    schedule = recurrence.schedule()
    as_examples = backend() == "gpu" and xla_keeps_arrays_whole()
    refused = schedule.only_as_batch and not as_examples
    if refused or not schedule.parallel_chunks:
        return scan(partial(run_as_one_chunk, recurrence), size, *arrays)
    batch, _, heads, _ = span.query.shape
    parallel = (
        PARALLEL_TOKENS_ON_GPU // max(1, batch * heads)
        if as_examples
        else PARALLEL_TOKENS
    )
    in_parallel = partial(run_parallel_chunks, recurrence, size, as_examples)
    return scan(in_parallel, max(size, parallel // size * size), *arrays)


def run_on_cpus(
    recurrence: Recurrence,
    chunk_size: int,
    parameters: Any,
    state: Any,
    span: Span,
) -> tuple[Any, Any]:
    """Run all chunks of the first example in turn, then those of the next example.

    The arrays of one example's chunk stay in a CPU's caches. A step of
    configs/gla.py:3l, with 32 examples, takes 0.91 times as long as with all examples
    in one loop (two shared cores, processor time, jax 0.10.2). All examples run
    together if there are more examples than tokens, or if XLA may split the examples
    over devices.

    16-bit numbers become float32 before the loop. Otherwise the CPU compiler of jaxlib
    0.10 converts whole arrays in every iteration: at 32,768 tokens a gradient of linear
    attention takes 24 times as long.
    """

    def in_float32(x: Array) -> Array:
        return x.astype(sum_dtype(x)) if jnp.issubdtype(x.dtype, jnp.floating) else x

    span = jax.tree.map(in_float32, span)
    batch, length = span.visible.shape
    run = partial(scan, partial(run_as_one_chunk, recurrence), chunk_size, parameters)
    if not xla_keeps_arrays_whole() or not 1 < batch <= length:
        return run(state, span)

    def run_example(example: tuple[Any, Span]) -> tuple[Any, Any]:
        result = run(*jax.tree.map(lambda x: x[None], example))
        return jax.tree.map(lambda x: x[0], result)

    return jax.lax.map(run_example, (state, span))
