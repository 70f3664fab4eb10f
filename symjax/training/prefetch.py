"""Prefetch: the batch of a step is made while the step before it runs."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

POLL = 0.2  # seconds between two calls of `stop` while a batch is not ready


def prefetch(
    pool: ThreadPoolExecutor,
    make: Callable[[int], Any],
    first: int,
    last: int,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Any]:
    """Yield the batches of steps first … last, each made one step ahead in `pool`.

    A batch depends only on its step, so a resumed run needs no state of this iterator.

    Args:
        make: returns the batch of a step. Its exceptions are raised when the batch is
            due.
        stop: called repeatedly while a batch is not ready, for instance while a stream
            is slow. If it returns True, None is yielded.
    """
    future = pool.submit(make, first)
    for step in range(first, last + 1):
        while not wait([future], POLL).done:
            if stop():
                yield None
        batch = future.result()
        if step < last:
            future = pool.submit(make, step + 1)
        yield batch
