"""Tables that users may add to: mechanisms, feature maps and decays by name."""

from typing import Any

from symjax.attention.features import PLAIN, RANDOM
from symjax.attention.gated_linear import LOG_DECAYS
from symjax.attention.mechanisms import MECHANISMS

TABLES: dict[str, tuple[dict[str, Any], ...]] = {
    "mechanism": (MECHANISMS,),
    "features": (PLAIN, RANDOM),
    "decay": (LOG_DECAYS,),
}
# The names that symjax itself has: this file is imported before any code of a user.
BUILT_IN = {
    kind: frozenset(name for table in tables for name in table)
    for kind, tables in TABLES.items()
}
