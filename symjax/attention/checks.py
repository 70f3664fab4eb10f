"""What the arguments of mechanisms must be; messages name both sides."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


def check_count(who: str, name: str, value: int) -> None:
    """Refuse what is no whole number above 0, or one that only the device knows."""
    if not isinstance(value, int | np.integer):
        raise ValueError(f"{who}: {name} must be an int, got {value}")
    if value < 1:
        raise ValueError(f"{who}: {name} must be at least 1, got {value}")


def check_arrays(who: str, **arrays: Array) -> None:
    """Refuse what is not a floating array [batch, time, heads, size], by its name.

    Raises:
        ValueError: naming all of the arrays and their shapes, or the one whose numbers
            are not floating.
    """
    if any(x.ndim != 4 for x in arrays.values()):
        shapes = ", ".join(str(x.shape) for x in arrays.values())
        raise ValueError(
            f"{who}: {', '.join(arrays)} must be [batch, time, heads, size], "
            f"got {shapes}"
        )
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(
                f"{who}: {name} must be an array of floating numbers, got {array.dtype}"
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
