"""Agreement among the processes of one run.

All processes run the same program, and if one enters a collective, all must enter it.
If only one process fails, for instance because it cannot read a file, the others must
learn of it, or they would wait for ever (`all_succeed`). If process 0 writes files
alone, the others must wait for it (`on_process_zero`, `process_zero_first`).

Messages are arrays of bytes, which jax's `multihost_utils` gathers over all devices.
With one process, the functions that take a task only call it.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from symjax.distributed.exit_codes import Refused, exit_of
from symjax.distributed.launch import is_distributed, is_process_zero

Result = TypeVar("Result")


def all_succeed(task: Callable[[], Result]) -> Result:
    """Run a task in every process, and return its result when all have succeeded.

    A task that uses collectives may fail only before its first collective, or in all
    processes.

    Raises:
        Refused: the task failed in some process with an error that `exit_of` knows.
            Other errors are raised only in the process that failed. With one process
            every error is raised as it is.
    """
    if not is_distributed():
        return task()
    result, failure, cause = None, None, None
    try:
        result = task()
    except Exception as error:
        failure, cause = exit_of(error), error
        if failure is None:
            raise
    for process, message in enumerate(allgather(json.dumps(failure))):
        if message != "null":
            exit_code, kind, reason = json.loads(message)
            who = f"process {process}: " if process else ""
            raise Refused(who + reason, exit_code=exit_code, kind=kind) from cause
    return result  # pyright: ignore[reportReturnType]


def on_process_zero(task: Callable[[], Result]) -> Result | None:
    """Run a task in process 0 only; the other processes wait for it and return None.

    The task must not use collectives.

    Raises:
        Refused: as `all_succeed`.
    """
    return all_succeed(lambda: task() if is_process_zero() else None)


def process_zero_first(task: Callable[[], Result]) -> Result:
    """Run a task in process 0, then in the others, which find the files it has made.

    The task must not use collectives.

    Raises:
        Refused: as `all_succeed`.
    """
    result = on_process_zero(task)
    return all_succeed(lambda: result if is_process_zero() else task())  # pyright: ignore


def check_same(**values: Any) -> None:
    """Check that named values are the same in all processes.

    Raises:
        Refused: a process has another value than process 0.
    """
    first, *others = map(json.loads, allgather(json.dumps(values)))
    for process, other in enumerate(others, 1):
        for name, value in first.items():
            if other[name] != value:
                raise Refused(
                    f"process {process} has {name} {other[name]!r}, process 0 "
                    f"{value!r}: all need one command and one shared --workdir"
                )


def allgather(text: str) -> list[str]:
    """Return the texts of all processes, in the order of the processes' numbers."""
    if not is_distributed():
        return [text]
    message = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(message.size))
    width = 2 ** int(sizes.max()).bit_length()  # few shapes, so few compilations
    padded = np.pad(message, (0, width - message.size))
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


def replicated() -> NamedSharding | None:
    """Return the sharding that puts a whole array on every device.

    With one process, return None, which means the default device.
    """
    if not is_distributed():
        return None
    return NamedSharding(Mesh(np.array(jax.devices()), ("every",)), P())


def to_host(tree: Any) -> Any:
    """Return a tree of whole arrays on the host, gathered from all processes.

    Only one array at a time is whole on the devices.
    """

    def whole(array: jax.Array) -> np.ndarray:
        if not array.is_fully_addressable:
            array = multihost_utils.process_allgather(array, tiled=True)
        return np.asarray(array)

    return jax.tree.map(whole, tree)
