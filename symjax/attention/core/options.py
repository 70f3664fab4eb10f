"""Options that a mechanism declares itself, in addition to those of every model."""

import math
from numbers import Integral, Real
from typing import Any, NamedTuple


class Option(NamedTuple):
    """Option of one mechanism: the key model.attention.options.NAME of a run.

    Attributes:
        default: a bool, an int, a float or a str; all values have its type.
        meaning: one line for --help.
        choices: the allowed words; empty means any.
        least, most: limits of a number, inclusive.
    """

    default: bool | int | float | str
    meaning: str
    choices: tuple[str, ...] = ()
    least: float = -math.inf
    most: float = math.inf

    def checked(self, name: str, value: Any) -> Any:
        """Return the value with the type of the default.

        Raises:
            ValueError: the value has another type, is not among the choices, or is
                outside the limits. The message begins with `name`.
        """
        kind = type(self.default)
        number = {int: Integral, float: Real}.get(kind)
        if number and isinstance(value, number) and not isinstance(value, bool):
            value = kind(value)
        if type(value) is not kind:
            raise ValueError(f"{name} must be {kind.__name__}, got {value!r}")
        if self.choices and value not in self.choices:
            choices = ", ".join(self.choices)
            raise ValueError(f"{name} {value!r} is unknown: choose from {choices}")
        if isinstance(value, int | float) and not self.least <= value <= self.most:
            limits = f"in [{self.least:g}, {self.most:g}]"
            raise ValueError(f"{name} must be {limits}, got {value}")
        return value


def chosen(
    who: str, declared: dict[str, Option], given: dict[str, Any]
) -> tuple[tuple[str, Any], ...]:
    """Return the (name, value) pairs of all declared options, as a hashable tuple.

    Args:
        who: name of the mechanism, for messages.
        declared: options of the mechanism.
        given: values by name; options that are missing have their default.

    Raises:
        TypeError: an option is not declared, as for any unknown keyword.
        ValueError: a value is wrong.
    """
    for name in given:
        if name not in declared:
            raise TypeError(f"{who}() got an unexpected keyword argument {name!r}")
    return tuple(
        (name, option.checked(f"{who}: {name}", given.get(name, option.default)))
        for name, option in declared.items()
    )
