"""Values that follow from the keys of a run or of its model."""

from __future__ import annotations

from symjax.config.model import Model
from symjax.config.run import Config


def scheduled_steps(options: Config) -> int:
    """Return the number of steps that the schedule counts: all after the transfer."""
    return options.steps - options.transfer.steps


def is_causal(model: Model) -> bool:
    """Return whether a token sees only itself and the tokens before it."""
    return model.kind != "encoder"


def mechanism_of(model: Model, depth: int) -> str:
    """Return the mechanism of the block at `depth`, counted from 0."""
    if model.pattern:
        return model.pattern[depth % len(model.pattern)]
    return model.attention.mechanism


def mechanisms_of(model: Model) -> tuple[str, ...]:
    """Return the mechanisms of a model: its pattern, or the one of all blocks."""
    return model.pattern or (model.attention.mechanism,)


def attention_of(model: Model) -> str:
    """Return the attention of a model in words.

    For instance: softmax, symmetric plain, differential v1.
    """
    chosen = model.attention
    words = [" and ".join(dict.fromkeys(mechanisms_of(model)))]
    for name in ("symmetric", "differential"):
        if (value := getattr(chosen, name)) != "none":
            words.append(f"{name} {value}")
    if chosen.signals > 1:
        words[-1] += f" with {chosen.signals} signals"
    return ", ".join(words)
