"""Score mechanisms: their shared call, and the engine that runs blocks of rows.

mechanism.py   the public call of all score mechanisms
arguments.py   its arguments, and their checks
adjustment.py  forget gates, sinks and learned laws of length
rows.py        the engine: blocks of query rows in XLA
windows.py     the engine for windows with two bounds
ring.py        ring attention: keys travel from device to device
rotation.py    rotation of pairs of features, for RoPE
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return `ScoreMechanism`, which users' files may still import from here."""
    if name == "ScoreMechanism":
        from symjax.attention.scores.mechanism import ScoreMechanism

        return ScoreMechanism
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
