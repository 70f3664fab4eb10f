"""Checks of the tokens and states of recurrences."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from symjax.attention.core.arguments import (
    check_count,
    check_heads,
    check_kind,
    device_count,
    shown,
)


def check_tokens(
    who: str,
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    segment_ids: Array | None,
    *,
    causal: bool,
) -> None:
    """Raise if the arguments do not fit together; `causal` requires T = S."""
    check_heads(who, query, key, value)
    check_kind(who, jnp.integer, segment_ids=segment_ids)
    if causal and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"{who}: as many queries as keys are needed here, got query {query.shape} "
            f"and key {key.shape}"
        )
    if segment_ids is not None and segment_ids.shape != query.shape[:2]:
        raise ValueError(
            f"{who}: segment_ids must be [B T] of query {query.shape}, "
            f"got {segment_ids.shape}"
        )
    if mask is not None:
        check_mask(who, mask, key)


def check_mask(who: str, mask: Array, key: Array) -> None:
    """Raise unless a mask has the shape [B or 1, 1, 1, S or 1]: it hides keys only."""
    check_kind(who, jnp.bool_, mask=mask)
    shape = (1,) * (4 - mask.ndim) + mask.shape
    batch, length = key.shape[:2]
    fits = len(shape) == 4 and shape[0] in (1, batch) and shape[3] in (1, length)
    if not fits or shape[1:3] != (1, 1):
        raise ValueError(
            f"{who}: a mask may only hide keys, shape ({batch} or 1, 1, 1, {length}) "
            f"for key {key.shape}, got {mask.shape}"
        )


def check_axis(who: str, axis_name: str | None, state: Any, return_state: bool) -> None:
    """Raise if a state is given or wanted while time is split over a mesh axis."""
    device_count(who, axis_name)
    for name, given in (("state", state is not None), ("return_state", return_state)):
        if axis_name is not None and given:
            raise ValueError(
                f"{who}: {name} has no meaning with axis_name {axis_name!r}, whose "
                "devices hold the whole sequence"
            )


def check_state(who: str, needed_by: str, state: Any, wanted: Any) -> None:
    """Raise unless a state has the type and shapes of the wanted one.

    Args:
        needed_by: the arguments that need such a state, as text for the message.
        wanted: a NamedTuple of arrays.
    """
    shapes = partial(jax.tree.map, jnp.shape)
    if type(state) is not type(wanted) or shapes(state) != shapes(wanted):
        raise ValueError(
            f"{who}: {needed_by} need {shown_state(wanted)}, got {shown_state(state)}"
        )
    for name, like in wanted._asdict().items():
        if like is not None:
            sums = jnp.issubdtype(like.dtype, jnp.floating)
            kind = jnp.floating if sums else jnp.integer
            check_kind(who, kind, **{f"the state's {name}": getattr(state, name)})


def shown_state(state: Any) -> str:
    """Return a state as text for an error: its type, and the shape of each part."""
    parts = state._asdict() if hasattr(state, "_asdict") else {}
    named = [f"{name} {jnp.shape(x)}" for name, x in parts.items() if x is not None]
    return f"a {type(state).__name__}" + (f" of {', '.join(named)}" if named else "")


def state_sizes(
    who: str, batch: int, kv_heads: int, head_size: int, value_size: int, dtype: Any
) -> tuple[int, int, int, int]:
    """Check the sizes of an empty state, and return them.

    Raises:
        ValueError: a size or the dtype is wrong. The message names it.
    """
    check_count(who, "batch", batch, least=0)
    check_count(who, "kv_heads", kv_heads)
    check_count(who, "head_size", head_size)
    check_count(who, "value_size", value_size, least=0)
    check_dtype(who, dtype)
    return batch, kv_heads, head_size, value_size


def check_dtype(who: str, dtype: Any) -> None:
    """Raise unless the dtype is a floating-point type."""
    try:
        floating = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    except (TypeError, ValueError):
        floating = False
    if not floating:
        raise ValueError(
            f"{who}: dtype must be a floating-point type, got {shown(dtype)}"
        )
