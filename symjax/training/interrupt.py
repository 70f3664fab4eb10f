"""Ctrl-C and the signal of a scheduler end a run where nothing is lost."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from symjax.training import processes
from symjax.training.ending import Interrupted, Stopped

SIGNALS = (signal.SIGINT, signal.SIGTERM)
EARLY = "no step was made, the same command starts again"
GRACE = 2  # seconds that a second signal leaves for an orderly end


@contextlib.contextmanager
def told_to_end() -> Iterator[None]:
    """Inside, SIGTERM ends the program as Ctrl-C does: at once, with a line."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, _: FrameType | None) -> None:
    raise Stopped(signal.Signals(number))


class Interrupts:
    """Inside, the first signal is noted in `received`, and the second one stops.

    A run ends before its first step or after one of them. A checkpoint needs all
    processes after the same step, and a signal may reach one of them only: the others
    ask for it. Outside the main thread, signals stay what they were.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._notice = processes.Notice() if processes.several() else None
        self._anywhere = False
        self._what = "ending before the first step"
        self._left = threading.Event()

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._heard, self._ear = socket.socketpair()
            self._ear.setblocking(False)
            self._fd_before = signal.set_wakeup_fd(self._ear.fileno())
            threading.Thread(target=self._insist, daemon=True).start()
            self._before = {s: signal.signal(s, self._receive) for s in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before:
            signal.set_wakeup_fd(self._fd_before)
            self._ear.close()

    def check(self) -> None:
        """Raises: Interrupted: a signal has come to some process before the steps."""
        number = max(map(int, processes.exchanged(str(int(self.received or 0)))))
        if number:
            raise Interrupted(signal.Signals(number), EARLY)

    @contextlib.contextmanager
    def anywhere(self) -> Iterator[None]:
        """Inside, all is undone by itself, and a signal ends the block at once.

        Raises: Interrupted: it did.
        """
        self._anywhere = True
        try:
            if self.received is not None:
                raise Stopped(self.received)
            yield
        except Stopped as error:
            raise Interrupted(error.number, EARLY) from None
        finally:
            self._anywhere = False

    @contextlib.contextmanager
    def steps(self) -> Iterator[None]:
        """Inside, `stop` is asked after every step. Raises: as `check`."""
        self._what = "saving after this step"
        self.check()
        yield

    def stop(self, step: int) -> signal.Signals | None:
        """The signal to stop for after this step, the same one in every process.

        With several processes it is due two steps after it came.
        """
        if self._notice is None:
            return self.received
        number = self._notice.due(step, self.received or 0)
        return signal.Signals(number) if number else None

    def _receive(self, number: int, _: FrameType | None) -> None:
        again, self.received = self.received is not None, signal.Signals(number)
        if again or self._anywhere:
            raise Stopped(self.received)
        # print is not allowed to interrupt a print.
        os.write(2, f"\ninterrupted: {self._what} (again: stop at once)\n".encode())

    def _insist(self) -> None:
        """End at a second signal where Python hears none: a compiler, a collective."""
        count = 0
        while number := self._heard.recv(1):
            count += number[0] in SIGNALS
            if count == 2 and not self._left.wait(GRACE):
                os.write(2, b"interrupted: nothing more was saved\n")
                os._exit(128 + number[0])
        self._heard.close()
