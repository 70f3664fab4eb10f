"""symjax: a functional zoo of attention mechanisms for JAX.

docs/getting-started.md has a map of the folders. Files beside them:

validation.py  reading, checking and comparing configurations
starting.py    the first line of a program, printed before jax is imported
storage.py     local paths and buckets: resolve, download, upload
tables.py      tables as text
figures.py     figures by matplotlib
optional.py    imports of packages that may be missing
"""

from importlib import import_module
from importlib.metadata import version
from typing import Any

__version__ = "0.1.0"


def _release(package: str) -> tuple[int, ...]:
    return tuple(
        int(part) for part in version(package).split(".")[:3] if part.isdigit()
    )


# flax before 0.12.12 uses names that jax 0.11.1 removed, and pip reports no conflict.
if _release("jax") >= (0, 11, 1) and _release("flax") < (0, 12, 12):
    raise ImportError(
        f"jax {version('jax')} needs flax >= 0.12.12, found {version('flax')}: "
        "pip install --upgrade flax, or pip install 'jax<0.11'"
    )


_EXCHANGE = ("load", "load_pretrained", "save_pretrained")


def __getattr__(name: str) -> Any:
    """Import `symjax.attention` or a function such as `symjax.load` at its first use.

    `import symjax` itself does not load jax.
    """
    if name == "attention":
        return import_module("symjax.attention")
    if name in _EXCHANGE:
        return getattr(import_module("symjax.exchange"), name)
    raise AttributeError(f"module 'symjax' has no attribute {name!r}")
