"""Score mechanisms: their shared call, and the engine that runs blocks of rows."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return `ScoreMechanism`, which users' files may still import from here."""
    if name == "ScoreMechanism":
        from symjax.attention.scores.mechanism import ScoreMechanism

        return ScoreMechanism
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
