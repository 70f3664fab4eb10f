"""Optional packages, imported when they are needed."""

import importlib
from typing import Any


def needed(package: str, message: str) -> Any:
    """Import a package and return it.

    Raises:
        ValueError: the package cannot be imported; the text is `message`.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(message) from error
