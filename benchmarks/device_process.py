"""A process that measures rows. If it hangs or dies, only its current row is lost."""

import multiprocessing
import signal
import sys
import time
from typing import Any

from device_rows import Row, Sizes

Found = dict[str, Any]


class Measuring:
    """The measuring process, which is restarted after a row that broke it.

    A row breaks the process if the process ends or hangs, or its device becomes
    unusable.
    """

    def __init__(self, sizes: Sizes):
        self.sizes = sizes
        self.start()

    def start(self) -> None:
        """Start the process.

        Raises:
            EOFError: it cannot start, and has printed why.
        """
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        arguments = (other, self.sizes)
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        other.close()
        self.device: str = self.connection.recv()

    def measure(self, row: Row, limit: float) -> Found:
        """Return the figures of a row, or its fault.

        Figures of the row itself are kept, even if a rival breaks the process.

        Args:
            limit: seconds after which the row is given up, with `late` in the result.
        """
        if not self.process.is_alive():
            self.start()
        began = time.monotonic()
        found: Found = {}
        reason = f"not finished after {limit:.0f} s"
        late = last = False
        try:
            self.connection.send((row, limit))
            while not (late or last):
                left = max(0.0, began + limit - time.monotonic())
                late = not self.connection.poll(left)
                if not late:
                    more, last = self.connection.recv()
                    found |= more
        except (EOFError, OSError):
            self.process.join()
            reason = f"ended its process, exit code {self.process.exitcode}"
        if not last:
            if found:
                found["rivals"] = {"others": {"missing": reason}}
            else:
                found = {"fault": reason} | ({"late": True} if late else {})
        if found.pop("lost", not last):
            self.end()
        return {"seconds": round(time.monotonic() - began, 1), **found}

    def end(self, seconds: float = 0) -> None:
        """End the process; give it time to stop trainings of the study."""
        if seconds:
            self.process.terminate()
            self.process.join(seconds)
        self.process.kill()
        self.process.join()


def serve(connection: Any, sizes: Sizes) -> None:
    """Measure the rows that the connection brings, until its other end closes."""
    import device_measure

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    connection.send(device_measure.device_kind())
    while True:
        try:
            row, seconds = connection.recv()
        except EOFError:
            return
        for found in device_measure.measure(row, sizes, seconds):
            connection.send((found, False))
        sys.stdout.flush()
        connection.send(({} if device_measure.healthy() else {"lost": True}, True))
