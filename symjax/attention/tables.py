"""Tables that users may add to: mechanisms, feature maps and decays by name."""

from typing import Any

from symjax.attention.features import PLAIN
from symjax.attention.gated_linear import LOG_DECAYS
from symjax.attention.mechanisms import MECHANISMS
from symjax.attention.random_features import RANDOM_FEATURES

# Kind of name → the tables that have names of this kind.
TABLES: dict[str, tuple[dict[str, Any], ...]] = {
    "mechanism": (MECHANISMS,),
    "features": (PLAIN, RANDOM_FEATURES),
    "decay": (LOG_DECAYS,),
}
# Names of symjax itself, without those of users: this file is imported before any file
# of a user.
BUILT_IN = {
    kind: frozenset(name for table in tables for name in table)
    for kind, tables in TABLES.items()
}
