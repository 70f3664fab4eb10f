"""The ways to execute a mechanism made of features, one function in all of them.

All keys at once (`attend`), causally in chunks of time (`attend_causal`), token by
token from a state (`attend_step`), and any mixture, since each form that has a past
takes and gives a state. The sums themselves are in `prefix.py`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array

from symjax.attention import prefix
from symjax.attention.checks import check, check_axis, shown_state
from symjax.attention.features import Features, Powers
from symjax.attention.masks import visible_keys
from symjax.attention.prefix import Chunk, Fraction, LinearState
from symjax.attention.shards import (
    on_auto_axes,
    run_state_before,
    segment_runs_over,
    vary_alike,
)


def empty_state(
    features: Features,
    parameters: Any,
    batch: int,
    kv_heads: int,
    head_size: int,
    value_size: int,
    dtype: Any,
) -> LinearState:
    """No keys seen: sums of zero, and peaks of −∞ where features have an exponent."""
    dtype = jnp.promote_types(dtype, jnp.float32)
    like = jax.ShapeDtypeStruct((batch, kv_heads, head_size), dtype)
    key = jax.eval_shape(features.key, like, parameters)
    total = jax.eval_shape(Powers.weights, key)
    peak = None
    if key.exponent is not None:
        peak = jnp.full(key.exponent.shape, -jnp.inf, dtype)
    sums = jnp.zeros((*total.shape, value_size), dtype)
    return LinearState(sums, jnp.zeros(total.shape, dtype), peak)


def attend(
    who: str,
    features: Features,
    parameters: Any,
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    segment_ids: Array | None,
) -> Array:
    """Every query sees every visible key of its segment."""
    check(who, query, key, value, mask, segment_ids, causal=segment_ids is not None)
    return _whole(features, query, key, value, parameters, mask, segment_ids)


def attend_causal(
    who: str,
    features: Features,
    parameters: Any,
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    *,
    chunk_size: int = 64,
    state: LinearState | None = None,
    return_state: bool = False,
    segment_ids: Array | None = None,
    axis_name: str | None = None,
) -> Any:
    """Every query sees the visible keys of its segment up to its own."""
    check(who, query, key, value, mask, segment_ids, causal=True)
    check_axis(who, axis_name, state, return_state)
    if chunk_size < 1:
        raise ValueError(f"{who}: chunk_size must be at least 1, got {chunk_size}")
    state = _start(who, features, parameters, state, query, key, value)
    static = (features, chunk_size, axis_name)
    output, state = _causal(
        *static, query, key, value, parameters, state, mask, segment_ids
    )
    return (output, state) if return_state else output


def attend_step(
    who: str,
    features: Features,
    parameters: Any,
    state: LinearState,
    query: Array,
    key: Array,
    value: Array,
) -> tuple[Array, LinearState]:
    """One token, which sees itself and what the state has seen."""
    check(who, query, key, value, None, None, causal=True)
    if query.shape[1] != 1:
        raise ValueError(f"{who}: a step takes one token, got query {query.shape}")
    state = _start(who, features, parameters, state, query, key, value)
    return _step(features, query, key, value, parameters, state)


def _start(
    who: str,
    features: Features,
    parameters: Any,
    state: LinearState | None,
    query: Array,
    key: Array,
    value: Array,
) -> LinearState:
    """The given state in the dtype of the sums, or the empty one."""
    dtype = sum_dtype(query, key, value)
    batch, _, heads, size = key.shape
    width = value.shape[-1]
    wanted = jax.eval_shape(
        lambda: empty_state(features, parameters, batch, heads, size, width, dtype)
    )
    if state is None:
        return empty_state(features, parameters, batch, heads, size, width, dtype)
    fits = jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, wanted)
    if not isinstance(state, LinearState) or not fits:
        raise ValueError(
            f"{who}: key {key.shape} and value {value.shape} need {shown_state(wanted)}"
            f", got {shown_state(state)}"
        )
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), state)


def sum_dtype(*arrays: Array) -> Any:
    """The dtype of sums over time: that of the arrays, float32 at least."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def _whole(features: Features, *operands: Any) -> Array:
    def rows(query, key, value, parameters, mask, segment_ids):
        dtype = sum_dtype(query, key, value)
        batch, _, heads, size = key.shape
        sizes = (batch, heads, size, value.shape[-1])
        state = empty_state(features, parameters, *sizes, dtype)
        chunk = layout(query, key, value, mask, segment_ids)
        if chunk.run is not None:
            state, chunk = vary_alike((state, chunk))
            fraction = _both_sides(features, parameters, state, chunk, chunk.run)
        else:
            chunk = prefix.to_features(features, parameters, chunk, dtype)
            state = prefix.absorb(state, chunk.key, chunk.value)
            fraction = prefix.read(state, chunk.query)
        return heads_last(prefix.divide(fraction), value.dtype), ()

    return on_auto_axes(rows, operands[0], operands[2], *operands)[0]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _causal(
    features: Features,
    chunk_size: int,
    axis_name: str | None,
    *operands: Any,
) -> tuple[Array, LinearState]:
    def rows(query, key, value, parameters, state, mask, segment_ids):
        chunk = layout(query, key, value, mask, segment_ids, axis_name)
        state, chunk = vary_alike((state, chunk))
        if axis_name is not None:
            state = _before(features, chunk_size, axis_name, parameters, state, chunk)
        state, output = scan_chunks(
            features, parameters, state, chunk, chunk_size, prefix.divide
        )
        return heads_last(output, value.dtype), state

    return on_auto_axes(rows, operands[0], operands[2], *operands)


@functools.partial(jax.jit, static_argnums=0)
def _step(features: Features, *operands: Any) -> tuple[Array, LinearState]:
    def rows(query, key, value, parameters, state):
        chunk = layout(query, key, value, None, None)
        chunk = prefix.to_features(features, parameters, chunk, state.total.dtype)
        state = prefix.absorb(state, chunk.key, chunk.value)
        output = prefix.divide(prefix.read(state, chunk.query))
        return heads_last(output, value.dtype), state

    return on_auto_axes(rows, operands[0], operands[2], *operands)


def scan_chunks(
    features: Features,
    parameters: Any,
    state: LinearState,
    chunk: Chunk,
    chunk_size: int,
    finish: Callable[[Fraction], Any],
) -> tuple[LinearState, Any]:
    """All of time, a chunk after the other; `finish` turns the rows into outputs.

    The backward pass recomputes a chunk from the state before it.
    """
    length = chunk.key.shape[2]
    chunks = cut_chunk(chunk, max(1, min(chunk_size, length)))

    def body(state: LinearState, chunk: Chunk) -> tuple[LinearState, Any]:
        dtype = state.total.dtype
        chunk = prefix.to_features(features, parameters, chunk, dtype)
        state, fraction = prefix.advance(state, chunk)
        return state, finish(fraction)

    state, rows = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), state, chunks)
    return state, jax.tree.map(lambda x: join(x, length), rows)


def _before(
    features: Features,
    chunk_size: int,
    axis_name: str,
    parameters: Any,
    empty: LinearState,
    chunk: Chunk,
) -> LinearState:
    """What the stretches before a device's own have seen of the run it goes on with."""
    visible = chunk.visible
    if chunk.run is not None:
        visible = visible & (chunk.run == chunk.run[:, -1:])
    last = chunk._replace(visible=visible)
    own = _absorb_chunks(features, chunk_size, parameters, empty, last)
    return run_state_before(prefix.union, own, empty, chunk.run, axis_name)


def _absorb_chunks(
    features: Features,
    chunk_size: int,
    parameters: Any,
    state: LinearState,
    chunk: Chunk,
) -> LinearState:
    """The state after all keys, whose features are never there all at once."""
    chunk = chunk._replace(query=None, run=None)
    chunks = cut_chunk(chunk, max(1, min(chunk_size, chunk.key.shape[2])))

    def body(state: LinearState, chunk: Chunk) -> tuple[LinearState, None]:
        dtype = state.total.dtype
        chunk = prefix.key_features(features, parameters, chunk, dtype)
        return prefix.absorb(state, chunk.key, chunk.value), None

    return jax.lax.scan(jax.checkpoint(body, prevent_cse=False), state, chunks)[0]


def cut(x: Array, size: int, axis: int, mode: str = "constant") -> Array:
    """Chunks of time stacked in front; the last is filled up, with zeros by default."""
    length = x.shape[axis]
    count = -(-length // size)
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, count * size - length)
    x = jnp.pad(x, widths, mode=mode)
    x = x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def join(rows: Array, length: int) -> Array:
    """Chunks [C B K G T …] put together again along time: [B K G length …]."""
    rows = jnp.moveaxis(rows, 0, 3)
    return jax.lax.collapse(rows, 3, 5)[:, :, :, :length]


def cut_chunk(chunk: Chunk, size: int) -> Chunk:
    """Chunks stacked in front; the last is filled with hidden keys."""
    run = fresh = None
    if chunk.run is not None:
        run = cut(chunk.run, size, 1, "edge")
        before = jnp.concatenate([run[:1, :, 0], run[:-1, :, -1]])
        fresh = run[:, :, 0] != before
    return Chunk(
        None if chunk.query is None else cut(chunk.query, size, 3),
        cut(chunk.key, size, 2),
        cut(chunk.value, size, 2),
        cut(chunk.visible, size, 1),
        run,
        fresh,
    )


def _both_sides(
    features: Features, parameters: Any, state: LinearState, chunk: Chunk, run: Array
) -> Fraction:
    """Rows that see all of their run: the past with itself, and the future without.

    Seen backwards, the future without itself is a past whose keys come a token late.
    """

    def scan(chunk: Chunk) -> Fraction:
        return scan_chunks(features, parameters, state, chunk, 64, lambda rows: rows)[1]

    run, visible = jnp.flip(run, 1), jnp.flip(chunk.visible, 1)
    same = jnp.roll(run, 1, axis=1) == run
    late = Chunk(
        jnp.flip(chunk.query, 3),
        jnp.roll(jnp.flip(chunk.key, 2), 1, axis=2),
        jnp.roll(jnp.flip(chunk.value, 2), 1, axis=2),
        jnp.roll(visible, 1, axis=1) & same & (jnp.arange(run.shape[1]) > 0)[None],
        run,
    )
    future = jax.tree.map(lambda x: jnp.flip(x, 3), scan(late))
    return prefix.merge(scan(chunk), future)


def layout(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    segment_ids: Array | None,
    axis_name: str | None = None,
) -> Chunk:
    """Heads before time and queries grouped by key head; hidden keys and values are 0.

    Zeros, so that not even a NaN in the padding reaches a sum or a gradient.
    """
    batch, length, heads, _ = key.shape
    visible = visible_keys(mask, batch, length)
    if mask is not None:
        key = jnp.where(visible[:, :, None, None], key, 0)
        value = jnp.where(visible[:, :, None, None], value, 0)
    run, _ = segment_runs_over(segment_ids, axis_name)
    return Chunk(
        rearrange(query, "b t (k g) h -> b k g t h", k=heads),
        rearrange(key, "b s k h -> b k s h"),
        rearrange(value, "b s k v -> b k s v"),
        visible,
        run,
    )


def heads_last(rows: Array, dtype: Any) -> Array:
    return rearrange(rows, "b k g t v -> b t (k g) v").astype(dtype)
