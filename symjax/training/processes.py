"""What the processes of one run agree on.

Every process runs the same program, and most of it needs no care: a collective that
one of them enters, all enter. Care is needed where one may fail alone (a file that
only it cannot read), act alone (the first one writes the files), or be told something
alone (a signal). Then the others must hear of it, or they wait for ever.

Messages go through jax's coordination service, which has no time limit of a device's
collective, so that a process may prepare data for hours while the others wait. With
one process every function here does nothing but what it is given.
"""

import itertools
import json
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax._src import distributed  # the coordination service has no public face
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Result = TypeVar("Result")
DAY = 24 * 3600 * 1000  # milliseconds
NOTICE = "symjax/notice/"
_rounds = itertools.count()


class Refused(ValueError):
    """What one process could not do, raised in all; the first one prints it."""


def several() -> bool:
    """Whether this process has met others; asks no device."""
    return distributed.global_state.num_processes > 1


def is_first() -> bool:
    """Whether this process writes the files and the lines of the run."""
    return distributed.global_state.process_id == 0


def together(task: Callable[[], Result]) -> Result:
    """What `task` returns here, once it has succeeded in every process.

    It may use collectives if it fails in all processes or before the first of them.

    Raises:
        Refused: it raised ValueError or OSError in some process, or, with one
            process, the error itself.
    """
    if not several():
        return task()
    result, refusal, cause = None, "", None
    try:
        result = task()
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        refusal, cause = f"{error.strerror or error}{where}", error
    except ValueError as error:
        refusal, cause = str(error), error
    for process, said in enumerate(_exchange(refusal)):
        if said:
            who = f"process {process}: " if process else ""
            raise Refused(who + said) from cause
    return result  # pyright: ignore[reportReturnType]


def first(task: Callable[[], Result]) -> Result | None:
    """What `task` returns in the first process, None in the others, which wait for it.

    The task must not use collectives. Raises: as `together`.
    """
    return together(lambda: task() if is_first() else None)


def in_turn(task: Callable[[], Result]) -> Result:
    """`together`, the first process before the others: they find what it has made.

    The task must not use collectives.
    """
    if not several():
        return task()
    made = first(task)
    return together(lambda: made if is_first() else task())  # pyright: ignore


def check_same(**values: Any) -> None:
    """Raises: Refused: a named value is not that of the first process."""
    if not several():
        return
    first, *others = (json.loads(said) for said in _exchange(json.dumps(values)))
    for process, other in enumerate(others, 1):
        for name, value in first.items():
            if other[name] != value:
                raise Refused(
                    f"process {process} has {name} {other[name]!r}, process 0 "
                    f"{value!r}: all need one command and one shared --workdir"
                )


def everywhere() -> NamedSharding | None:
    """Whole arrays in every process; None, the default device, where there is one."""
    if not several():
        return None
    return NamedSharding(Mesh(np.array(jax.devices()), ("every",)), P())


def gathered(tree: Any) -> Any:
    """Whole arrays on the host, from all processes; one array at a time on a device."""

    def whole(array: jax.Array) -> np.ndarray:
        if not array.is_fully_addressable:
            array = multihost_utils.process_allgather(array, tiled=True)
        return np.asarray(array)

    return jax.tree.map(whole, tree)


class Notice:
    """A number that any process may give, and all act on after the same step.

    Whoever gives one names a step two later. Nobody gets there without it: to see the
    numbers of a step, which all processes take part in, each has passed the one before.
    One question to the coordinator a step, instead of a collective that would keep the
    next step waiting.
    """

    def __init__(self) -> None:
        self._given = False

    def due(self, step: int, number: int) -> int:
        """The number to act on after this step, or 0.

        Called once a step, when the numbers of the step before have been read.

        Args:
            number: 0 as long as there is none; the first other one counts.
        """
        state = distributed.global_state
        client: Any = state.client
        if number and not self._given:
            client.key_value_set(f"{NOTICE}{state.process_id}", f"{step + 2} {number}")
            self._given = True
        given = [said.split() for _, said in client.key_value_dir_get(NOTICE)]
        when, number = min((tuple(map(int, pair)) for pair in given), default=(0, 0))
        return number if step >= when else 0


def leave_alone(code: int) -> NoReturn:
    """Exit while the others may still be at work.

    At an ordinary exit jax waits until all processes are there, for minutes. Without
    it they notice at once, and fail at their next collective.
    """
    if several():
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    sys.exit(code)


def _exchange(text: str) -> list[str]:
    """What every process says, in their order."""
    state, here = distributed.global_state, f"symjax/{next(_rounds)}"
    client: Any = state.client
    client.key_value_set(f"{here}/{state.process_id}", text)
    client.wait_at_barrier(here, DAY)
    found = dict(client.key_value_dir_get(f"{here}/"))
    return [found[f"{here}/{process}"] for process in range(state.num_processes)]
