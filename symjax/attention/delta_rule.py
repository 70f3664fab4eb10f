"""The delta rule: a state that erases its value at a key before it writes a new one.

    def delta(q, k, v, beta, g):  # one head: q, k [T H], v [T V], beta, g [T]
        sums, out = np.zeros((k.shape[1], v.shape[1])), []
        for t in range(len(q)):
            sums = np.exp(g[t]) * sums  # decay
            change = beta[t] * (v[t] - k[t] @ sums)  # erase, then write
            sums = sums + np.outer(k[t], change)
            out.append(q[t] @ sums)
        return np.stack(out)

Without g it is DeltaNet, with one g per head Gated DeltaNet, and with one g per channel
of the keys Kimi Delta Attention. Gated DeltaNet-2 has (b[t] * k[t]) @ sums in place of
k[t] @ sums, where b[t] [H] are erase gates.

`delta_causal` computes a sequence, chunk by chunk, and `delta_step` one token from a
state.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.arguments import as_array, check_arrays
from symjax.attention.core.products import einsum, products, sum_dtype
from symjax.attention.recurrent.arguments import state_sizes
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
from symjax.attention.recurrent.triangular import solve_unit_lower


class DeltaState(NamedTuple):
    """State of the delta rule, in float32 at least."""

    sums: Float[Array, "B K H V"]


class Prepared(NamedTuple):
    """A chunk, the vectors that read the state, and the decays."""

    chunk: Chunk
    readers: Float[Array, "B K G+1 T H"]  # G queries of a key head, then the eraser e
    decays: ChunkDecays


@dataclass(frozen=True)
class DeltaRule:
    """Recurrence of the delta rule.

    The operands are β [B K T], then erase gates b [B K T H] if given, then the
    log-decay. A log-decay that all tokens share may be `parameters` instead
    (`shared_or_per_token`).

    Token t adds k_t u_tᵀ to the state. The change u_t of token t depends on those of
    the tokens before it. Let S be the state before the chunk, E_t the decay of S until
    token t, and E_ts the decay between tokens s and t: numbers, or diagonal matrices
    for a decay per channel. The eraser e_t is b_t ⊙ k_t with
    erase gates, and k_t without them. Then

    u_t = β_t (v_t − e_t·(E_t S) − Σ_{s<t} (e_t·E_ts k_s) u_s)

    For all tokens of a chunk this is a unit-triangular system (the WY form), which
    `solve_unit_lower` solves.

    Attributes:
        fades: False if `delta_causal` got no log-decay. Kernels then do not read the
            zeros that replace it.
        erase_gates: whether erase gates were given, which no kernel supports.
    """

    fades: bool = True
    erase_gates: bool = False

    @property
    def kernel(self) -> str | None:
        return None if self.erase_gates else "delta"

    def schedule(self) -> Schedule:
        # `effect` costs as much as `advance`, and its transitions are matrices [H H].
        return Schedule(only_as_batch=True)

    def empty(self, parameters: Any, sizes: tuple, dtype: Any) -> DeltaState:
        dtype = jnp.promote_types(dtype, jnp.float32)
        return DeltaState(jnp.zeros(sizes, dtype))

    def prepare(self, parameters: Array | None, span: Span) -> Prepared:
        chunk = chunk_of(span)
        _, query, key, _ = product_and_arrays(chunk)
        # The eraser reads the value to be erased, as one more query head would.
        eraser = self._eraser(chunk, key)
        readers = jnp.concatenate([query, eraser[:, :, None]], axis=2)
        return Prepared(chunk, readers, chunk_decays(parameters, readers, key, chunk))

    def advance(
        self, state: DeltaState, prepared: Prepared
    ) -> tuple[DeltaState, Float[Array, "B T K G V"]]:
        chunk, readers, (since, until, through, scores) = prepared
        product, _, key, value = product_and_arrays(chunk)
        sums = state.sums
        held = product("bkgth,bkhv->bkgtv", times_decay(readers, since), sums)
        change = _changes(chunk, scores, value - held[:, :, -1])
        inside = product("bkgts,bksv->bkgtv", scores[:, :, :-1], change)
        written = product("bksh,bksv->bkhv", times_decay(key, until), change)
        decayed = sums * jnp.exp(through)[..., None]
        return DeltaState(decayed + written), time_first(held[:, :, :-1] + inside)

    def effect(self, prepared: Prepared) -> tuple[DeltaState, Float[Array, "B K H H"]]:
        """Return S₀ and M, where a chunk turns a state S into M S + S₀.

        One triangular solve has two right sides: values for S₀, erasers for M.
        """
        chunk, _, (since, until, through, scores) = prepared
        product, _, key, value = product_and_arrays(chunk)
        size = value.shape[-1]
        reading = times_decay(self._eraser(chunk, key), since)
        right_sides = jnp.concatenate([value, -reading], axis=-1)
        changes = _changes(chunk, scores, right_sides)
        written = product("bksh,bksv->bkhv", times_decay(key, until), changes)
        decay = jnp.eye(key.shape[-1], dtype=key.dtype)[None, None]
        decay = decay * jnp.exp(through)[..., None]
        return DeltaState(written[..., :size]), decay + written[..., size:]

    def merge(self, one: tuple, two: tuple) -> tuple[DeltaState, Array]:
        """Return the effect of two consecutive spans: M₂ S₁ + S₂ and M₂ M₁."""
        sums = einsum("bkhi,bkiv->bkhv", two[1], one[0].sums)
        transition = einsum("bkhi,bkij->bkhj", two[1], one[1])
        return DeltaState(sums + two[0].sums), transition

    def _eraser(
        self, chunk: Chunk, key: Float[Array, "B K T H"]
    ) -> Float[Array, "B K T H"]:
        """Return the erasers e: the keys times their erase gates, if there are any."""
        if not self.erase_gates:
            return key
        return key * chunk.operands[1].astype(key.dtype)


def _changes(
    chunk: Chunk, scores: Float[Array, "B K G+1 T T"], missing: Float[Array, "B K T V"]
) -> Float[Array, "B K T V"]:
    """Return the u that solve u_t = β_t (missing_t − Σ_{s<t} scores_ts u_s).

    Args:
        scores: decayed products with the keys. The last of the G + 1 heads, which this
            function reads, is e_t·k_s E_ts.
    """
    beta = chunk.operands[0].astype(missing.dtype)
    return solve_unit_lower(
        einsum("bkt,bkts->bkts", beta, scores[:, :, -1]),
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
    erase: Float[Array, "B T K H"] | None = None,
    chunk_size: int = 64,
    state: DeltaState | None = None,
    return_state: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    axis_name: str | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], DeltaState]:
    """Return linear attention without a denominator, by the delta rule.

    S_t = (I − β_t k_t k_tᵀ) diag(exp(g_t)) S_{t−1} + β_t k_t v_tᵀ and out[t] = q_t S_t,
    with g_t = log_decay[t]: decay first, then erase, then write. With erase gates b_t,
    k_t (b_t ⊙ k_t)ᵀ replaces k_t k_tᵀ.

    There is no scale, no denominator and no ε. With keys of length 1 and β in [0, 2]
    the state is stable; β = 1 replaces the value that the state holds at a key. With
    erase gates that differ between tokens the state may grow. Query head n uses key
    head n // (N/K), and the β, erase gates and decay of that head. Sums run in float32
    at least. Time O(T (H V + chunk_size (H + V))), and one triangular solve per chunk.
    The backward pass saves one state per chunk, or per group of chunks that run in
    parallel.

    Kernels run on a TPU, and in bfloat16 on an NVIDIA GPU: on one device, or inside
    `jax.shard_map`. Kernels have no forward-mode derivative, and neither have decays
    per channel in XLA.

    Rounding errors are largest if the keys of a chunk are nearly equal and β is near 2.
    With keys within 1e-3 of one direction the error in float32 is 7e-5 of the largest
    output. With keys within 1e-2 of one direction the error of bfloat16 kernels is 3e-2
    of the largest output.

    Args:
        beta: the share of the value at a key that is replaced.
        log_decay: at most 0. None means no decay (DeltaNet), [K] or [B or 1, T or 1, K]
            a decay per head (Gated DeltaNet), [B or 1, T or 1, K, H] a decay per
            channel (Kimi Delta Attention). −∞ clears the state.
        erase: gates b in [0, 1]; None means 1. For Gated DeltaNet-2 also pass β = 1, a
            decay per channel, and values times their write gates. With erase gates no
            kernel runs.
        mask: True = attend; it may only hide keys. A hidden token neither writes to the
            state nor decays it. Its own output is read from the state.
        chunk_size: tokens per chunk, best a power of two; accelerators round it up to a
            multiple of 128.
        state: from `delta_state`, `delta_step` or an earlier call.
        return_state, segment_ids, axis_name: as in `linear_causal`. Devices also
            exchange the matrix by which their tokens change a state, [H H] per head.
        implementation: as in `decay_causal`.
    Raises:
        ValueError: shapes that do not fit, a log-decay above 0, a mask that hides pairs
            and not keys, or a state of other sizes; `state` or `return_state` together
            with axis_name; an implementation that does not support the call.
    Source: Yang et al. 2024, arXiv:2406.06484 (the chunk form) and arXiv:2412.06464
        (a decay per head); Kimi Team 2025, arXiv:2510.26692 (a decay per channel);
        Hatamizadeh et al. 2026, arXiv:2605.22791 (erase and write gates).
    """
    who = "delta_causal"
    shared, operands = _operands(who, key, beta, log_decay, erase, mask, segment_ids)
    return attend_causal(
        who,
        DeltaRule(fades=log_decay is not None, erase_gates=erase is not None),
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
        implementation=implementation,
    )


def delta_step(
    state: DeltaState,
    query: Float[Array, "B 1 N H"],
    key: Float[Array, "B 1 K H"],
    value: Float[Array, "B 1 K V"],
    beta: Float[Array, "B 1 K"],
    log_decay: Float[Array, "#B 1 K *F"] | Float[Array, " K"] | None = None,
    *,
    erase: Float[Array, "B 1 K H"] | None = None,
) -> tuple[Float[Array, "B 1 N V"], DeltaState]:
    """Return the output for one more token of `delta_causal`, and the new state.

    Time O(H V).

    Raises:
        ValueError: as `delta_causal`; more than one token.
    """
    who = "delta_step"
    shared, operands = _operands(who, key, beta, log_decay, erase)
    rule, tokens = DeltaRule(erase_gates=erase is not None), (query, key, value)
    return attend_step(who, rule, state, *tokens, parameters=shared, operands=operands)


def delta_state(
    batch: int,
    kv_heads: int,
    head_size: int,
    value_size: int,
    *,
    dtype: Any = jnp.float32,
) -> DeltaState:
    """Return the state of `delta_causal` before the first token.

    It has H V numbers per key head, float32 at least.

    Raises:
        ValueError: a size or a dtype that is wrong.
    """
    sizes = state_sizes("delta_state", batch, kv_heads, head_size, value_size, dtype)
    return DeltaRule().empty(None, sizes, dtype)


def _operands(
    who: str,
    key: Array,
    beta: Array,
    log_decay: Array | None,
    erase: Array | None,
    mask: Array | None = None,
    segment_ids: Array | None = None,
) -> tuple[Array | None, tuple[Array, ...]]:
    """Return the log-decay that all tokens share, or None, and the operands per token.

    The operands are β, the erase gates if given, and the log-decay unless
    `shared_or_per_token` returns it as shared.

    Raises:
        ValueError: β, the erase gates or the decays do not fit the keys.
    """
    check_arrays(who, key=key)
    beta = as_array(who, "beta", beta)
    if beta.shape != key.shape[:3]:
        raise ValueError(
            f"{who}: beta must be [B T K] {key.shape[:3]} for key {key.shape}, got "
            f"{beta.shape}"
        )
    gates = () if erase is None else (as_array(who, "erase", erase),)
    if gates and gates[0].shape != key.shape:
        raise ValueError(
            f"{who}: erase must have the shape of key {key.shape}, got {gates[0].shape}"
        )
    if log_decay is None:
        log_decay = jnp.zeros(key.shape[2], sum_dtype(key))
    shared, own = shared_or_per_token(who, log_decay, key, mask, segment_ids)
    return shared, (beta, *gates, *own)
