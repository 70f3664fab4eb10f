"""What the arguments of mechanisms must be; messages name both sides."""

from typing import Any

import jax.numpy as jnp
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

    def refuse(wanted: str, one: str, two: str) -> None:
        shapes = {"query": query.shape, "key": key.shape, "value": value.shape}
        raise ValueError(
            f"{who}: {wanted}, got {one} {shapes[one]} and {two} {shapes[two]}"
        )

    check_arrays(who, query=query, key=key, value=value)
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        refuse("query and key must agree in batch and head size", "query", "key")
    if key.shape[:3] != value.shape[:3]:
        refuse("key and value must agree in batch, time and heads", "key", "value")
    if query.shape[2] % key.shape[2]:
        refuse("query heads must be a multiple of key heads", "query", "key")
    if causal and query.shape[1] != key.shape[1]:
        refuse("as many queries as keys are needed here", "query", "key")
    if segment_ids is not None and segment_ids.shape != query.shape[:2]:
        raise ValueError(
            f"{who}: segment_ids must be [B T] of query {query.shape}, "
            f"got {segment_ids.shape}"
        )
    if mask is not None:
        check_mask(who, mask, key)


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
