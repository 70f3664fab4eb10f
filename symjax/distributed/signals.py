"""SIGINT and SIGTERM: a run ends after a step, once that step is saved."""

import contextlib
import itertools
import os
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType

from jax.experimental import multihost_utils

from symjax.distributed.exit_codes import Interrupted, Stopped
from symjax.distributed.launch import is_distributed

SIGNALS = (signal.SIGINT, signal.SIGTERM)
EARLY = "no step was made, the same command starts again"
GRACE = 2  # seconds that a second signal leaves for an orderly end


class Interrupts:
    """Inside, the first signal is noted in `received`, and the second one stops.

    A run ends before its first step or after one of them. With several processes jax
    takes SIGTERM, tells all of them, and they agree on the step; Ctrl-C then ends one
    process at once, without a checkpoint, and so all. Outside the main thread, signals
    stay what they were.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._restore = contextlib.ExitStack()
        self._calls = itertools.count(1)
        self._at_once = False
        self._what = "ending before the first step"
        self._exited = threading.Event()

    def __enter__(self) -> "Interrupts":
        main = threading.current_thread() is threading.main_thread()
        if main and not is_distributed():
            reader, writer = socket.socketpair()
            writer.setblocking(False)
            self._restore.callback(writer.close)
            wakeup = signal.set_wakeup_fd(writer.fileno())
            self._restore.callback(signal.set_wakeup_fd, wakeup)
            threading.Thread(
                target=self._end_at_second, args=[reader], daemon=True
            ).start()
            for number in SIGNALS:
                handler = signal.signal(number, self._receive)
                self._restore.callback(signal.signal, number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        self._exited.set()
        self._restore.close()

    def due(self) -> signal.Signals | None:
        """The signal to end for now, the same one in every process.

        All processes ask equally often: once after every step, and some times before.
        With several, the answer comes about a second after the signal.
        """
        if not is_distributed():
            return self.received
        if multihost_utils.reached_preemption_sync_point(next(self._calls)):
            return signal.SIGTERM
        return None

    def check(self) -> None:
        """Raises: Interrupted: a signal has come before the first step."""
        if number := self.due():
            raise Interrupted(number, EARLY)

    def begin_steps(self) -> None:
        """From here on `due` is asked after every step. Raises: as `check`."""
        self._what = "saving after this step"
        self.check()

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, a signal ends the block at once: it leaves nothing to clean up.

        Raises: Interrupted: it did.
        """
        self._at_once = True
        try:
            if self.received is not None:
                raise Stopped(self.received)
            yield
        except Stopped as error:
            raise Interrupted(error.number, EARLY) from None
        finally:
            self._at_once = False

    def _receive(self, number: int, _: FrameType | None) -> None:
        again, self.received = self.received is not None, signal.Signals(number)
        if again or self._at_once:
            raise Stopped(self.received)
        # print is not allowed to interrupt a print.
        os.write(2, f"\ninterrupted: {self._what} (again: stop at once)\n".encode())

    def _end_at_second(self, reader: socket.socket) -> None:
        """End at a second signal where Python handles none, as in a compiler."""
        count = 0
        while number := reader.recv(1):
            count += number[0] in SIGNALS
            if count == 2 and not self._exited.wait(GRACE):
                os.write(2, b"interrupted: nothing more was saved\n")
                os._exit(128 + number[0])
        reader.close()
