"""The engine of recurrences: whatever has a state runs over chunks of time in here.

    state = recurrence.empty(…)
    for chunk in chunks:                      # jax.lax.scan of a checkpointed body
        state, rows = recurrence.advance(parameters, state, chunk)
    output = recurrence.finish(parameters, state before all, all tokens, all rows)

On accelerators the chunks of 4096 tokens stand side by side where they can, and are a
multiple of 128 tokens long.

A mechanism is a `Recurrence`; the engine gives its causal form, one-token steps, states
taken and given, masks, segments, and time that is split over a mesh axis.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.checks import check, check_axis, shown_state
from symjax.attention.chunks import (
    TILE,
    Chunk,
    Tokens,
    heads_last,
    layout,
    scan,
    sum_dtype,
)
from symjax.attention.meshes import on_any_mesh
from symjax.attention.recurrence import Recurrence
from symjax.attention.side_by_side import side_by_side
from symjax.attention.time_axis import state_before

STRETCH = 4096  # tokens whose chunks are handled side by side: this bounds the memory


def attend_causal(
    who: str,
    recurrence: Recurrence,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    mask: Array | None,
    *,
    parameters: Any = None,
    operands: tuple[Array | None, ...] = (),
    chunk_size: int = 64,
    state: Any = None,
    return_state: bool = False,
    segment_ids: Array | None = None,
    axis_name: str | None = None,
) -> Any:
    """Every query sees the visible tokens of its segment up to its own.

    Args:
        operands: more arrays [#B #T K …] that the recurrence takes of each token.
    """
    check(who, query, key, value, mask, segment_ids, causal=True)
    check_axis(who, axis_name, state, return_state)
    if chunk_size < 1:
        raise ValueError(f"{who}: chunk_size must be at least 1, got {chunk_size}")
    state = _start(who, recurrence, parameters, state, query, key, value)
    tokens = Tokens(query, key, value, operands, mask, segment_ids)
    static = recurrence, chunk_size, axis_name
    output, state = _causal(*static, tokens, parameters, state)
    return (output, state) if return_state else output


def attend_step(
    who: str,
    recurrence: Recurrence,
    state: Any,
    query: Float[Array, "B 1 N H"],
    key: Float[Array, "B 1 K H"],
    value: Float[Array, "B 1 K V"],
    *,
    parameters: Any = None,
    operands: tuple[Array | None, ...] = (),
) -> tuple[Float[Array, "B 1 N V"], Any]:
    """One token, which sees itself and what the state has read: a chunk of its own."""
    check(who, query, key, value, None, None, causal=True)
    if query.shape[1] != 1:
        raise ValueError(f"{who}: a step takes one token, got query {query.shape}")
    state = _start(who, recurrence, parameters, state, query, key, value)
    tokens = Tokens(query, key, value, operands)
    return _step(recurrence, tokens, parameters, state)


def _start(
    who: str,
    recurrence: Recurrence,
    parameters: Any,
    state: Any,
    query: Array,
    key: Array,
    value: Array,
) -> Any:
    """The given state in the dtype of the sums, or the empty one."""
    dtype = sum_dtype(query, key, value)
    batch, _, heads, size = key.shape
    sizes = batch, heads, size, value.shape[-1]
    if state is None:
        return recurrence.empty(parameters, sizes, dtype)
    wanted = jax.eval_shape(lambda: recurrence.empty(parameters, sizes, dtype))
    fits = jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, wanted)
    if type(state) is not type(wanted) or not fits:
        raise ValueError(
            f"{who}: key {key.shape} and value {value.shape} need {shown_state(wanted)}"
            f", got {shown_state(state)}"
        )
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), state)


@on_any_mesh(3)
def _causal(
    recurrence: Recurrence,
    chunk_size: int,
    axis_name: str | None,
    tokens: Tokens,
    parameters: Any,
    state: Any,
) -> tuple[Float[Array, "B T N V"], Any]:
    chunk = layout(tokens, axis_name)
    if axis_name is not None:
        state = state_before(recurrence, parameters, chunk, chunk_size, axis_name)
    size = -(-chunk_size // TILE) * TILE
    in_turn = partial(one_by_one, recurrence, chunk_size)
    on_accelerators = partial(one_by_one, recurrence, size)
    if recurrence.may_stand_side_by_side(state, chunk):
        on_accelerators = partial(side_by_side, recurrence, size, STRETCH)
    state, rows = jax.lax.platform_dependent(
        parameters, state, chunk, cpu=in_turn, default=on_accelerators
    )
    return heads_last(rows, tokens.value.dtype), state


@on_any_mesh(1)
def _step(
    recurrence: Recurrence, tokens: Tokens, parameters: Any, state: Any
) -> tuple[Float[Array, "B 1 N V"], Any]:
    state, rows = one_by_one(recurrence, 1, parameters, state, layout(tokens))
    return heads_last(rows, tokens.value.dtype), state


def one_by_one(
    recurrence: Recurrence, chunk_size: int, parameters: Any, state: Any, chunk: Chunk
) -> tuple[Any, Array]:
    """All of time, a chunk after the other."""
    advance = partial(recurrence.advance, parameters)
    after, rows = scan(advance, state, chunk, chunk_size)
    return after, recurrence.finish(parameters, state, chunk, rows, chunk_size)
