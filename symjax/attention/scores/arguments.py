"""Checks of the arguments of score mechanisms."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from symjax.attention.core.arguments import (
    check_flag,
    check_heads,
    check_kind,
    check_number,
    device_count,
    shown,
)


def check_scores(
    who: str,
    arrays: tuple[Array, Array, Array, Array | None, Array | None],
    more: tuple[Array | None, Array | None, Array | None, Array | None],
    *,
    scale: float | Array | None,
    is_causal: bool,
    axis_name: str | None,
) -> None:
    """Raise on arguments of a score mechanism that do not fit, naming both sides.

    Args:
        arrays: query, key, value, bias and mask.
        more: lam, alibi, positions and segment_ids.
    """
    query, key, value, bias, mask = arrays
    lam, alibi, positions, segment_ids = more
    check_heads(who, query, key, value, branches=lam is not None)
    check_kind(who, jnp.bool_, mask=mask)
    check_kind(who, jnp.number, bias=bias, lam=lam, alibi=alibi)
    check_kind(who, jnp.integer, positions=positions, segment_ids=segment_ids)
    check_number(who, "scale", scale)
    check_flag(who, "is_causal", is_causal)
    if is_causal and positions is None and key.shape[1] < query.shape[1]:
        raise ValueError(
            f"{who}: causal attention aligns the last query with the last key and "
            f"needs as many keys as queries, got {query.shape} and {key.shape}"
        )
    batch, time, heads = query.shape[:3]
    devices = device_count(who, axis_name)
    own = heads if lam is None else heads // 2
    pairs = (batch, own, time, devices * key.shape[1])
    for name, array, wanted in (
        ("mask", mask, pairs),
        ("bias", bias, pairs),
        ("lam", lam, (batch, time, own)),
        ("positions", positions, (batch, time)),
    ):
        if array is not None and not _broadcasts(array, wanted):
            raise ValueError(
                f"{who}: {name} must broadcast to {wanted} for query {query.shape} and "
                f"key {key.shape}, got {array.shape}"
            )
    if alibi is not None and alibi.shape != (own,):
        raise ValueError(
            f"{who}: alibi must be a slope a head {(own,)} for query {query.shape}, "
            f"got {alibi.shape}"
        )
    if positions is not None and axis_name is not None:
        raise ValueError(
            f"{who}: positions have no meaning with axis_name {axis_name!r}"
        )
    if segment_ids is not None and not (
        segment_ids.shape == query.shape[:2] == key.shape[:2]
    ):
        raise ValueError(
            f"{who}: segment_ids must be [batch, time] of query and key alike, got "
            f"{segment_ids.shape} for {query.shape} and {key.shape}"
        )


def _broadcasts(array: Array, shape: tuple[int, ...]) -> bool:
    sizes = zip(array.shape, shape, strict=False)
    return array.ndim == len(shape) and all(x in (1, y) for x, y in sizes)


def _checked_base(who: str, base: float | None) -> float | None:
    """The base of the length scale as Python's number; None is off."""
    if base is None:
        return None
    if not isinstance(base, int | float | np.number):
        raise ValueError(f"{who}: length_base must be a number, got {shown(base)}")
    if not base:
        return None
    if not 1 < base < math.inf:
        raise ValueError(f"{who}: length_base must be above 1 and finite, got {base}")
    return float(base)


def checked_window(who: str, window: Any) -> tuple[int | None, int | None]:
    """How many keys before and after its own a row may see; None is no bound.

    Raises:
        ValueError: it is neither a number of keys above 0 nor two of 0 and more.
    """
    pair = window if isinstance(window, tuple) else (window, window)
    least = 0 if isinstance(window, tuple) else 1
    numbers = [x for x in pair if x is not None]
    known = all(
        isinstance(x, int | np.integer) and not isinstance(x, bool) and x >= least
        for x in numbers
    )
    if len(pair) != 2 or not known:
        raise ValueError(
            f"{who}: window must be (left, right), numbers of keys or None, or one "
            f"number above 0, got {shown(window)}"
        )
    # Above 2³⁰, which no row reaches, differences of positions would not fit int32.
    left, right = (None if x is None else min(int(x) - least, 2**30) for x in pair)
    return left, right
