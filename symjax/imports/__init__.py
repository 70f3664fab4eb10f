"""User code that adds mechanisms, feature maps and decays to the tables of symjax.

There are three ways to run such code: `--import FILE.py` or `--import PACKAGE.MODULE`
(`imports=` in Python); a configuration file that adds to the tables; and an installed
package with an entry point in the group `symjax.mechanisms`. Checkpoints store the
source text of the code that their model needs. Stored source runs only if the user asks
for it by `--import stored`.

`running` runs code and notes what the code adds. `sources` collects the source text of
code. `stored` compares the source in a checkpoint with the code of this process, or
runs it.
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
