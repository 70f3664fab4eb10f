"""What the arguments of mechanisms must be; messages name both sides."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


def check_arrays(who: str = "", **arrays: Array) -> None:
    """Refuse what is not a floating array [batch, time, heads, size], by its name.

    Raises:
        ValueError: naming all of the arrays and their shapes, or the one whose numbers
            are not floating.
    """
    who = f"{who}: " if who else ""
    if any(x.ndim != 4 for x in arrays.values()):
        shapes = ", ".join(str(x.shape) for x in arrays.values())
        raise ValueError(
            f"{who}{', '.join(arrays)} must be [batch, time, heads, size], got {shapes}"
        )
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(
                f"{who}{name} must be an array of floating numbers, got {array.dtype}"
            )


def check_heads(
    who: str, query: Array, key: Array, value: Array, *, branches: bool = False
) -> None:
    """Raise on shapes that do not fit, naming both.

    Args:
        branches: a value head may belong to several key heads.
    """

    def refuse(wanted: str, **two: Array) -> None:
        found = " and ".join(f"{name} {x.shape}" for name, x in two.items())
        raise ValueError(f"{who}: {wanted}, got {found}")

    check_arrays(who, query=query, key=key, value=value)
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        refuse("query and key must agree in batch and head size", query=query, key=key)
    heads = key.shape[2] % value.shape[2] if branches else key.shape[2] - value.shape[2]
    if key.shape[:2] != value.shape[:2] or heads:
        refuse(
            "key and value must agree in batch, time and heads", key=key, value=value
        )
    if query.shape[2] % key.shape[2]:
        refuse("query heads must be a multiple of key heads", query=query, key=key)


def check(
    who: str,
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    segment_ids: Array | None,
    *,
    causal: bool,
) -> None:
    """Raise on shapes that do not fit, naming both; `causal` wants T = S."""
    check_heads(who, query, key, value)
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


def check_scores(
    who: str,
    arrays: tuple[Array, Array, Array, Array | None, Array | None],
    more: tuple[Array | None, Array | None, Array | None, Array | None],
    *,
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
    if is_causal and positions is None and key.shape[1] < query.shape[1]:
        raise ValueError(
            f"{who}: causal attention aligns the last query with the last key and "
            f"needs as many keys as queries, got {query.shape} and {key.shape}"
        )
    batch, time, heads = query.shape[:3]
    devices = 1 if axis_name is None else jax.lax.axis_size(axis_name)
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
    if mask is not None and mask.dtype != jnp.bool_:
        raise ValueError(
            f"{who}: mask must be boolean (True = attend), got {mask.dtype}"
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
            f"number above 0, got {window!r}"
        )
    left, right = (None if x is None else int(x) - least for x in pair)
    return left, right


def check_axis(who: str, axis_name: str | None, state: Any, return_state: bool) -> None:
    """Time that is split over a mesh axis is all of time, from the first token on."""
    for name, given in (("state", state is not None), ("return_state", return_state)):
        if axis_name is not None and given:
            raise ValueError(
                f"{who}: {name} has no meaning with axis_name {axis_name!r}, whose "
                "devices read all tokens from the first on"
            )


def check_mask(who: str, mask: Array, key: Array) -> None:
    """A mask may hide keys, the same for all rows and heads: [B or 1, 1, 1, S]."""
    shape = (1,) * (4 - mask.ndim) + mask.shape
    batch, length = key.shape[:2]
    fits = len(shape) == 4 and shape[0] in (1, batch) and shape[3] in (1, length)
    if not fits or shape[1:3] != (1, 1):
        raise ValueError(
            f"{who}: a mask may only hide keys, shape ({batch} or 1, 1, 1, {length}) "
            f"for key {key.shape}, got {mask.shape}"
        )
    if mask.dtype != jnp.bool_:
        raise ValueError(f"{who}: a mask is boolean, True = attend, got {mask.dtype}")


def shown_state(state: Any) -> str:
    """A state as errors name it: its kind, and the shape of each part."""
    parts = state._asdict() if hasattr(state, "_asdict") else {}
    named = [f"{name} {jnp.shape(x)}" for name, x in parts.items() if x is not None]
    return f"a {type(state).__name__}" + (f" of {', '.join(named)}" if named else "")
