"""FLASH: squared-ReLU attention inside groups of tokens, linear attention across.

    def flash_causal(q, k, lq, lk, v, G):    # one head: q, k, lq, lk [T H], v [T V]
        out = []
        for t in range(len(q)):
            near, far = slice(t // G * G, t + 1), slice(0, t // G * G)
            weights = np.maximum(q[t] @ k[near].T / q.shape[-1] ** 0.5, 0) ** 2
            out.append((weights @ v[near] + lq[t] @ lk[far].T @ v[far]) / G)
        return np.stack(out)

`flash` attends to all groups, `flash_causal` to the past, and `flash_step` computes one
token from a state. The state has the keys, linear keys and values of the last group,
which is incomplete, and sums over the groups before it. This file checks arguments.
The computation is in `symjax.attention.recurrent.flash_groups`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.arguments import (
    check_count,
    check_flag,
    check_number,
)
from symjax.attention.core.sequence import segment_runs_over
from symjax.attention.core.visibility import hidden_as_zero, visible_keys
from symjax.attention.gau import SquaredReLU, fixed_divisor
from symjax.attention.recurrent import flash_groups
from symjax.attention.recurrent.arguments import (
    check_axis,
    check_dtype,
    check_state,
    check_tokens,
    shown_state,
)
from symjax.attention.recurrent.flash_groups import (
    FlashSettings,
    FlashState,
    FlashTokens,
)


def flash(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    linear_query: Float[Array, "B T N M"],
    linear_key: Float[Array, "B T K M"],
    value: Float[Array, "B T K V"],
    mask: Bool[Array, "B 1 1 T"] | None = None,
    *,
    group_size: int = 256,
    is_causal: bool = False,
    scale: float | Float[Array, ""] | None = None,
    divisor: float | None = None,
    linear_divisor: float | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T N V"]:
    """Return squared-ReLU attention inside groups of tokens, plus linear attention.

    out[t] = Σ_s relu²(q_t·k_s·scale) v_s / divisor     s in the group of t
           + Σ_s q'_t·k'_s v_s / linear_divisor         s in any group

    Groups are counted from the first token. With `is_causal` the first sum ends with
    token t, and the second with the group before that of t. Time
    O(T (group_size (H + V) + M V)), memory linear in T. Sums run in float32 at least.
    Weights are not normalised, and no ε is added; a row that sees no key is zero.

    Args:
        linear_query, linear_key: q' and k'; their size M may differ from H.
        mask: True = attend; it may only hide keys. A hidden token keeps its place in
            its group.
        scale: factor of the scores inside a group, 1/√H by default; it may be learned.
        divisor, linear_divisor: constants, group_size by default. In a causal model
            they must not depend on T. The paper has scale=1/group_size, divisor=1, and
            linear_divisor=group_size if causal, T if not.
        segment_ids: tokens see only their own run of equal ids. Groups do not restart
            with a segment.
    Raises:
        ValueError: shapes that do not fit, a divisor or a group size that is not above
            0, or a mask that hides pairs and not keys.
    Source: Hua et al. 2022, arXiv:2202.10447, section 4.
    """
    settings = _settings("flash", group_size, is_causal, scale, divisor, linear_divisor)
    arrays = query, key, linear_query, linear_key, value
    tokens = _tokens("flash", *arrays, mask, segment_ids)
    return flash_groups.attend_groups(settings, None, tokens, scale)


def flash_causal(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    linear_query: Float[Array, "B T N M"],
    linear_key: Float[Array, "B T K M"],
    value: Float[Array, "B T K V"],
    mask: Bool[Array, "B 1 1 T"] | None = None,
    *,
    group_size: int = 256,
    scale: float | Float[Array, ""] | None = None,
    divisor: float | None = None,
    linear_divisor: float | None = None,
    state: FlashState | None = None,
    return_state: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    axis_name: str | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], FlashState]:
    """Return causal `flash` of tokens that follow those of `state`.

    Time as in `flash`.

    Args:
        mask: as in `flash`. Hidden tokens after the last visible token of an example
            are padding: the state does not count them.
        state: from `flash_state`, `flash_step` or an earlier call, with the same group
            size. Its tokens are in the same segment as the first token of this call.
        axis_name: in a `jax.shard_map`, the mesh axis that time is split over; each
            device passes its part of every array, which must be whole groups. Devices
            exchange their sums.
    Returns:
        The output; with `return_state` also the state after the last visible token.
    Raises:
        ValueError: as `flash`; a state of other sizes; `state` or `return_state`
            together with axis_name; a part of time that is not whole groups.
    Source: Hua et al. 2022, arXiv:2202.10447, section 4.
    """
    settings = _settings(
        "flash_causal", group_size, True, scale, divisor, linear_divisor
    )
    arrays = query, key, linear_query, linear_key, value
    check_flag("flash_causal", "return_state", return_state)
    check_axis("flash_causal", axis_name, state, return_state)
    tokens = _tokens("flash_causal", *arrays, mask, segment_ids, axis_name)
    if axis_name is not None and key.shape[1] % group_size:
        raise ValueError(
            f"flash_causal: a device's {key.shape[1]} tokens, query {query.shape}, are "
            f"not a multiple of group_size {group_size}"
        )
    if state is None and not return_state:
        return flash_groups.attend_groups(settings, axis_name, tokens, scale)
    if state is None:
        state = _empty_like(tokens, group_size)
    _check_state("flash_causal", state, tokens, group_size)
    visible = visible_keys(mask, *key.shape[:2])
    places = jnp.arange(1, visible.shape[1] + 1)
    count = jnp.where(visible, places[None], 0).max(axis=1, initial=0)
    output, after = flash_groups.prefill(settings, tokens, scale, state, count)
    return (output, _advance_place(state, after, count)) if return_state else output


def flash_step(
    state: FlashState,
    query: Float[Array, "B 1 N H"],
    key: Float[Array, "B 1 K H"],
    linear_query: Float[Array, "B 1 N M"],
    linear_key: Float[Array, "B 1 K M"],
    value: Float[Array, "B 1 K V"],
    *,
    scale: float | Float[Array, ""] | None = None,
    divisor: float | None = None,
    linear_divisor: float | None = None,
) -> tuple[Float[Array, "B 1 N V"], FlashState]:
    """Return the output for one more token of `flash_causal`, and the new state.

    Time O(group_size (H + V) + M V), independent of the number of earlier tokens.

    Raises:
        ValueError: as `flash_causal`; more than one token.
    """
    if not isinstance(state, FlashState):
        raise ValueError(f"flash_step needs a FlashState, got {shown_state(state)}")
    if getattr(state.key, "ndim", 0) != 4:
        raise ValueError(
            f"flash_step needs keys [B group K H] in its state, got "
            f"{shown_state(state)}"
        )
    group_size = state.key.shape[1]
    settings = _settings("flash_step", group_size, True, scale, divisor, linear_divisor)
    arrays = query, key, linear_query, linear_key, value
    tokens = _tokens("flash_step", *arrays, None, None)
    if query.shape[1] != 1:
        raise ValueError(f"flash_step: a step takes one token, got query {query.shape}")
    _check_state("flash_step", state, tokens, group_size)
    output, after = flash_groups.step(settings, tokens, scale, state)
    return output, _advance_place(state, after, 1)


def _advance_place(
    before: FlashState, after: FlashState, count: Array | int
) -> FlashState:
    """Return the state `after` with `place`, which is `count` tokens after `before`.

    `FlashState.place` is the number of tokens in the incomplete group. It is the same
    for all heads, but the engine runs once per part of the heads if a mesh splits them.
    So `place` is computed here.
    """
    place = (before.place + count) % before.key.shape[1]
    return after._replace(place=place.astype(before.place.dtype))


def flash_state(
    batch: int,
    kv_heads: int,
    key_size: int,
    value_size: int,
    *,
    group_size: int = 256,
    linear_size: int | None = None,
    dtype: Any = jnp.float32,
) -> FlashState:
    """Return the state of `flash_causal` before the first token.

    It has group_size (H + M + V) + M V numbers per key head.

    Args:
        linear_size: M, the size of linear keys; key_size by default.
        dtype: type of the stored keys and values; the sums are float32 at least.
    Raises:
        ValueError: a size or a dtype that is wrong.
    """
    linear_size = key_size if linear_size is None else linear_size
    who = "flash_state"
    check_count(who, "batch", batch, least=0)
    check_count(who, "kv_heads", kv_heads)
    check_count(who, "key_size", key_size)
    check_count(who, "value_size", value_size, least=0)
    check_count(who, "group_size", group_size)
    check_count(who, "linear_size", linear_size)
    check_dtype(who, dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    return FlashState(
        jnp.zeros((batch, group_size, kv_heads, key_size), dtype),
        jnp.zeros((batch, group_size, kv_heads, linear_size), dtype),
        jnp.zeros((batch, group_size, kv_heads, value_size), dtype),
        jnp.zeros((batch,), jnp.int32),
        jnp.zeros((batch, kv_heads, linear_size, value_size), wide),
    )


def _settings(
    who: str,
    group_size: int,
    is_causal: bool,
    scale: float | Array | None,
    divisor: float | None,
    linear_divisor: float | None,
) -> FlashSettings:
    """Check the settings of a call, and return the static ones."""
    check_count(who, "group_size", group_size)
    check_flag(who, "is_causal", is_causal)
    check_number(who, "scale", scale)
    near, far = (
        fixed_divisor(f"{who}: {name}", group_size if value is None else value)
        for name, value in (("divisor", divisor), ("linear_divisor", linear_divisor))
    )
    return FlashSettings(group_size, is_causal, SquaredReLU(float(near)), float(far))


def _empty_like(tokens: FlashTokens, group_size: int) -> FlashState:
    """Return the empty state for tokens of these sizes and types."""
    batch, _, heads, size = tokens.key.shape
    return flash_state(
        batch,
        heads,
        size,
        tokens.value.shape[-1],
        group_size=group_size,
        linear_size=tokens.linear_key.shape[-1],
        dtype=jnp.result_type(tokens.key, tokens.linear_key, tokens.value),
    )


def _tokens(
    who: str,
    query: Array,
    key: Array,
    linear_query: Array,
    linear_key: Array,
    value: Array,
    mask: Array | None,
    segment_ids: Array | None,
    axis_name: str | None = None,
) -> FlashTokens:
    """Check the arrays of a call. Return them with 0 in hidden keys and values."""
    check_tokens(who, query, key, value, mask, segment_ids, causal=True)
    linear = f"{who}, linear_query and linear_key"
    check_tokens(linear, linear_query, linear_key, value, None, None, causal=True)
    if query.shape[2] != linear_query.shape[2]:
        raise ValueError(
            f"{who}: query and linear_query must agree in heads, got {query.shape} "
            f"and {linear_query.shape}"
        )
    if mask is not None:
        seen = visible_keys(mask, *key.shape[:2])
        key, linear_key, value = hidden_as_zero(seen, key, linear_key, value)
    segment = None
    if segment_ids is not None:
        segment, _ = segment_runs_over(segment_ids, axis_name)
    return FlashTokens(query, key, linear_query, linear_key, value, segment)


def _check_state(
    who: str, state: FlashState, tokens: FlashTokens, group_size: int
) -> None:
    """Raise unless the state fits the sizes of these tokens; the message has all."""
    wanted = jax.eval_shape(lambda: _empty_like(tokens, group_size))
    sizes = f"key {tokens.key.shape}, value {tokens.value.shape}"
    check_state(who, f"{sizes} and groups of {group_size}", state, wanted)
