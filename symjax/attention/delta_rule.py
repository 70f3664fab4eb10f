"""The delta rule: a linear state that erases what it holds at a key before it writes.

    def delta(q, k, v, beta, g):  # one head: q, k [T H], v [T V], beta, g [T]
        sums, out = np.zeros((k.shape[1], v.shape[1])), []
        for t in range(len(q)):
            sums = np.exp(g[t]) * sums  # decay
            change = beta[t] * (v[t] - k[t] @ sums)  # erase, then write
            sums = sums + np.outer(k[t], change)
            out.append(q[t] @ sums)
        return np.stack(out)

Without g, or with 0, it is DeltaNet; a number a head is Gated DeltaNet, and one a
channel Kimi Delta Attention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.arguments import as_array, check_arrays, state_sizes
from symjax.attention.core.products import einsum, products, sum_dtype
from symjax.attention.recurrent.chunks import (
    Chunk,
    Span,
    chunk_of,
    product_and_arrays,
    time_first,
)
from symjax.attention.recurrent.decays import (
    ChunkDecays,
    chunk_decays,
    shared_or_per_token,
    times_decay,
)
from symjax.attention.recurrent.engine import attend_causal, attend_step
from symjax.attention.recurrent.recurrence import Schedule


class DeltaState(NamedTuple):
    """What the delta rule keeps of its past, in float32 at least."""

    sums: Float[Array, "B K H V"]


class Prepared(NamedTuple):
    """A chunk, what it asks of a state, and its decays."""

    chunk: Chunk
    asking: Float[Array, "B K G+1 T H"]  # queries, and last the keys
    decays: ChunkDecays


@dataclass(frozen=True)
class DeltaRule:
    """The recurrence; an operand of each token is β [B K T], and the log-decay if they
    do not share it.

    What the tokens of a chunk write depends on what those before them wrote: with
    E_ts the decay between two tokens, row t of the changes u is
    u_t = β_t (v_t − k_t·S faded to t − Σ_{s<t} (k_t·k_s E_ts) u_s), a unit-triangular
    system (the WY form). No decay is divided by another.

    Attributes:
        fades: whether a log-decay was given. Without one kernels compute none.
    """

    kernel = "delta"
    fades: bool = True

    def schedule(self) -> Schedule:
        # `effect` costs as much as `advance`, and its transitions are matrices.
        return Schedule(on_one_gpu_only=True)

    def empty(self, parameters: Any, sizes: tuple, dtype: Any) -> DeltaState:
        dtype = jnp.promote_types(dtype, jnp.float32)
        return DeltaState(jnp.zeros(sizes, dtype))

    def prepare(self, parameters: Array | None, span: Span) -> Prepared:
        chunk = chunk_of(span)
        _, query, key, _ = product_and_arrays(chunk)
        # The key is read from the state as one more query head: what is held at it.
        asking = jnp.concatenate([query, key[:, :, None]], axis=2)
        return Prepared(chunk, asking, chunk_decays(parameters, asking, key, chunk))

    def advance(
        self, state: DeltaState, prepared: Prepared
    ) -> tuple[DeltaState, Float[Array, "B T K G V"]]:
        chunk, asking, (since, until, through, pairs) = prepared
        product, _, key, value = product_and_arrays(chunk)
        sums = state.sums
        held = product("bkgth,bkhv->bkgtv", times_decay(asking, since), sums)
        change = _changes(chunk, pairs, value - held[:, :, -1])
        inside = product("bkgts,bksv->bkgtv", pairs[:, :, :-1], change)
        written = product("bksh,bksv->bkhv", times_decay(key, until), change)
        left = sums * jnp.exp(through)[..., None]
        return DeltaState(left + written), time_first(held[:, :, :-1] + inside)

    def effect(self, prepared: Prepared) -> tuple[DeltaState, Float[Array, "B K H H"]]:
        """S ↦ M S + S₀. What is written is linear in S: without it from the values, and
        for each of its rows from what the keys read of it."""
        chunk, _, (since, until, through, pairs) = prepared
        product, _, key, value = product_and_arrays(chunk)
        size = value.shape[-1]
        both = jnp.concatenate([value, -times_decay(key, since)], axis=-1)
        changes = _changes(chunk, pairs, both)
        written = product("bksh,bksv->bkhv", times_decay(key, until), changes)
        left = jnp.eye(key.shape[-1], dtype=key.dtype)[None, None]
        left = left * jnp.exp(through)[..., None]
        return DeltaState(written[..., :size]), left + written[..., size:]

    def merge(self, one: tuple, two: tuple) -> tuple[DeltaState, Array]:
        left = einsum("bkhi,bkiv->bkhv", two[1], one[0].sums)
        transition = einsum("bkhi,bkij->bkhj", two[1], one[1])
        return DeltaState(left + two[0].sums), transition


def _changes(
    chunk: Chunk, pairs: Float[Array, "B K G+1 T T"], missing: Float[Array, "B K T V"]
) -> Float[Array, "B K T V"]:
    """u of u_t = β_t (missing_t − Σ_{s<t} pairs_ts u_s), by the pairs of keys."""
    beta = chunk.operands[0].astype(missing.dtype)
    return solve_unit_lower(
        einsum("bkt,bkts->bkts", beta, pairs[:, :, -1]),
        einsum("bkt,bktv->bktv", beta, missing),
        products(*chunk[:3], cancel=True),
    )


def delta_causal(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    beta: Float[Array, "B T K"],
    log_decay: Float[Array, "#B #T K *F"] | Float[Array, " K"] | None = None,
    mask: Bool[Array, "B 1 1 T"] | None = None,
    *,
    chunk_size: int = 64,
    state: DeltaState | None = None,
    return_state: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    axis_name: str | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], DeltaState]:
    """A linear state that forgets, and replaces what it holds at a token's key.

    S_t = (I − β_t k_t k_tᵀ) diag(exp(g_t)) S_{t−1} + β_t k_t v_tᵀ and out[t] = q_t S_t,
    with g_t = log_decay[t]: decay first, then erase, then write.

    There is no scale and no denominator. The state is stable with keys of length 1 and
    β in [0, 2]; β = 1 replaces what a key holds, β > 1 reflects it. Query head n uses
    key head n // (N/K), whose β and decay it shares. Sums run in float32 at least.
    Time O(T (H V + chunk_size (H + V))) and a triangular solve a chunk; the backward
    pass keeps one state a chunk, or on accelerators one every 4096 tokens.

    Kernels run on one TPU, and in bfloat16 on one NVIDIA GPU. On a TPU the backward
    pass keeps 128 numbers per token and query head, and a state every 128 tokens; on a
    GPU 128 numbers and a value per token and query head, and a state every 64. Kernels
    have no forward-mode derivative.

    Float32 loses most where the keys of a chunk are nearly equal and β is near 2: 7e-5
    of the largest output with keys within 1e-3 of one direction, and 1e-6 by steps.
    Kernels of bfloat16 lose 3e-2 there with keys within 1e-2.

    Args:
        beta: how much of what a key holds is replaced.
        log_decay: None for no decay (DeltaNet); at most 0, [K] or [B or 1, T or 1, K]
            for a decay a head (Gated DeltaNet), [B or 1, T or 1, K, H] for one a
            channel (Kimi Delta Attention). −∞ forgets all.
        mask: True = attend; it may only hide keys. A hidden token is as good as
            absent: it neither writes nor decays. Its output is read from the state.
        chunk_size: the tokens of a chunk, best a power of two. Accelerators take
            multiples of 128.
        state: from `delta_state`, `delta_step` or an earlier call.
        return_state, segment_ids, axis_name: as in `linear_causal`. Devices also
            exchange what their tokens do to a state, [H H] a head.
    Raises:
        ValueError: shapes that do not fit, a mask that hides pairs and not keys, or a
            state of other sizes; a state given or wanted with an axis_name.
    Source: Yang et al. 2024, arXiv:2406.06484 (the chunk form) and arXiv:2412.06464
        (a decay a head); Kimi Team 2025, arXiv:2510.26692 (a decay a channel).
    """
    who = "delta_causal"
    shared, operands = _operands(who, key, beta, log_decay, mask, segment_ids)
    return attend_causal(
        who,
        DeltaRule(fades=log_decay is not None),
        query,
        key,
        value,
        mask,
        parameters=shared,
        operands=operands,
        chunk_size=chunk_size,
        state=state,
        return_state=return_state,
        segment_ids=segment_ids,
        axis_name=axis_name,
    )


def delta_step(
    state: DeltaState,
    query: Float[Array, "B 1 N H"],
    key: Float[Array, "B 1 K H"],
    value: Float[Array, "B 1 K V"],
    beta: Float[Array, "B 1 K"],
    log_decay: Float[Array, "#B 1 K *F"] | Float[Array, " K"] | None = None,
) -> tuple[Float[Array, "B 1 N V"], DeltaState]:
    """One more token of `delta_causal`, in O(H V): the output and the state after it.

    Raises:
        ValueError: as `delta_causal`; more than one token.
    """
    who = "delta_step"
    shared, operands = _operands(who, key, beta, log_decay)
    tokens = query, key, value
    return attend_step(
        who, DeltaRule(), state, *tokens, parameters=shared, operands=operands
    )


def delta_state(
    batch: int,
    kv_heads: int,
    head_size: int,
    value_size: int,
    *,
    dtype: Any = jnp.float32,
) -> DeltaState:
    """The state of `delta_causal` before the first token; float32 at least."""
    sizes = state_sizes("delta_state", batch, kv_heads, head_size, value_size, dtype)
    return DeltaRule().empty(None, sizes, dtype)


def _operands(
    who: str,
    key: Array,
    beta: Array,
    log_decay: Array | None,
    mask: Array | None = None,
    segment_ids: Array | None = None,
) -> tuple[Array | None, tuple[Array, ...]]:
    """The log-decay that all tokens share, and the operands of each, of which β is the
    first.

    Raises:
        ValueError: β or the decays do not fit the keys.
    """
    check_arrays(who, key=key)
    beta = as_array(who, "beta", beta)
    if beta.shape != key.shape[:3]:
        raise ValueError(
            f"{who}: beta must be [B T K] {key.shape[:3]} for key {key.shape}, got "
            f"{beta.shape}"
        )
    if log_decay is None:
        log_decay = jnp.zeros(key.shape[2], sum_dtype(key))
    shared, own = shared_or_per_token(who, log_decay, key, mask, segment_ids)
    return shared, (beta, *own)


def solve_unit_lower(
    matrix: Float[Array, "*B T T"],
    right: Float[Array, "*B T V"],
    product: Callable[..., Array] = einsum,
) -> Float[Array, "*B T V"]:
    """X of (I + A) X = right, A what the matrix has below its diagonal.

    By the inverse, which serves the derivatives too: none is taken of its steps.

    Time T³/3 + T² V multiply-adds, in log₂ T steps of all blocks at once.
    `jax.scipy.linalg.solve_triangular` takes T steps on a TPU; on a CPU its calls for
    several matrices can wait for each other for ever, since each holds a thread while
    it waits for others (jaxlib 0.10.2: eight solves in one program on two cores).
    """
    below = jnp.tril(matrix, -1)
    inverse = _inverse_unit_lower(jax.lax.stop_gradient(below), product)
    times = partial(product, "...ts,...sv->...tv")
    return jax.lax.custom_linear_solve(
        lambda x: x + times(below, x),
        right,
        lambda _, x: times(inverse, x),
        lambda _, x: times(jnp.swapaxes(inverse, -1, -2), x),
    )


def _inverse_unit_lower(
    below: Float[Array, "*B T T"], product: Callable[..., Array]
) -> Float[Array, "*B T T"]:
    """(I + A)⁻¹ by those of diagonal blocks of 2, 4, 8 … rows, each from two of half
    the size:

    [[P, 0], [A₂₁, Q]]⁻¹ with P, Q inverted = [[P, 0], [−Q A₂₁ P, Q]]
    """
    *lead, length, _ = below.shape
    size = 1 << (length - 1).bit_length()
    missing = [(0, size - length)] * 2
    below = jnp.pad(below, [(0, 0)] * len(lead) + missing)
    inverse = jnp.ones((*lead, size, 1, 1), below.dtype)
    half = 1
    while half < size:
        count = size // (2 * half)
        pairs = below.reshape(*lead, count, 2, half, count, 2, half)
        corners = jnp.diagonal(pairs[..., 1, :, :, 0, :], axis1=-4, axis2=-2)
        corners = jnp.moveaxis(corners, -1, -3)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corners = -product("...ij,...jk,...kl->...il", second, corners, first)
        above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        lower = jnp.concatenate([corners, second], axis=-1)
        inverse = jnp.concatenate([above, lower], axis=-2)
        half *= 2
    return inverse[..., 0, :length, :length]
