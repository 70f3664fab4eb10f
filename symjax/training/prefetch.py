"""Batches that are made while the step before them runs."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

ASK = 0.2  # seconds between the questions whether to stop waiting for a batch


def ahead(
    pool: ThreadPoolExecutor,
    make: Callable[[int], Any],
    first: int,
    last: int,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Any]:
    """The batches of steps first … last, each made while the step before it runs.

    A batch depends on its step alone, so a resumed run needs to know nothing of this.

    Args:
        make: step → its batch; what it raises is raised where the batch is taken.
        stop: asked while a batch is not there, as one of a stream may not be; None
            comes in its place if it says so.
    """
    made = pool.submit(make, first)
    for step in range(first, last + 1):
        while not wait([made], ASK).done:
            if stop():
                yield None
        batch = made.result()
        if step < last:
            made = pool.submit(make, step + 1)
        yield batch
