"""Ctrl-C and the signal of a scheduler end a run at the end of a step."""

import os
import signal
import threading
from types import FrameType
from typing import Any

import jax

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """A run was told to stop; the message says what was kept."""

    def __init__(self, number: signal.Signals, message: str):
        super().__init__(message)
        self.exit_code = 128 + number


class Interrupts:
    """Inside, the first signal is noted in `received`, and the second one stops.

    Several processes would stop at different steps, and a checkpoint needs them all:
    there, and outside the main thread, signals stay what they were.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        main = threading.current_thread() is threading.main_thread()
        if main and jax.process_count() == 1:
            self._before = {s: signal.signal(s, self._receive) for s in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        # print is not allowed to interrupt a print.
        os.write(2, b"\ninterrupted: saving after this step (again: stop at once)\n")
