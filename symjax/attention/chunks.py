"""The engine of recurrences: whatever has a state runs over chunks of time in here.

    state = recurrence.empty(…)
    for chunk in chunks:                      # jax.lax.scan of a checkpointed body
        state, rows = recurrence.advance(parameters, state, chunk)

On accelerators the chunks of 4096 tokens stand side by side where they can, and are a
multiple of 128 tokens long.

A mechanism is a `Recurrence`; the engine gives its causal form, one-token steps, states
taken and given, masks, segments, and time that is split over a mesh axis. It may bring
a kernel for TPUs, which takes the place of the chunks where

- no state is given or wanted, and time is not split over devices;
- there are at least 128 tokens of bfloat16 or float32, in heads of at most 256;
- a TPU is in sight, v4 or later and without jax's 64-bit types;
- the call is of one device alone: in a `jax.shard_map`, as layers under a mesh make it,
  or where there is but one. XLA cannot split a kernel;
- the kernel serves the arguments.

What runs is then decided where the program is lowered. Kernels have no forward-mode
derivative (`jax.jvp`), and no second one.
"""

from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.checks import check, check_axis, shown_state
from symjax.attention.masks import starts, visible_keys
from symjax.attention.meshes import (
    on_any_mesh,
    on_one_device,
    on_tpu,
    vary_alike,
)
from symjax.attention.shards import choose, segment_runs_over, segment_state_before

einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)

TILE = 128  # accelerators multiply by tiles of so many rows
STRETCH = 4096  # tokens whose chunks are handled side by side: this bounds the memory
LARGEST_HEAD = 256  # that kernels serve


class Tokens(NamedTuple):
    """What a mechanism is given, as it is given."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]
    operands: tuple[Any, ...] = ()  # more of each token, [#B #T K …]
    mask: Bool[Array, "#B 1 1 #S"] | None = None
    segment_ids: Int[Array, "B T"] | None = None


class Chunk(NamedTuple):
    """A stretch of time, heads before time. Of hidden tokens all but the query is 0.

    `segment` numbers the segments; `starts_segment` marks the first token of each but
    the one that goes on from the state. Both are None where there are no segments.
    """

    query: Float[Array, "B K G T H"]
    key: Float[Array, "B K T H"]
    value: Float[Array, "B K T V"]
    operands: tuple[Any, ...]  # more of each token, [B K T …]
    visible: Bool[Array, "B T"]
    segment: Int[Array, "B T"] | None
    starts_segment: Bool[Array, "B T"] | None


class Stretches(Protocol):
    """What stretches of time do to a state: as pairs of a state and a transition.

    A state is a NamedTuple of arrays [B …]. `parameters` are what all tokens share.
    A transition is what turns the state before a chunk into part of the one after it,
    None where that state is left as it is.
    """

    def stretch(self, parameters: Any, chunk: Chunk) -> tuple[Any, Any]:
        """The state that a chunk of one segment makes of nothing, and its transition.

        A chunk of hidden tokens leaves any state as it is.
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

    def advance(self, parameters: Any, state: Any, chunk: Chunk) -> tuple[Any, Array]:
        """One chunk: the state after it, and its rows [B K G T V]."""
        ...

    def may_stand_side_by_side(self, state: Any, chunk: Chunk) -> bool:
        """Whether chunks may be one product: none branches by its data
        (`jax.lax.cond`), and memory holds what all of them need at once."""
        ...


class Kernel(Protocol):
    """A mechanism on TPUs, without chunks. Hashable."""

    def serves(self, tokens: Tokens, parameters: Any) -> bool:
        """Whether it may run; the engine has looked at devices and sizes."""
        ...

    def attend(self, tokens: Tokens, parameters: Any) -> Float[Array, "B T N V"]:
        """The output of `attend_causal`."""
        ...


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
    kernel: Kernel | None = None,
) -> Any:
    """Every query sees the visible tokens of its segment up to its own.

    Args:
        operands: more arrays [#B #T K …] that the recurrence takes of each token.
        kernel: what may take the place of the recurrence.
    """
    check(who, query, key, value, mask, segment_ids, causal=True)
    check_axis(who, axis_name, state, return_state)
    if chunk_size < 1:
        raise ValueError(f"{who}: chunk_size must be at least 1, got {chunk_size}")
    tokens = Tokens(query, key, value, operands, mask, segment_ids)
    alone = state is None and not return_state and axis_name is None
    state = _start(who, recurrence, parameters, state, query, key, value)
    if kernel is not None and alone and served(kernel, tokens, parameters):
        by_chunks = recurrence, chunk_size
        return _on_kernel(kernel, *by_chunks, tokens, parameters, state)[0]
    static = recurrence, chunk_size, axis_name
    output, state = _causal(*static, tokens, parameters, state)
    return (output, state) if return_state else output


def served(kernel: Kernel, tokens: Tokens, parameters: Any) -> bool:
    """Whether a call of these tokens is for the kernel, on a TPU."""
    query, key, value = tokens[:3]
    return (
        on_tpu()
        and on_one_device()
        and query.shape[1] >= TILE
        and max(key.shape[3], value.shape[3]) <= LARGEST_HEAD
        and jnp.result_type(query, key, value) in (jnp.bfloat16, jnp.float32)
        and kernel.serves(tokens, parameters)
    )


@on_any_mesh(3)
def _on_kernel(
    kernel: Kernel,
    recurrence: Recurrence,
    chunk_size: int,
    tokens: Tokens,
    parameters: Any,
    state: Any,
) -> tuple[Float[Array, "B T N V"], tuple]:
    def by_chunks() -> Array:
        static = recurrence, chunk_size, None
        return _causal(*static, tokens, parameters, state)[0]

    output = jax.lax.platform_dependent(
        tpu=lambda: kernel.attend(tokens, parameters), default=by_chunks
    )
    return output, ()


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


def sum_dtype(*arrays: Array) -> Any:
    """The dtype of sums over time: that of the arrays, float32 at least."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


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
    state, rows = recurrence.advance(parameters, state, layout(tokens))
    return heads_last(rows, tokens.value.dtype), state


def layout(tokens: Tokens, axis_name: str | None = None) -> Chunk:
    """All tokens [B T …] as one chunk: heads before time, queries by their key head.

    Zeros stand for hidden keys, values and operands: a NaN in these reaches no sum and
    no gradient. One in a hidden query reaches its own row, and through that row's
    cotangent the gradients of all that the row reads.
    """
    query, key, value, operands, mask, segment_ids = tokens
    batch, length, heads, _ = key.shape
    visible = jnp.ones((batch, length), bool)
    if mask is not None:
        visible = visible_keys(mask, batch, length)

    def seen(x: Array) -> Array:
        x = jnp.broadcast_to(x, (batch, length, *x.shape[2:]))
        if mask is not None:
            x = jnp.where(visible.reshape(batch, length, *[1] * (x.ndim - 2)), x, 0)
        return jnp.swapaxes(x, 1, 2)

    segment = None
    if segment_ids is not None:
        segment, _ = segment_runs_over(segment_ids, axis_name)
    return Chunk(
        rearrange(query, "b t (k g) h -> b k g t h", k=heads),
        seen(key),
        seen(value),
        jax.tree.map(seen, operands),
        visible,
        segment,
        None if segment is None else starts(segment),
    )


def heads_last(rows: Float[Array, "B K G T V"], dtype: Any) -> Float[Array, "B T N V"]:
    return rearrange(rows, "b k g t v -> b t (k g) v").astype(dtype)


def one_by_one(
    recurrence: Recurrence, chunk_size: int, parameters: Any, state: Any, chunk: Chunk
) -> tuple[Any, Array]:
    """All of time, a chunk after the other."""
    return scan(partial(recurrence.advance, parameters), state, chunk, chunk_size)


def side_by_side(
    recurrence: Recurrence,
    chunk_size: int,
    stretch: int,
    parameters: Any,
    state: Any,
    chunk: Chunk,
) -> tuple[Any, Array]:
    """All of time, the chunks of each stretch of time in one product.

    First what each chunk makes of nothing, then the states before all of them, one
    after the other, then their rows. For accelerators, which are slow at many small
    products: forward and backward, a constant decay takes 12 Mcycles instead of 65, as
    v5e's compiler estimates it (B 4, T 4096, N 16, H 64).
    """
    body = partial(_advance_many, recurrence, chunk_size, parameters)
    return scan(body, state, chunk, stretch)


def _advance_many(
    recurrence: Recurrence, size: int, parameters: Any, state: Any, chunk: Chunk
) -> tuple[Any, Array]:
    """`advance` for a stretch of chunks."""
    length = chunk.key.shape[2]
    if length <= size:
        return recurrence.advance(parameters, state, chunk)
    chunks = _chunks(chunk, size)
    ends = jax.vmap(partial(_end, recurrence, parameters))(chunks)
    state, unchanged = _before_all(recurrence, parameters, state, chunks)

    def step(state: Any, end: tuple[Any, Any]) -> tuple[Any, Any]:
        stretch, anew = end
        after, _ = recurrence.merge((state, unchanged), stretch)
        return after if anew is None else choose(anew, stretch[0], after), state

    after, before = jax.lax.scan(step, state, ends)
    _, rows = jax.vmap(partial(recurrence.advance, parameters))(before, chunks)
    return after, _join(rows, length)


def _before_all(
    recurrence: Stretches, parameters: Any, state: Any, chunks: Chunk
) -> tuple[Any, Any]:
    """A state as a stretch to merge with those of the chunks; None: the empty one."""
    hidden = jax.tree.map(lambda x: jnp.zeros_like(x[0]), _unsegmented(chunks))
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
    last = hide(_unsegmented(chunk), segment == segment[:, -1:])
    return recurrence.stretch(parameters, last), starts_segment.any(axis=1)


def _unsegmented(chunk: Chunk) -> Chunk:
    return chunk._replace(segment=None, starts_segment=None)


def scan(advance: Any, state: Any, chunk: Chunk, chunk_size: int) -> tuple[Any, Any]:
    """All of time, a chunk after the other: the last state, and rows [B K G T …].

    The backward pass recomputes a chunk from the state before it.
    """
    length = chunk.key.shape[2]
    body = jax.checkpoint(advance, prevent_cse=False)
    state, rows = jax.lax.scan(body, state, _chunks(chunk, chunk_size))
    return state, _join(rows, length)


def _join(rows: Any, length: int) -> Any:
    """Rows of chunks stacked in front, as one."""

    def join(x: Array) -> Array:
        return jax.lax.collapse(jnp.moveaxis(x, 0, 3), 3, 5)[:, :, :, :length]

    return jax.tree.map(join, rows)


def _chunks(chunk: Chunk, chunk_size: int) -> Chunk:
    """Chunks stacked in front; the last is filled up with hidden tokens."""
    size = max(1, min(chunk_size, chunk.key.shape[2]))
    return Chunk(
        cut(chunk.query, size, 3),
        cut(chunk.key, size, 2),
        cut(chunk.value, size, 2),
        jax.tree.map(lambda x: cut(x, size, 2), chunk.operands),
        cut(chunk.visible, size, 1),
        None if chunk.segment is None else cut(chunk.segment, size, 1, "edge"),
        jax.tree.map(lambda x: cut(x, size, 1), chunk.starts_segment),
    )


def through_segments(
    chunk: Chunk, state: Any, empty: Any
) -> tuple[Any, Any, Array | None, Array | None]:
    """What the segments of a chunk do to a state that adds up one segment's tokens.

    Returns:
        The state before the chunk, which a segment's start forgets; what is left of it
        after the chunk; the rows [B T] that reach it, and the tokens [B T] that join
        it, those of the chunk's first and last segment (None: all).
    """
    if chunk.segment is None or chunk.starts_segment is None:
        return state, state, None, None
    segment = chunk.segment
    first, last = segment == segment[:, :1], segment == segment[:, -1:]
    state = choose(chunk.starts_segment[:, 0], empty, state)
    return state, choose(first[:, -1], state, empty), first, last


def cut(x: Array, size: int, axis: int, mode: str = "constant") -> Array:
    """Chunks of time stacked in front; the last is filled up, with zeros by default."""
    length = x.shape[axis]
    count = -(-length // size)
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, count * size - length)
    x = jnp.pad(x, widths, mode=mode)
    x = x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def state_before(
    recurrence: Stretches,
    parameters: Any,
    chunk: Chunk,
    chunk_size: int,
    axis_name: str,
) -> Any:
    """What earlier devices' stretches leave of the segment a device goes on with."""
    segment = chunk.segment
    if segment is not None:
        chunk = hide(chunk, segment == segment[:, -1:])
    chunks = _chunks(_unsegmented(chunk), chunk_size)
    nothing = _before_all(recurrence, parameters, None, chunks)

    def body(stretch: Any, chunk: Chunk) -> tuple[Any, None]:
        return recurrence.merge(stretch, recurrence.stretch(parameters, chunk)), None

    own, _ = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), nothing, chunks)
    state, _ = segment_state_before(recurrence.merge, own, nothing, segment, axis_name)
    return state


def hide(chunk: Chunk, seen: Bool[Array, "B T"]) -> Chunk:
    """The chunk with fewer visible tokens."""

    def zeros(x: Array) -> Array:
        return jnp.where(seen.reshape(len(seen), 1, -1, *[1] * (x.ndim - 3)), x, 0)

    return chunk._replace(
        key=zeros(chunk.key),
        value=zeros(chunk.value),
        operands=jax.tree.map(zeros, chunk.operands),
        visible=chunk.visible & seen,
    )
