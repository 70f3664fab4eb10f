"""Linear attention whose state decays: RetNet, Lightning, gated linear attention.

    def decay(q, k, v, g):                   # one head: q, k [T H], v [T V], g [T]
        sums, out = 0, []
        for t in range(len(q)):
            sums = np.exp(g[t]) * sums + np.outer(k[t], v[t])
            out.append(q[t] @ sums)
        return np.stack(out)

There is no denominator. `decay_causal` computes a sequence, chunk by chunk, and
`decay_step` one token from a state. `symjax.attention.recurrent.decays` has the weights
of the pairs inside a chunk.

`retention_log_decay`, `lightning_log_decay` and `gated_log_decay` return log-decays of
published models. `LOG_DECAYS` has an entry for each value of model.attention.decay,
which the decay mechanism and the delta rule use.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.arguments import (
    as_array,
    check_choice,
    check_count,
    check_positive,
)
from symjax.attention.core.products import sum_dtype
from symjax.attention.positions import alibi_slopes
from symjax.attention.recurrent.arguments import (
    state_sizes,
)
from symjax.attention.recurrent.chunks import (
    Chunk,
    Span,
    chunk_of,
    product_and_arrays,
    time_first,
)
from symjax.attention.recurrent.decays import (
    ChunkDecays,
    by_channel,
    chunk_decays,
    shared_or_per_token,
    times_decay,
)
from symjax.attention.recurrent.engine import attend_causal, attend_step
from symjax.attention.recurrent.recurrence import Schedule


class DecayState(NamedTuple):
    """State of linear attention with a decay, in float32 at least.

    sums_t = Σ_{s≤t} exp(g_{s+1} + … + g_t) k_s v_sᵀ
    """

    sums: Float[Array, "B K H V"]


@dataclass(frozen=True)
class Decayed:
    """Recurrence S_t = exp(g_t) S_{t−1} + k_t v_tᵀ.

    The log-decay g is passed as `parameters` if `shared_or_per_token` finds that all
    tokens share it, otherwise as an operand with an entry per token.

    Attributes:
        by_channel: whether g has a number per channel of the keys, not one per head.
            Only `schedule` reads it, and a step of one token needs no schedule.
    """

    kernel = "decay"
    by_channel: bool = False

    def schedule(self) -> Schedule:
        return Schedule(parallel_chunks=not self.by_channel)

    def empty(self, parameters: Any, sizes: tuple, dtype: Any) -> DecayState:
        dtype = jnp.promote_types(dtype, jnp.float32)
        return DecayState(jnp.zeros(sizes, dtype))

    def prepare(
        self, parameters: Array | None, span: Span
    ) -> tuple[Chunk, ChunkDecays]:
        chunk = chunk_of(span)
        _, query, key, _ = product_and_arrays(chunk)
        return chunk, chunk_decays(parameters, query, key, chunk)

    def advance(
        self, state: DecayState, prepared: tuple[Chunk, ChunkDecays]
    ) -> tuple[DecayState, Float[Array, "B T K G V"]]:
        chunk, (since, _, _, scores) = prepared
        product, query, _, value = product_and_arrays(chunk)
        rows = product("bkgts,bksv->bkgtv", scores, value)
        decayed = times_decay(query, since)
        rows = rows + product("bkgth,bkhv->bkgtv", decayed, state.sums)
        after, _ = self.merge((state, 0), self.effect(prepared))
        return after, time_first(rows)

    def effect(
        self, prepared: tuple[Chunk, ChunkDecays]
    ) -> tuple[DecayState, Float[Array, "B K F"]]:
        chunk, (_, until, through, _) = prepared
        product, _, key, value = product_and_arrays(chunk)
        sums = product("bksh,bksv->bkhv", times_decay(key, until), value)
        return DecayState(sums), through

    def merge(self, one: tuple, two: tuple) -> tuple[DecayState, Float[Array, "B K F"]]:
        """Return the effect of two consecutive spans.

        The sums of the first span decay by the log-decay of the second span. Then the
        sums are added, and so are the log-decays.
        """
        faded_sums = one[0].sums * jnp.exp(two[1])[..., None]
        return DecayState(faded_sums + two[0].sums), one[1] + two[1]


def decay_causal(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    log_decay: Float[Array, "#B #T K *F"] | Float[Array, " K"],
    mask: Bool[Array, "B 1 1 T"] | None = None,
    *,
    chunk_size: int = 64,
    state: DecayState | None = None,
    return_state: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    axis_name: str | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], DecayState]:
    """Return linear attention without a denominator, whose state decays.

    S_t = exp(g_t) S_{t−1} + k_t v_tᵀ and out[t] = q_t S_t, with g_t = log_decay[t]

    There is no scale and no denominator, and no ε is added: the caller should scale the
    query and normalise the output. No decay is divided by another, so decays of any
    size, also 0, are exact. Query head n uses key head n // (N/K) and the decay of that
    head. Sums run in float32 at least. Time O(T (H V + chunk_size (H + V))); decays per
    channel add O(T H √chunk_size) exponentials and products. The backward pass saves
    one state per chunk, or per group of chunks that run in parallel.

    Kernels run on a TPU, and in bfloat16 on an NVIDIA GPU: on one device, or inside
    `jax.shard_map`. On a TPU the backward pass saves a state per query head every 128
    tokens; on a GPU a state per key head every 64 tokens, and 64 numbers per token and
    query head. Kernels have no forward-mode derivative. Decays per channel have none on
    any platform.

    Args:
        log_decay: at most 0; [K] or [B or 1, T or 1, K] for one decay per head,
            [B or 1, T or 1, K, H] for one per channel. −∞ clears the state. Values
            above 0 would make the state grow. Under `jax.jit` they are not detected.
        mask: True = attend; it may only hide keys. A hidden token neither writes to the
            state nor decays it. Its own output is read from the state.
        chunk_size: tokens per chunk, best a power of two; accelerators round it up to a
            multiple of 128. T or more gives the parallel form, quadratic in T.
        state: from `decay_state`, `decay_step` or an earlier call.
        return_state, segment_ids, axis_name: as in `linear_causal`.
        implementation: what computes the rows. None chooses a kernel of symjax if one
            supports the call, and chunks in XLA otherwise. "jla" chooses the kernels of
            jax-linear-attention for Hopper GPUs: `pip install 'symjax[hopper]'`.
    Raises:
        ValueError: shapes that do not fit, a log-decay above 0, a mask that hides pairs
            and not keys, or a state of other sizes; `state` or `return_state` together
            with axis_name; an implementation that does not support the call.
    Source: Sun et al. 2023, arXiv:2307.08621 (a constant per head); Qin et al. 2023,
        arXiv:2307.14995; Yang et al. 2023, arXiv:2312.06635 (a gate per channel).
    """
    who = "decay_causal"
    shared, operands = shared_or_per_token(who, log_decay, key, mask, segment_ids)
    return attend_causal(
        who,
        Decayed(by_channel(operands)),
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


def decay_step(
    state: DecayState,
    query: Float[Array, "B 1 N H"],
    key: Float[Array, "B 1 K H"],
    value: Float[Array, "B 1 K V"],
    log_decay: Float[Array, "#B 1 K *F"] | Float[Array, " K"],
) -> tuple[Float[Array, "B 1 N V"], DecayState]:
    """Return the output for one more token of `decay_causal`, and the new state.

    Time O(H V).

    Raises:
        ValueError: as `decay_causal`; more than one token.
    """
    who = "decay_step"
    shared, operands = shared_or_per_token(who, log_decay, key)
    tokens = query, key, value
    return attend_step(
        who, Decayed(), state, *tokens, parameters=shared, operands=operands
    )


def decay_state(
    batch: int,
    kv_heads: int,
    head_size: int,
    value_size: int,
    *,
    dtype: Any = jnp.float32,
) -> DecayState:
    """Return the state of `decay_causal` before the first token.

    It has H V numbers per key head, float32 at least.

    Raises:
        ValueError: a size or a dtype that is wrong.
    """
    sizes = state_sizes("decay_state", batch, kv_heads, head_size, value_size, dtype)
    return Decayed().empty(None, sizes, dtype)


def retention_log_decay(heads: int) -> Float[Array, "N"]:
    """Return log(1 − 2^(−5−h)) for heads h = 0, 1, …

    The weights of these heads fall to 1/e after about 32, 64, … tokens.

    Raises:
        ValueError: fewer than 1 head.
    Source: Sun et al. 2023, arXiv:2307.08621, "multi-scale retention".
    """
    check_count("retention_log_decay", "heads", heads)
    return jnp.asarray(np.log1p(-(2.0 ** (-5 - np.arange(heads)))))


def lightning_log_decay(
    heads: int, layer: int, layers: int, *, convention: str
) -> Float[Array, "N"]:
    """Return the constant log-decays of Lightning attention, which differ by layer.

    "transnormer": −2^(−8(h+1)/N) (1 − l/(L−1) + 1e-5), as in OpenNLPLab's models. If N
        is not a power of two, the slopes are those of `alibi_slopes`.
    "fla": −(8h/N) (1 − l/L), as in flash-linear-attention. Head 0 never decays.

    Args:
        layer, layers: l, counted from 0, and L. Later layers decay more slowly.
        convention: "transnormer" or "fla".
    Raises:
        ValueError: an unknown convention, fewer than 1 head, or no such layer.
    Source: Qin et al. 2023, arXiv:2307.14995.
    """
    who = "lightning_log_decay"
    check_count(who, "heads", heads)
    check_count(who, "layers", layers)
    check_count(who, "layer", layer, least=0)
    if layer >= layers:
        raise ValueError(
            f"{who}: layer must be 0 to layers - 1, got layer {layer} "
            f"and layers {layers}"
        )
    check_choice(who, "convention", convention, ("fla", "transnormer"))
    if convention == "transnormer":
        slopes = alibi_slopes(heads) * (1 - layer / max(layers - 1, 1) + 1e-5)
    else:
        slopes = 8 * np.arange(heads) / heads * (1 - layer / layers)
    return jnp.asarray(-slopes)


def gated_log_decay(
    logits: Float[Array, "*shape"], power: float = 1 / 16
) -> Float[Array, "*shape"]:
    """Return power · log sigmoid(logits), in float32 at least.

    Raises:
        ValueError: a power that is not above 0. A negative power would give positive
            log-decays, and the state would grow.
    Source: Yang et al. 2023, arXiv:2312.06635.
    """
    logits = as_array("gated_log_decay", "logits", logits)
    check_positive("gated_log_decay", "power", power, needed=True)
    return power * jax.nn.log_sigmoid(logits.astype(sum_dtype(logits)))


class LogDecay(NamedTuple):
    """Entry of `LOG_DECAYS`: the log-decays of a layer, at most 0.

    An entry has `rates` or `gate`. If it has neither, `symjax.layers.parts.decays`
    computes the log-decays.

    Attributes:
        rates: (heads, layer, layers) → constants [heads]; layers count from 0.
        gate: logits → log-decays, element by element. The layer computes the logits
            from the token by a learned linear map.
        per: "head" or "channel": there is one log-decay for each.
        low_rank: whether the map to logits has rank 16: it goes through 16 features.
    """

    rates: Callable[[int, int, int], Float[Array, "N"]] | None = None
    gate: Callable[[Array], Array] | None = None
    per: str = "head"
    low_rank: bool = True


# Values of model.attention.decay. "mamba2" and "kda" need more weights than a map to
# logits, so `symjax.layers.parts.decays` computes their log-decays.
LOG_DECAYS = {
    "retention": LogDecay(lambda heads, layer, layers: retention_log_decay(heads)),
    "transnormer": LogDecay(partial(lightning_log_decay, convention="transnormer")),
    "lightning": LogDecay(partial(lightning_log_decay, convention="fla")),
    "gated": LogDecay(gate=gated_log_decay, per="channel"),
    "fox": LogDecay(gate=partial(gated_log_decay, power=1.0), low_rank=False),
    "mamba2": LogDecay(),
    "kda": LogDecay(per="channel"),
    "none": LogDecay(lambda heads, layer, layers: jnp.zeros(heads)),
}
