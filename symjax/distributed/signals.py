"""Handlers of SIGINT and SIGTERM that let a run save its last step before it ends."""

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
EARLY = "no new step was made, the same command starts again"
GRACE = 2  # seconds for an orderly end after a second signal


class Interrupts:
    """Signal handlers of a run, as a context manager.

    With one process, the first signal (SIGINT or SIGTERM) is stored in `received`:

    - during the steps the run completes the steps that it has started, saves and ends.
      These are up to two, since jax runs steps asynchronously;
    - while the run waits for a batch it saves the last step and ends;
    - before the first step it ends without a checkpoint.

    A second signal ends the run at once. Outside the main thread no handlers are
    installed.

    With several processes jax handles SIGTERM. It tells all processes, and they agree
    on the step that they save and end at. SIGINT (Ctrl-C) ends one process at once,
    without a checkpoint. The others then end because this process is gone.
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
        """Return the signal that ends the run after this step; None if there is none.

        All processes must call this method at the same places of the program: then the
        result is the same in all. With several processes a signal is returned about a
        second after it was sent.
        """
        if not is_distributed():
            return self.received
        if multihost_utils.reached_preemption_sync_point(next(self._calls)):
            return signal.SIGTERM
        return None

    def check(self) -> None:
        """End the run if a signal came before the first step.

        Raises:
            Interrupted: a signal came.
        """
        if number := self.due():
            raise Interrupted(number, EARLY)

    def begin_steps(self) -> None:
        """Begin the steps of training; `due` is called after each of them.

        Raises:
            Interrupted: as `check`.
        """
        self._what = "saving after this step"
        self.check()

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Let the first signal end the block at once, because nothing needs saving.

        Raises:
            Interrupted: a signal came.
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
        """Store the signal, and raise `Stopped` if it is the second or in `at_once`."""
        again, self.received = self.received is not None, signal.Signals(number)
        if again or self._at_once:
            raise Stopped(self.received)
        # os.write, since a print in a handler may interrupt another print and fail.
        os.write(2, f"\ninterrupted: {self._what} (again: stop at once)\n".encode())

    def _end_at_second(self, reader: socket.socket) -> None:
        """End the process at a second signal, if its handler does not end it in time.

        Python runs no handlers inside a long call into C, such as the compiler. The
        wakeup file descriptor receives the numbers of signals even then.
        """
        count = 0
        while number := reader.recv(1):
            count += number[0] in SIGNALS
            if count == 2 and not self._exited.wait(GRACE):
                os.write(2, b"interrupted: nothing more was saved\n")
                os._exit(128 + number[0])
        reader.close()
