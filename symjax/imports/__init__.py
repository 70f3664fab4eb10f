"""Code of users that adds mechanisms, feature maps and decays to the tables.

`--import FILE.py` or `--import PACKAGE.MODULE` runs it, a configuration file may add to
the tables itself, and an installed package does so by an entry point of the group
`symjax.mechanisms`. What a run needs of it is stored in its checkpoints as source text.
Stored source runs only where the user has said `--import stored`.
"""

from symjax.imports.running import (
    GROUP,
    SHOW,
    STORED,
    Words,
    load_installed,
    recorded,
    run_path,
    using,
)
from symjax.imports.stored import differences, require, serving, to_store, unaccounted

__all__ = [
    "GROUP",
    "SHOW",
    "STORED",
    "Words",
    "differences",
    "load_installed",
    "recorded",
    "require",
    "run_path",
    "serving",
    "to_store",
    "unaccounted",
    "using",
]
