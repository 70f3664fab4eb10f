"""What the processes of one run agree on.

Every process runs the same program, and most of it needs no care: a collective that
one of them enters, all enter. Care is needed where one may fail alone (a file that
only it cannot read), act alone (the first one writes the files), or be told something
alone (a signal). Then the others must hear of it, or they wait for ever.

Messages go through jax's coordination service, which has no time limit of a device's
collective, so that a process may prepare data for hours while the others wait. With
one process every function here does nothing but what it is given.
"""

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax._src import distributed  # the coordination service has no public face
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from symjax.training import meeting
from symjax.training.ending import Refused, ending

Result = TypeVar("Result")
DAY = 24 * 3600 * 1000  # milliseconds
PATIENCE = 1  # second
NOTICE = "symjax/notice/"
_rounds = itertools.count()


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
        Refused: it failed in some process for a reason that `ending` knows, or, with
            one process, the error itself. A fault of ours passes, and ends all.
    """
    if not several():
        return task()
    result, failed, cause = None, None, None
    try:
        result = task()
    except Exception as error:
        failed, cause = ending(error, several=True), error
        if failed is None:
            raise
    for process, said in enumerate(exchanged(json.dumps(failed))):
        if said != "null":
            exit_code, kind, reason = json.loads(said)
            who = f"process {process}: " if process else ""
            raise Refused(who + reason, exit_code=exit_code, kind=kind) from cause
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
    first, *others = map(json.loads, exchanged(json.dumps(values)))
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


def leave_together(exit_code: int, line: str) -> NoReturn:
    """Exit for a reason that is the same in all; the first one says it."""
    if line and is_first():
        print(line, file=sys.stderr)
    meeting.farewell()
    sys.exit(exit_code)


def leave_alone(exit_code: int, line: str) -> NoReturn:
    """Exit while the others are still at work: they are told, and end too.

    At an ordinary exit jax would wait until all processes are there, for minutes.
    """
    if several():
        try:
            # Where another one is gone, that was the cause: `meeting` says so instead.
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(PATIENCE)
            process = distributed.global_state.process_id
            meeting.give_up(f"process {process} ended: {line}")
            print(line, file=sys.stderr, end="\n" if line else "")
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        finally:  # also where nobody reads them any more, or a signal comes
            os._exit(exit_code)
    if line:
        print(line, file=sys.stderr)
    sys.exit(exit_code)


def exchanged(text: str) -> list[str]:
    """What every process says, in their order."""
    if not several():
        return [text]
    state, here = distributed.global_state, f"symjax/{next(_rounds)}"
    client: Any = state.client
    client.key_value_set(f"{here}/{state.process_id}", text)
    client.wait_at_barrier(here, DAY)
    found = dict(client.key_value_dir_get(f"{here}/"))
    return [found[f"{here}/{process}"] for process in range(state.num_processes)]
