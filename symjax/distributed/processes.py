"""What the processes of one run agree on.

All run the same program, and a collective that one of them enters, all enter. Care is
needed where one may fail alone (a file that only it cannot read) or act alone (process
0 writes the files): the others must be told, or they block.

Messages are arrays of bytes, gathered over all devices by jax's `multihost_utils`. With
one process every function here does nothing but what it is given.
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
    """What `task` returns here, once it has succeeded in every process.

    It may use collectives if it fails in all processes or before the first of them.

    Raises:
        Refused: it failed in some process for a reason that `exit_of` knows, or, with
            one process, the error itself. Any other error ends this process alone.
    """
    if not is_distributed():
        return task()
    result, failed, cause = None, None, None
    try:
        result = task()
    except Exception as error:
        failed, cause = exit_of(error), error
        if failed is None:
            raise
    for process, said in enumerate(allgather(json.dumps(failed))):
        if said != "null":
            exit_code, kind, reason = json.loads(said)
            who = f"process {process}: " if process else ""
            raise Refused(who + reason, exit_code=exit_code, kind=kind) from cause
    return result  # pyright: ignore[reportReturnType]


def on_process_zero(task: Callable[[], Result]) -> Result | None:
    """What `task` returns in process 0, None in the others, which wait for it.

    The task must not use collectives. Raises: as `all_succeed`.
    """
    return all_succeed(lambda: task() if is_process_zero() else None)


def process_zero_first(task: Callable[[], Result]) -> Result:
    """`all_succeed`, process 0 before the others: they find what it has made.

    The task must not use collectives.
    """
    made = on_process_zero(task)
    return all_succeed(lambda: made if is_process_zero() else task())  # pyright: ignore


def check_same(**values: Any) -> None:
    """Raises: Refused: a named value is not that of the first process."""
    first, *others = map(json.loads, allgather(json.dumps(values)))
    for process, other in enumerate(others, 1):
        for name, value in first.items():
            if other[name] != value:
                raise Refused(
                    f"process {process} has {name} {other[name]!r}, process 0 "
                    f"{value!r}: all need one command and one shared --workdir"
                )


def allgather(text: str) -> list[str]:
    """What every process says, in their order."""
    if not is_distributed():
        return [text]
    said = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(said.size))
    width = 2 ** int(sizes.max()).bit_length()  # few shapes, so few programs
    padded = np.pad(said, (0, width - said.size))
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


def replicated() -> NamedSharding | None:
    """Whole arrays in every process; None, the default device, where there is one."""
    if not is_distributed():
        return None
    return NamedSharding(Mesh(np.array(jax.devices()), ("every",)), P())


def to_host(tree: Any) -> Any:
    """Whole arrays on the host, from all processes; one array at a time on a device."""

    def whole(array: jax.Array) -> np.ndarray:
        if not array.is_fully_addressable:
            array = multihost_utils.process_allgather(array, tiled=True)
        return np.asarray(array)

    return jax.tree.map(whole, tree)
