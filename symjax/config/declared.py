"""Options that mechanisms declare themselves: names, defaults and values."""

from __future__ import annotations

from typing import Any

from symjax.config.derived import mechanisms_of
from symjax.config.keys import OwnOptions
from symjax.config.model import Model


def declared_options(model: Model) -> dict[str, Any]:
    """Return the options that the mechanisms of a model declare, by name.

    Each is an `attention.Option`.

    Raises:
        ValueError: two mechanisms declare one name differently.
    """
    from symjax.attention import MECHANISMS

    found: dict[str, Any] = {}
    for mechanism in mechanisms_of(model):
        for name, option in MECHANISMS[mechanism].declared.items():
            if found.setdefault(name, option) != option:
                raise ValueError(
                    f"model.attention.options.{name} is declared in two ways by the "
                    f"mechanisms {', '.join(model.pattern)}: rename it in one"
                )
    return found


def own_options(model: Model) -> OwnOptions:
    """Return the values of `declared_options`: those of the model, or the defaults.

    Raises:
        ValueError: a value is wrong, or no mechanism of the model has the option.
    """
    known, values = declared_options(model), model.attention.options
    for name, value in values.items():
        if name not in known:
            mechanisms = ", ".join(mechanisms_of(model))
            raise ValueError(
                f"model.attention.options.{name} {value!r}: {mechanisms} has no such "
                "option"
            )
    return OwnOptions(
        {
            name: option.checked(
                f"model.attention.options.{name}", values.get(name, option.default)
            )
            for name, option in known.items()
        }
    )
