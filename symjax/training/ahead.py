"""Batches that are made one step ahead, in a thread."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

ASK = 0.2  # seconds


class Ahead:
    """The batches of steps, each made while the step before it runs.

    A batch depends on its step alone, so a resumed run needs to know nothing of this.

    Args:
        make: step → its batch; what it raises, `take` raises.
        last: the last step.
    """

    def __init__(self, make: Callable[[int], Any], last: int):
        self._make, self._last = make, last
        self._pool = ThreadPoolExecutor(1, "batches")
        self._next: Future | None = None

    def take(self, step: int, stop: Callable[[], bool] = lambda: False) -> Any:
        """The batch of a step; that of the next one is begun.

        Args:
            stop: asked while the batch is not there, as one of a stream may not be.
        Returns:
            None if `stop` said so.
        """
        if self._next is None:
            self._next = self._pool.submit(self._make, step)
        while not wait([self._next], ASK).done:
            if stop():
                return None
        batch = self._next.result()
        more = step < self._last
        self._next = self._pool.submit(self._make, step + 1) if more else None
        return batch

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
