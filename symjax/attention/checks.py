"""What the arguments of mechanisms must be; messages name both sides."""

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

KINDS = {  # of arrays, as errors name them
    jnp.number: "an array of real numbers",
    jnp.floating: "an array of floating numbers",
    jnp.integer: "an array of whole numbers",
    jnp.bool_: "a boolean array (True = attend)",
}


def check_count(who: str, name: str, value: int) -> None:
    """Raise unless the value is a positive integer that is known at trace time."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{who}: {name} must be an int, got {value}")
    if value < 1:
        raise ValueError(f"{who}: {name} must be at least 1, got {value}")


def check_flag(who: str, name: str, value: bool) -> None:
    """Refuse what is not Python's True or False: programs are compiled for it."""
    if not isinstance(value, bool):
        raise ValueError(f"{who}: {name} must be True or False, got {value}")


def check_number(who: str, name: str, value: Any) -> None:
    """Refuse what is not one number, or one of Python or numpy that is not finite; None
    is left out."""
    if hasattr(value, "shape"):
        one, found = value.shape == (), value.shape
    else:
        one, found = value is None or isinstance(value, Real), repr(value)
    if not one:
        raise ValueError(f"{who}: {name} must be one number, got {found}")
    if isinstance(value, Real) and not math.isfinite(value):
        raise ValueError(f"{who}: {name} must be finite, got {value}")


def check_function(who: str, attend: Callable) -> None:
    """Refuse a mechanism by name where the function itself is wanted."""
    if not callable(attend):
        raise ValueError(f"{who}: attend must be a function, got {attend!r}")


def check_kind(who: str, kind: type, **arrays: Any) -> None:
    """Refuse what is no array of this kind, by its name; None is left out."""
    for name, array in arrays.items():
        if array is None:
            continue
        found = getattr(array, "dtype", f"a {type(array).__name__}")
        fits = hasattr(array, "dtype") and jnp.issubdtype(found, kind)
        if not fits or jnp.issubdtype(found, jnp.complexfloating):
            raise ValueError(f"{who}: {name} must be {KINDS[kind]}, got {found}")


def as_array(who: str, name: str, value: Any) -> Array:
    """What may be a number or a list as an array of real numbers, or an error that
    names it."""
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError):
        raise ValueError(f"{who}: {name} must be an array, got {value!r}") from None
    check_kind(who, jnp.number, **{name: array})
    return array


def check_arrays(who: str, **arrays: Array) -> None:
    """Refuse what is not a floating array [batch, time, heads, size], by its name.

    Raises:
        ValueError: naming all of the arrays and their shapes, or the one whose numbers
            are not floating.
    """
    for name, array in arrays.items():
        if array is None:
            raise ValueError(f"{who}: {name} must be {KINDS[jnp.floating]}, got None")
    check_kind(who, jnp.floating, **arrays)
    if any(x.ndim != 4 or x.shape[2] == 0 for x in arrays.values()):
        shapes = ", ".join(str(x.shape) for x in arrays.values())
        raise ValueError(
            f"{who}: {', '.join(arrays)} must be [batch, time, heads, size], heads not "
            f"0, got {shapes}"
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
    if query.shape[3] == 0:
        refuse("query and key must have a size above 0", query=query, key=key)
    heads = key.shape[2] % value.shape[2] if branches else key.shape[2] - value.shape[2]
    if key.shape[:2] != value.shape[:2] or heads:
        refuse(
            "key and value must agree in batch, time and heads", key=key, value=value
        )
    if query.shape[2] % key.shape[2]:
        refuse("query heads must be a multiple of key heads", query=query, key=key)


def check_mask(who: str, mask: Array, key: Array) -> None:
    """A mask may hide keys, the same for all rows and heads: [B or 1, 1, 1, S]."""
    check_kind(who, jnp.bool_, mask=mask)
    shape = (1,) * (4 - mask.ndim) + mask.shape
    batch, length = key.shape[:2]
    fits = len(shape) == 4 and shape[0] in (1, batch) and shape[3] in (1, length)
    if not fits or shape[1:3] != (1, 1):
        raise ValueError(
            f"{who}: a mask may only hide keys, shape ({batch} or 1, 1, 1, {length}) "
            f"for key {key.shape}, got {mask.shape}"
        )
