"""Declaration of a key and of a group of keys."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable
from typing import Any

LARGEST = 2**31 - 1  # largest value of a number: it fits into 32 bits


def key(
    default: Any,
    meaning: str,
    choices: tuple[str, ...] | Callable[[], tuple[str, ...]] = (),
    *,
    least: float = -math.inf,
    most: float = LARGEST,
    former: dict[Any, Any] | None = None,
) -> Any:
    """Declare one key: its default, its meaning, and the values that it may take.

    Args:
        least, most: limits of a number.
        former: value of older configurations → present value.
    """
    return dataclasses.field(
        default=default,
        metadata={
            "meaning": meaning,
            "choices": choices,
            "least": least,
            "most": most,
            "former": former or {},
        },
    )


class OwnOptions(dict[str, Any]):
    """Values of the options that mechanisms declare, by name.

    It is hashable, because layers hold it as static data.
    """

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(frozenset(self.items()))


class Keys:
    """Group of keys.

    An int becomes a float if the key is a float (clip=0). A value of older
    configurations becomes the present value (`key(…, former=…)`).
    """

    def __repr__(self) -> str:
        """Return the keys that differ from their defaults."""
        fields = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        values = [(x, getattr(self, x.name)) for x in fields]
        shown = [f"{x.name}={value!r}" for x, value in values if value != x.default]
        return f"{type(self).__name__}({', '.join(shown)})"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            value = getattr(self, field.name)
            if field.type == "float" and type(value) is int:
                object.__setattr__(self, field.name, float(value))
            elif field.type == "tuple[float, float]" and type(value) is tuple:
                pair = tuple(float(x) if type(x) is int else x for x in value)
                object.__setattr__(self, field.name, pair)
            elif field.type == "OwnOptions" and type(value) is dict:
                object.__setattr__(self, field.name, OwnOptions(value))
            elif (former := field.metadata.get("former")) and (
                isinstance(value, Hashable) and value in former
            ):
                object.__setattr__(self, field.name, former[value])
