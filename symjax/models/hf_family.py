"""What the kinds of models of Hugging Face have in common that we read and write."""

from collections.abc import Callable
from typing import Any, NamedTuple

from symjax import config


class Family(NamedTuple):
    """Kinds of models: their settings are ours, and their tensors our weights.

    Attributes:
        options: their settings → our configuration; raises a ValueError for what our
            decoder does not have.
        settings: the inverse, for a configuration that `options` could have made.
        shapes: our configuration → their tensors' names and shapes.
        params: (tensors, our configuration) → our parameters.
        tensors: the inverse.
    """

    options: Callable[[dict[str, Any]], config.Model]
    settings: Callable[[config.Model], dict[str, Any]]
    shapes: Callable[[config.Model], dict[str, tuple[int, ...]]]
    params: Callable[[dict[str, Any], config.Model], dict[str, Any]]
    tensors: Callable[[dict[str, Any], config.Model], dict[str, Any]]


def check_settings(settings: dict[str, Any], only: dict[str, Any]) -> None:
    """Raises: ValueError: a setting is not the only value that our decoder has."""
    for name, wanted in only.items():
        if settings.get(name, wanted) != wanted:
            raise ValueError(
                f"config.json: {name} must be {wanted!r}, got {settings[name]!r}"
            )


def check_needed(settings: dict[str, Any], *names: str) -> None:
    """Raises: ValueError: a setting is missing, or no whole number above 0."""
    for name in names:
        if name not in settings:
            raise ValueError(f"config.json: {name} is missing")
        if type(settings[name]) is not int or settings[name] < 1:
            raise ValueError(
                f"config.json: {name} must be a whole number above 0, got "
                f"{settings[name]!r}"
            )
