"""Trace of a few steps for XProf and TensorBoard, for instance log.profile=10:15."""

from pathlib import Path
from typing import Any

import jax

FOLDER = "profile"  # in the workdir


def steps_of(text: str, steps: int) -> tuple[int, int]:
    """Return the first and the last step of a text such as "10:15".

    An empty text returns (0, 0), which matches no step, since steps count from 1.

    Args:
        steps: number of steps of the run.
    Raises:
        ValueError: the text is no such pair, or begins after the last step.
    """
    first, colon, last = text.partition(":")
    if not text:
        return 0, 0
    digits = len(text) < 30 and first.isdecimal() and last.isdecimal()
    if not (colon and digits):
        raise ValueError(f"log.profile must be FIRST:LAST, got {text!r}")
    if not 1 <= int(first) <= int(last):
        raise ValueError(f"log.profile {text!r}: the steps count from 1, and in order")
    if int(first) > steps:
        raise ValueError(f"log.profile {text!r} begins after the last step, {steps}")
    return int(first), int(last)


class Profile:
    """Starts and ends the trace of a run, in every process.

    Raises:
        ValueError: as `steps_of`.
    """

    def __init__(self, text: str, steps: int, workdir: Path):
        self.first, self.last = steps_of(text, steps)
        self.folder = workdir / FOLDER
        self.running = False

    def before(self, step: int) -> None:
        """Start the trace before its first step, or where a run resumes within it."""
        if not self.running and self.first <= step <= self.last:
            jax.profiler.start_trace(self.folder)
            self.running = True

    def after(self, step: int, result: Any) -> None:
        """End the trace after its last step; wait for the result of this step first."""
        if self.running and step >= self.last:
            jax.block_until_ready(result)
            self.close()

    def close(self) -> None:
        """End the trace, if it has begun."""
        if self.running:
            jax.profiler.stop_trace()
            self.running = False
