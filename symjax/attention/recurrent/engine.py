"""Engine of recurrences: it runs mechanisms with a state over chunks of time.

    state = recurrence.empty(…)
    for span in spans:                        # jax.lax.scan of a checkpointed body
        prepared = recurrence.prepare(parameters, span)
        state, rows = recurrence.advance(state, prepared)

`attend_causal` is the causal form of a `Recurrence`. It handles initial and returned
states, masks, segments, and time that is split over a mesh axis. `attend_step` decodes:
it takes a state and one token.

A CPU runs one chunk after the other. Accelerators round the length of a chunk up to a
multiple of 128. If `Recurrence.schedule` allows it, they take 4096 tokens at a time,
and run the chunks of these tokens in parallel. A GPU takes 2¹⁸ / (examples · query
heads) tokens instead of 4096, if XLA does not split the arrays over devices.

A kernel may replace the chunks if the call neither takes nor returns a state, and time
is not split over devices (`kernels.dispatch`). Kernels have neither a forward-mode
derivative (`jax.jvp`) nor a second derivative.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.core.arguments import check_choice, check_count, check_flag
from symjax.attention.core.devices import by_platform
from symjax.attention.core.meshes import on_any_mesh, vary_alike
from symjax.attention.core.operands import Tokens
from symjax.attention.core.products import sum_dtype
from symjax.attention.kernels.dispatch import (
    OF_RECURRENCES,
    run_named_recurrence,
    run_recurrence,
)
from symjax.attention.recurrent.arguments import check_axis, check_state, check_tokens
from symjax.attention.recurrent.chunks import layout, merge_heads, scan
from symjax.attention.recurrent.recurrence import Recurrence
from symjax.attention.recurrent.schedule import (
    run_as_one_chunk,
    run_on_accelerators,
    run_on_cpus,
    state_before_device,
)

# Tokens between stored states of `InXla.by_tokens`. With 64 the gradient of a Performer
# (B 4, T 4096, N 16, H 128, 256 features) takes 2,195 MiB on an H200, as the compiler
# reports. With 128 it takes 2,924 MiB, and without this fallback 2,075 MiB.
STORED_EVERY = 64


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
    implementation: str | None = None,
) -> Any:
    """Return causal attention: a query sees the tokens of its segment up to its own.

    Args:
        who: name of the public function, for messages.
        parameters: arrays that all tokens share.
        operands: further arrays of the recurrence with one entry per token,
            [#B #T K …].
        chunk_size: tokens per chunk; accelerators round it up to a multiple of 128.
        state: the state before the first token; None is the empty one.
        return_state: return (rows, state after the last token).
        axis_name: the mesh axis that time is split over.
        implementation: a kernel of `dispatch.OF_RECURRENCES`. None chooses a kernel
            that supports the call, or XLA.
    Raises:
        ValueError: shapes that do not fit, a state together with an axis_name, or an
            implementation that is unknown or does not support the call.
    """
    check_tokens(who, query, key, value, mask, segment_ids, causal=True)
    check_axis(who, axis_name, state, return_state)
    check_count(who, "chunk_size", chunk_size)
    check_flag(who, "return_state", return_state)
    tokens = Tokens(query, key, value, operands, mask, segment_ids)
    if implementation is not None:
        check_choice(who, "implementation", implementation, OF_RECURRENCES)
    if state is None and not return_state and axis_name is None:
        fallback = InXla(recurrence, int(chunk_size))
        call = recurrence, tokens, parameters, fallback
        if implementation is not None:
            return run_named_recurrence(implementation, *call)
        return run_recurrence(*call)
    if implementation is not None:
        raise ValueError(
            f"{who}: implementation {implementation!r} takes no state, return_state "
            "or axis_name"
        )
    state = _start(who, recurrence, parameters, state, tokens)
    static = recurrence, int(chunk_size), axis_name
    output, state = _causal(*static, tokens, parameters, state)
    return (output, state) if return_state else output


@dataclass(frozen=True)
class InXla:
    """The chunks of a call without a state, by XLA: the fallback of kernels."""

    recurrence: Recurrence
    chunk_size: int

    def __call__(self, tokens: Tokens, parameters: Any) -> Float[Array, "B T N V"]:
        state = _start("", self.recurrence, parameters, None, tokens)
        static = self.recurrence, self.chunk_size, None
        return _causal(*static, tokens, parameters, state)[0]

    def by_tokens(self, tokens: Tokens, parameters: Any) -> Float[Array, "B T N V"]:
        """Return the rows, computed token by token so that none underflows.

        GPU kernels of features call it in a branch of a `jax.lax.cond` that runs if a
        row underflows. XLA compiles the branch and reserves its memory even if it never
        runs, so the program and its memory are small. It reads one token at a time. Its
        gradient stores one state for every `STORED_EVERY` tokens, and computes the
        states between them again, for one group of tokens at a time.
        """
        state = _start("", self.recurrence, parameters, None, tokens)
        state, span = vary_alike((state, layout(tokens)))
        run = partial(scan, partial(run_as_one_chunk, self.recurrence), 1)
        _, rows = scan(run, STORED_EVERY, parameters, state, span)
        return merge_heads(rows, tokens.value.dtype)


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
    """Return the row of one token, and the state after it.

    The token sees itself and the tokens that the state has read. No kernel runs.

    Raises:
        ValueError: more than one token, no state, or a state of other sizes.
    """
    check_tokens(who, query, key, value, None, None, causal=True)
    if query.shape[1] != 1:
        raise ValueError(f"{who}: a step takes one token, got query {query.shape}")
    tokens = Tokens(query, key, value, operands)
    if state is None:
        raise ValueError(f"{who}: a step needs the state before its token, got None")
    state = _start(who, recurrence, parameters, state, tokens)
    return _step(recurrence, tokens, parameters, state)


def _start(
    who: str, recurrence: Recurrence, parameters: Any, state: Any, tokens: Tokens
) -> Any:
    """Return the given state in the dtype of the sums; for None, the empty state."""
    (_, key, value), dtype = tokens[:3], sum_dtype(*tokens[:3])
    batch, _, heads, size = key.shape
    sizes = batch, heads, size, value.shape[-1]
    if state is None:
        return recurrence.empty(parameters, sizes, dtype)
    wanted = jax.eval_shape(lambda: recurrence.empty(parameters, sizes, dtype))
    shapes = f"key {key.shape} and value {value.shape}"
    check_state(who, shapes, state, wanted)
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), state)


@on_any_mesh("recurrence", "chunk_size", "axis_name")
def _causal(
    recurrence: Recurrence,
    chunk_size: int,
    axis_name: str | None,
    tokens: Tokens,
    parameters: Any,
    state: Any,
) -> tuple[Float[Array, "B T N V"], Any]:
    span = layout(tokens, axis_name)
    if axis_name is not None:
        state = state_before_device(recurrence, parameters, span, chunk_size, axis_name)
    state, rows = by_platform(
        parameters,
        state,
        span,
        cpu=partial(run_on_cpus, recurrence, chunk_size),
        default=partial(run_on_accelerators, recurrence, chunk_size),
    )
    return merge_heads(rows, tokens.value.dtype), state


@on_any_mesh("recurrence")
def _step(
    recurrence: Recurrence, tokens: Tokens, parameters: Any, state: Any
) -> tuple[Float[Array, "B 1 N V"], Any]:
    state, rows = run_as_one_chunk(recurrence, parameters, state, layout(tokens))
    return merge_heads(rows, tokens.value.dtype), state
