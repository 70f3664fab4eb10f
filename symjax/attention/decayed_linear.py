"""Linear attention whose state decays: RetNet, Lightning, gated linear attention.

A chunk of time is split as in a merge sort: the second half of each block of 2, 4, 8 …
tokens looks at the first half. A pair's decay is then the sum from the boundary to the
query plus the sum from the key to the boundary. Nothing is ever subtracted: every
factor is at most 1, no exponent loses digits to a stronger decay elsewhere, and −∞,
which forgets everything, is a decay like any other.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.checks import check, check_axis, shown_state
from symjax.attention.execution import cut, heads_last, join, layout, sum_dtype
from symjax.attention.positions import alibi_slopes
from symjax.attention.prefix import einsum
from symjax.attention.shards import (
    Stretch,
    follow,
    last_before,
    on_auto_axes,
    state_before,
    vary_alike,
)


class DecayState(NamedTuple):
    """What decaying attention keeps of its past, in float32 at least.

    sums_t = Σ_{s≤t} exp(g_{s+1} + … + g_t) k_s v_sᵀ
    """

    sums: Float[Array, "B K H V"]


class _Chunk(NamedTuple):
    """A stretch of time; F is 1 for a decay a head, H for one a channel."""

    query: Float[Array, "B K G T H"]
    key: Float[Array, "B K T H"]
    value: Float[Array, "B K T V"]
    log_decay: Float[Array, "B K T F"]


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
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], DecayState]:
    """Unnormalised linear attention over a past that fades.

    S_t = exp(g_t) S_{t−1} + k_t v_tᵀ and out[t] = q_t S_t, with g_t = log_decay[t]

    There is no scale and no denominator: scale the query and normalise the output.
    Query head n uses key head n // (N/K), whose decay it shares. Sums run in float32
    at least. Time O(T (H V + chunk_size (H + V))), and a decay a channel adds
    O(T H log chunk_size) exponentials; the backward pass keeps one state a chunk.

    Args:
        log_decay: at most 0, [K] or [B or 1, T or 1, K] for a decay a head or
            [B or 1, T or 1, K, H] for one a channel. Above 0 the state grows, which
            cannot be refused here: under `jax.jit` no value is known. −∞ forgets all.
        mask: True = attend; it may only hide keys. A hidden token is as good as
            absent: it neither adds nor decays. Its own output is what the state gives.
        chunk_size: tokens handled together, best a power of two; T or more is the
            parallel form, quadratic in T.
        state: from `decay_state`, `decay_step` or an earlier call. Its last segment
            goes on with the first run of `segment_ids`.
        segment_ids: the state starts anew wherever the id changes.
        axis_name: in a `jax.shard_map`, the mesh axis that time is split over; every
            array is a device's own stretch. Devices tell each other their states.
    Returns:
        The output, and the state after the last token if `return_state`.
    Raises:
        ValueError: shapes that do not fit, a mask that hides pairs and not keys, or a
            state of other sizes; a state given or wanted with an axis_name.
    Source: Sun et al. 2023, arXiv:2307.08621 (a constant a head); Qin et al. 2023,
        arXiv:2307.14995; Yang et al. 2023, arXiv:2312.06635 (a gate a channel).
    """
    who = "decay_causal"
    check(who, query, key, value, mask, segment_ids, causal=True)
    check_axis(who, axis_name, state, return_state)
    log_decay = _checked_log_decay(who, log_decay, key)
    if chunk_size < 1:
        raise ValueError(f"{who}: chunk_size must be at least 1, got {chunk_size}")
    start = _start(who, state, query, key, value)
    output, end = _causal(
        chunk_size, axis_name, query, key, value, log_decay, start, mask, segment_ids
    )
    return (output, end) if return_state else output


def decay_step(
    state: DecayState,
    query: Float[Array, "B 1 N H"],
    key: Float[Array, "B 1 K H"],
    value: Float[Array, "B 1 K V"],
    log_decay: Float[Array, "#B 1 K *F"] | Float[Array, " K"],
) -> tuple[Float[Array, "B 1 N V"], DecayState]:
    """One more token of `decay_causal`, in O(H V): the output and the state after it.

    Raises:
        ValueError: as `decay_causal`; more than one token.
    """
    who = "decay_step"
    check(who, query, key, value, None, None, causal=True)
    log_decay = _checked_log_decay(who, log_decay, key)
    if query.shape[1] != 1:
        raise ValueError(f"{who}: a step takes one token, got query {query.shape}")
    state = _start(who, state, query, key, value)
    return _causal(1, None, query, key, value, log_decay, state, None, None)


def decay_state(
    batch: int,
    kv_heads: int,
    head_size: int,
    value_size: int,
    *,
    dtype: Any = jnp.float32,
) -> DecayState:
    """The state of `decay_causal` before the first token; float32 at least."""
    dtype = jnp.promote_types(dtype, jnp.float32)
    return DecayState(jnp.zeros((batch, kv_heads, head_size, value_size), dtype))


def retention_log_decay(heads: int) -> Float[Array, "N"]:
    """log(1 − 2^(−5−h)) of heads h from 0: a memory of 32, 64, 128 … tokens.

    Raises:
        ValueError: fewer than 1 head.
    Source: Sun et al. 2023, arXiv:2307.08621, "multi-scale retention".
    """
    _check_heads("retention_log_decay", heads)
    return jnp.asarray(np.log1p(-(2.0 ** (-5 - np.arange(heads)))))


def lightning_log_decay(
    heads: int, layer: int, layers: int, *, convention: str
) -> Float[Array, "N"]:
    """The constant decays of Lightning attention, by one of two published conventions.

    "transnormer": −2^(−8(h+1)/N) (1 − l/(L−1) + 1e-5), as in OpenNLPLab's models; by
        `alibi_slopes` where N is no power of two.
    "fla": −(8h/N) (1 − l/L), as in flash-linear-attention; head 0 never decays.

    Args:
        layer, layers: l, counted from 0, of L: later layers remember longer.
    Raises:
        ValueError: an unknown convention, fewer than 1 head, or no such layer.
    Source: Qin et al. 2023, arXiv:2307.14995.
    """
    _check_heads("lightning_log_decay", heads)
    if not 0 <= layer < layers:
        raise ValueError(
            f"lightning_log_decay: layer must be 0 to layers - 1, got layer {layer} "
            f"and layers {layers}"
        )
    if convention == "transnormer":
        slopes = alibi_slopes(heads) * (1 - layer / max(layers - 1, 1) + 1e-5)
    elif convention == "fla":
        slopes = 8 * np.arange(heads) / heads * (1 - layer / layers)
    else:
        raise ValueError(
            f"lightning_log_decay: convention {convention!r} is unknown: choose from "
            "fla, transnormer"
        )
    return jnp.asarray(-slopes)


def gated_log_decay(
    logits: Float[Array, "*shape"], power: float = 1 / 16
) -> Float[Array, "*shape"]:
    """power · log sigmoid(logits), in float32 at least: a gate that a layer learns.

    Raises:
        ValueError: a power that is not above 0, whose state would grow.
    Source: Yang et al. 2023, arXiv:2312.06635.
    """
    if power <= 0:
        raise ValueError(f"gated_log_decay: power must be above 0, got {power}")
    return power * jax.nn.log_sigmoid(logits.astype(sum_dtype(logits)))


def _check_heads(who: str, heads: int) -> None:
    if heads < 1:
        raise ValueError(f"{who} needs at least 1 head, got {heads}")


def _checked_log_decay(who: str, log_decay: Array, key: Array) -> Array:
    """The same as [B or 1, T or 1, K] or [B or 1, T or 1, K, H]."""
    batch, length, heads, size = key.shape
    log_decay = jnp.asarray(log_decay)
    given = log_decay.shape
    if given == (heads,):
        log_decay = log_decay[None, None]
    shape = log_decay.shape
    fits = len(shape) in (3, 4) and shape[2:] in ((heads,), (heads, size))
    if not fits or shape[0] not in (1, batch) or shape[1] not in (1, length):
        raise ValueError(
            f"{who}: log_decay must be [{heads}], [{batch} or 1, {length} or 1, "
            f"{heads}], or the latter and {size} channels, for key {key.shape}, "
            f"got {given}"
        )
    return log_decay


def _start(
    who: str, state: DecayState | None, query: Array, key: Array, value: Array
) -> DecayState:
    """The given state in the dtype of the sums, or the empty one."""
    batch, _, heads, size = key.shape
    dtype = sum_dtype(query, key, value)
    wanted = decay_state(batch, heads, size, value.shape[-1], dtype=dtype)
    if state is None:
        return wanted
    if not isinstance(state, DecayState) or state.sums.shape != wanted.sums.shape:
        raise ValueError(
            f"{who}: key {key.shape} and value {value.shape} need {shown_state(wanted)}"
            f", got {shown_state(state)}"
        )
    return DecayState(jnp.asarray(state.sums, dtype))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _causal(
    chunk_size: int,
    axis_name: str | None,
    *operands: Any,
) -> tuple[Array, DecayState]:
    """All of time, a chunk after the other.

    The backward pass recomputes a chunk from the state before it.
    """

    def all_rows(query, key, value, log_decay, state, mask, segment_ids):
        chunk = _layout(query, key, value, log_decay, mask, segment_ids, axis_name)
        state, chunk = vary_alike((state, chunk))
        if axis_name is not None:
            state = _before(chunk, state, axis_name)
        length = key.shape[1]
        size = max(1, min(chunk_size, length))
        rest = (cut(x, size, 2) for x in chunk[1:])
        chunks = _Chunk(cut(chunk.query, size, 3), *rest)
        body = jax.checkpoint(_advance, prevent_cse=False)
        sums, rows = jax.lax.scan(body, state.sums, chunks)
        return heads_last(join(rows, length), value.dtype), DecayState(sums)

    return on_auto_axes(all_rows, operands[0], operands[2], *operands)


def _layout(
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array,
    mask: Array | None,
    segment_ids: Array | None,
    axis_name: str | None,
) -> _Chunk:
    """Heads before time. Hidden tokens do not decay, and a segment's first forgets."""
    chunk = layout(query, key, value, mask, segment_ids, axis_name)
    decay = log_decay[..., None] if log_decay.ndim == 3 else log_decay
    decay = jnp.broadcast_to(decay, (*key.shape[:3], decay.shape[-1]))
    decay = rearrange(decay, "b t k f -> b k t f")
    if mask is not None:
        decay = jnp.where(chunk.visible[:, None, :, None], decay, 0)
    if chunk.run is not None:
        before = last_before(chunk.run, axis_name)
        first = jnp.diff(chunk.run, axis=1, prepend=before) != 0
        decay = jnp.where(first[:, None, :, None], -jnp.inf, decay)
    vectors = cast(tuple[Array, Array, Array], chunk[:3])
    return _Chunk(*vectors, decay)


def _before(chunk: _Chunk, empty: DecayState, axis_name: str) -> DecayState:
    """What is left of the stretches before a device's own."""
    _, key, value, log_decay = (x.astype(empty.sums.dtype) for x in chunk)
    later = jnp.pad(log_decay[:, :, 1:], ((0, 0), (0, 0), (0, 1), (0, 0)))
    until = jax.lax.cumsum(later, axis=2, reverse=True)
    sums = einsum("bksh,bksv->bkhv", key * jnp.exp(until), value)
    own = Stretch(sums, log_decay.sum(axis=2))
    nothing = Stretch(empty.sums, jnp.zeros_like(own.log_decay))
    return DecayState(state_before(follow, own, nothing, axis_name).sums)


def _advance(
    sums: Float[Array, "B K H V"], chunk: _Chunk
) -> tuple[Float[Array, "B K H V"], Float[Array, "B K G T V"]]:
    """One chunk: the sums after it, and its rows."""
    query, key, value, log_decay = (x.astype(sums.dtype) for x in chunk)
    if log_decay.shape[-1] == 1:
        since, until, scores = _scores_by_head(query, key, log_decay)
    else:
        since, until, scores = _scores_by_channel(query, key, log_decay)
    inside = einsum("bkgts,bksv->bkgtv", scores, value)
    faded = query * jnp.exp(since)[:, :, None]
    rows = inside + einsum("bkgth,bkhv->bkgtv", faded, sums)
    new = einsum("bksh,bksv->bkhv", key * jnp.exp(until), value)
    return sums * jnp.exp(since[:, :, -1])[..., None] + new, rows


def _scores_by_head(
    query: Array, key: Array, log_decay: Array
) -> tuple[Array, Array, Array]:
    """q_t·k_s exp(g_{s+1} + … + g_t): one decay multiplies each product."""

    def across(since: Array, until: Array) -> Array:
        return since + jnp.swapaxes(until, -1, -2)

    length = key.shape[2]
    padded = _to_power_of_two(log_decay)
    own = jnp.zeros_like(padded)[..., None]
    since, until, exponents = _by_halves(padded, own, across, -jnp.inf)
    weights = jnp.exp(exponents[..., :length, :length])[:, :, None]
    scores = einsum("bkgth,bksh->bkgts", query, key) * weights
    return since[:, :, :length], until[:, :, :length], scores


def _scores_by_channel(
    query: Array, key: Array, log_decay: Array
) -> tuple[Array, Array, Array]:
    """Σ_h q_th k_sh exp(g_{s+1,h} + … + g_th), each half of the decay with its own."""
    length = key.shape[2]
    query, key, padded = map(_to_power_of_two, (query, key, log_decay))

    def across(since: Array, until: Array) -> Array:
        half = since.shape[-2]
        later = _halves(query, half)[1] * jnp.exp(since)[:, :, None]
        earlier = _halves(key, half)[0] * jnp.exp(until)
        return einsum("bkgnth,bknsh->bkgnts", later, earlier)

    own = einsum("bkgth,bkth->bkgt", query, key)[..., None, None]
    since, until, scores = _by_halves(padded, own, across, 0)
    scores = scores[..., :length, :length]
    return since[:, :, :length], until[:, :, :length], scores


def _to_power_of_two(x: Array) -> Array:
    """Zeros at the end of time: tokens that add nothing and do not decay."""
    length = x.shape[-2]
    more = (1 << (length - 1).bit_length()) - length
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, more), (0, 0)])


def _halves(x: Array, half: int) -> tuple[Array, Array]:
    """[… T F] → the first and the second halves of blocks, both [… T/2half half F]."""
    count = x.shape[-2] // (2 * half)
    blocks = x.reshape(*x.shape[:-2], count, 2, half, x.shape[-1])
    return blocks[..., 0, :, :], blocks[..., 1, :, :]


def _rejoin(first: Array, second: Array) -> Array:
    """The inverse of `_halves`."""
    blocks = jnp.concatenate([first, second], axis=-2)
    return jax.lax.collapse(blocks, blocks.ndim - 3, blocks.ndim - 1)


def _by_halves(
    log_decay: Float[Array, "B K T F"],
    own: Float[Array, "*heads T 1 1"],
    across: Callable[[Array, Array], Array],
    nothing: float,
) -> tuple[
    Float[Array, "B K T F"], Float[Array, "B K T F"], Float[Array, "*heads T T"]
]:
    """Blocks of one token joined two by two until one holds all T, a power of two.

    Args:
        own: what each token makes of itself.
        across: what second halves make of first halves, from the log-decays since the
            boundary between them and until it.
        nothing: what a token makes of a later one.
    Returns:
        Log-decays from before the first token through each token, those from after
        each token through the last, and the pairs.
    """
    since, until, pairs = log_decay, jnp.zeros_like(log_decay), own
    half = 1
    while half < log_decay.shape[2]:
        (since_first, since_second) = _halves(since, half)
        (until_first, until_second) = _halves(until, half)
        first, second = pairs[..., 0::2, :, :], pairs[..., 1::2, :, :]
        below = jnp.concatenate([across(since_second, until_first), second], -1)
        above = jnp.concatenate([first, jnp.full_like(first, nothing)], -1)
        pairs = jnp.concatenate([above, below], -2)
        through_first, through_second = (
            since_first[..., -1:, :],
            since_second[..., -1:, :],
        )
        since = _rejoin(since_first, through_first + since_second)
        until = _rejoin(until_first + through_second, until_second)
        half *= 2
    return since, until, pairs[..., 0, :, :]
