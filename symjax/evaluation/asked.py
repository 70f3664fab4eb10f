"""What people may ask of an evaluation, the same for every task."""

from typing import NamedTuple


class Asked(NamedTuple):
    """
    Attributes:
        batches: of held-out text, each of the batch size in training; None is all.
        prompt: text to go on from; None is the first words of the held-out text.
        tokens: to write.
        temperature: of the sample; 0 takes the likeliest token.
        seed: of the sample and of whatever else is drawn.
    """

    batches: int | None = None
    prompt: str | None = None
    tokens: int = 200
    temperature: float = 0.8
    seed: int = 0
