"""Packages that only some uses need."""

import importlib
from typing import Any


def needed(package: str, message: str) -> Any:
    """The package, imported. Raises: ValueError: it is not installed: `message`."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(message) from error
