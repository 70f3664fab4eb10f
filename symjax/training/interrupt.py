"""Ctrl-C and the signal of a scheduler end a run at the end of a step."""

import os
import signal
import threading
from types import FrameType
from typing import Any

from symjax.training import processes

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """A run was told to stop; the message says what was kept."""

    def __init__(self, number: signal.Signals, message: str):
        super().__init__(message)
        self.exit_code = 128 + number


class Interrupts:
    """Inside, the first signal is noted in `received`, and the second one stops.

    A checkpoint needs all processes after the same step, and a signal may reach one of
    them only: the others ask for it after every step. Outside the main thread, signals
    stay what they were.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._notice = processes.Notice() if processes.several() else None

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._receive) for s in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def stop(self, step: int) -> signal.Signals | None:
        """The signal to stop for after this step, the same one in every process.

        With several processes it is due two steps after it came.
        """
        if self._notice is None:
            return self.received
        number = self._notice.due(step, self.received or 0)
        return signal.Signals(number) if number else None

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        # print is not allowed to interrupt a print.
        os.write(2, b"\ninterrupted: saving after this step (again: stop at once)\n")
