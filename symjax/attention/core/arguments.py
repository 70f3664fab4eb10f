"""Checks of arguments of mechanisms. A message says what was wanted and what came."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

KINDS = {  # names of the kinds of arrays in errors
    jnp.number: "an array of real numbers",
    jnp.floating: "an array of floating numbers",
    jnp.integer: "an array of whole numbers",
    jnp.bool_: "a boolean array (True = attend)",
}


def shown(value: Any) -> str:
    """Return a value as one line of text for an error; of an array, its shape."""
    if getattr(value, "shape", ()):
        return f"an array of shape {value.shape}"
    return " ".join(repr(value).split())


def check_choice(who: str, name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise unless the value is one of the choices; the error lists them."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(
            f"{who}: {name} {shown(value)} is unknown: choose from {', '.join(choices)}"
        )


def check_count(who: str, name: str, value: int, least: int = 1) -> None:
    """Raise unless the value is an integer of at least `least`, known at trace time."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{who}: {name} must be an int, got {shown(value)}")
    if value < least:
        raise ValueError(f"{who}: {name} must be at least {least}, got {value}")


def check_flag(who: str, name: str, value: bool) -> None:
    """Raise unless the value is True or False of Python; an array is refused."""
    if not isinstance(value, bool):
        raise ValueError(f"{who}: {name} must be True or False, got {shown(value)}")


def check_number(who: str, name: str, value: Any, *, needed: bool = False) -> None:
    """Raise unless the value is one number. A Python number must also be finite.

    Args:
        needed: True refuses None, False lets it pass.
    """
    if hasattr(value, "shape"):
        one, found = value.shape == (), value.shape
    else:
        real = isinstance(value, int | float) and not isinstance(value, bool)
        one, found = real or (value is None and not needed), repr(value)
    if not one:
        raise ValueError(f"{who}: {name} must be one number, got {found}")
    if hasattr(value, "dtype"):
        check_kind(who, jnp.number, **{name: value})
    if isinstance(value, int | float) and not math.isfinite(value):
        raise ValueError(f"{who}: {name} must be finite, got {value}")


def check_positive(who: str, name: str, value: Any, *, needed: bool = False) -> None:
    """Raise unless the value is one finite number above 0; a traced number passes."""
    check_number(who, name, value, needed=needed)
    if value is None or isinstance(value, Tracer):
        return
    # Under `jax.jit` a comparison of a concrete array of jax would be traced.
    if not 0 < np.asarray(value) < math.inf:
        raise ValueError(f"{who}: {name} must be positive and finite, got {value}")


def check_log_decay(who: str, log_decay: Any) -> None:
    """Raise if a log-decay is above 0; NaN and traced log-decays pass.

    Positive log-decays would make a state grow until it overflows. The check waits for
    the values and reads them on the host: under `jax.jit` and `jax.shard_map` an
    operation of jax on a constant would be traced. Arrays with parts on other processes
    are not checked.

    Raises:
        ValueError: a log-decay is above 0. The message has the largest.
    """
    if log_decay is None or isinstance(log_decay, Tracer):
        return
    if not getattr(log_decay, "is_fully_addressable", True):
        return
    values = np.asarray(log_decay)
    positive = values[values > 0]
    if positive.size:
        raise ValueError(
            f"{who}: log_decay must be at most 0, got {shown(values)} with "
            f"{float(positive.max()):g}"
        )


def check_function(who: str, attend: Callable) -> None:
    """Raise unless `attend` is a function. The name of a function is refused."""
    if not callable(attend):
        raise ValueError(f"{who}: attend must be a function, got {attend!r}")


def check_kind(who: str, kind: type, **arrays: Any) -> None:
    """Raise unless the arrays are of this kind; None passes."""
    for name, array in arrays.items():
        if array is None:
            continue
        found = getattr(array, "dtype", f"a {type(array).__name__}")
        fits = hasattr(array, "dtype") and jnp.issubdtype(found, kind)
        if not fits or jnp.issubdtype(found, jnp.complexfloating):
            raise ValueError(f"{who}: {name} must be {KINDS[kind]}, got {found}")


def check_floating(who: str, **arrays: Any) -> None:
    """Raise unless all are arrays of floating numbers; None is refused."""
    for name, array in arrays.items():
        if array is None:
            raise ValueError(f"{who}: {name} must be {KINDS[jnp.floating]}, got None")
    check_kind(who, jnp.floating, **arrays)


def as_array(who: str, name: str, value: Any) -> Array:
    """Return a number, a list or an array as an array of real numbers.

    Raises:
        ValueError: the value is none of these. The message has its name.
    """
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"{who}: {name} must be an array, got {shown(value)}"
        ) from None
    check_kind(who, jnp.number, **{name: array})
    return array


def check_arrays(who: str, **arrays: Array) -> None:
    """Raise unless all are floating arrays [batch, time, heads, size].

    Raises:
        ValueError: a shape is wrong: the message names all arrays and their shapes. Or
            a type is wrong: the message names the array.
    """
    check_floating(who, **arrays)
    if any(x.ndim != 4 or x.shape[2] == 0 for x in arrays.values()):
        shapes = ", ".join(str(x.shape) for x in arrays.values())
        raise ValueError(
            f"{who}: {', '.join(arrays)} must be [batch, time, heads, size], heads not "
            f"0, got {shapes}"
        )


def check_heads(
    who: str,
    query: Array,
    key: Array,
    value: Array,
    *,
    branches: bool = False,
    signals: int = 1,
) -> None:
    """Raise if query, key and value do not fit together. The message has the shapes.

    Args:
        branches: a value head may belong to several key heads.
        signals: above 1, `check_groups` checks the numbers of heads instead.
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
    if key.shape[:2] != value.shape[:2] or (heads and signals == 1):
        refuse(
            "key and value must agree in batch, time and heads", key=key, value=value
        )
    if signals > 1:
        check_groups(who, query, key, value, signals)
    elif query.shape[2] % key.shape[2]:
        refuse("query heads must be a multiple of key heads", query=query, key=key)


def check_groups(
    who: str, query: Array, key: Array, value: Array, signals: int
) -> None:
    """Raise unless the heads fit grouped differential attention.

    The query heads are groups of `signals` signal heads and one noise head, whose map
    is subtracted from theirs. Key has a signal head for each value head. It has a noise
    head for each value head or for each noise head of query, whichever are fewer.

    Raises:
        ValueError: the numbers of heads do not fit. The message has the shapes.
    """
    groups, values = query.shape[2] // (signals + 1), value.shape[2]
    noise_keys = min(groups, values)
    shapes = f"got query {query.shape}, key {key.shape}, value {value.shape}"
    wanted = (
        "two query heads are needed for each head, and two key heads for each value "
        "head"
    )
    if signals > 1:
        wanted = (
            f"{signals} signal heads and a noise head are needed in each group, with "
            "a signal key for each value head and a noise key for each value head or "
            "group"
        )
    if query.shape[2] % (signals + 1) or key.shape[2] != values + noise_keys:
        raise ValueError(f"{who}: {wanted}, {shapes}")
    if max(groups, values) % noise_keys or signals * groups % values:
        raise ValueError(
            f"{who}: value heads must divide the {signals * groups} heads and divide, "
            f"or be a multiple of, the {groups} noise heads, {shapes}"
        )


def device_count(who: str, axis_name: str | None) -> int:
    """Return the number of devices that time is split over.

    Raises:
        ValueError: `axis_name` is no axis of a `jax.shard_map` around the call.
    """
    if axis_name is None:
        return 1
    try:
        return jax.lax.axis_size(axis_name)
    except (NameError, TypeError, ValueError):
        raise ValueError(
            f"{who}: axis_name must be a mesh axis of a jax.shard_map around the call, "
            f"got {shown(axis_name)}"
        ) from None
