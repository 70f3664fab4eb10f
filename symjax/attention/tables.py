"""Tables that users may add to: mechanisms, feature maps and decays by name."""

from typing import Any

from symjax.attention.features import PLAIN
from symjax.attention.gated_linear import LOG_DECAYS
from symjax.attention.mechanisms import MECHANISMS
from symjax.attention.random_features import RANDOM_FEATURES

TABLES: dict[str, tuple[dict[str, Any], ...]] = {
    "mechanism": (MECHANISMS,),
    "features": (PLAIN, RANDOM_FEATURES),
    "decay": (LOG_DECAYS,),
}
# The names that symjax itself has: this file is imported before any code of a user.
BUILT_IN = {
    kind: frozenset(name for table in tables for name in table)
    for kind, tables in TABLES.items()
}
