"""Exit code and message of a run for each kind of error.

`exit_of` maps an exception to an `Exit`. `run_and_exit` runs a program, and ends the
process with the exit of the exception that the program raises.
"""

import contextlib
import io
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NamedTuple, NoReturn

import jax

from symjax.distributed.launch import is_distributed, is_process_zero


class Interrupted(Exception):
    """End of a run after a signal; the message says what was saved."""

    def __init__(self, number: signal.Signals, message: str):
        super().__init__(message)
        self.exit_code = 128 + number


class Stopped(KeyboardInterrupt):
    """Signal that interrupts the program at once, wherever it is."""

    def __init__(self, number: signal.Signals):
        super().__init__()
        self.number = number


class Refused(ValueError):
    """Failure of one process, raised in all processes; process 0 prints it."""

    def __init__(self, reason: str, *, exit_code: int = 2, kind: str = "error"):
        super().__init__(reason)
        self.exit_code = exit_code
        self.kind = kind


# Exceptions that all processes raise together.
AGREED = (Refused, FloatingPointError, Interrupted)
OUT_OF_MEMORY = re.compile("RESOURCE_EXHAUSTED|Out of memory")
STATUS = re.compile("(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED): ")
LONG_WORD = re.compile(r"(\S{100})\S{200,}(\S{20})")  # shortened in messages


class Exit(NamedTuple):
    """Exit code of a process, and its last line: "kind: reason"."""

    exit_code: int
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


def exit_of(error: BaseException) -> Exit | None:
    """Return the exit of an expected error; None for an error that is a bug."""
    reason = LONG_WORD.sub(r"\1…\2", " ".join(str(error).split()))
    match error:
        case Refused():
            return Exit(error.exit_code, error.kind, reason)
        case _ if lost_connection(error):
            line = str(error).splitlines()[0]
            cause = f"another process or its connection has failed ({line})"
            return Exit(1, "stopped", cause)
        case ValueError():
            return Exit(2, "error", reason)
        case OSError():
            where = f": {error.filename}" if error.filename else ""
            return Exit(2, "error", f"{error.strerror or reason}{where}")
        case FloatingPointError():
            return Exit(1, "stopped", reason)
        case MemoryError():
            return Exit(1, "stopped", f"out of memory ({reason})")
        case jax.errors.JaxRuntimeError() if OUT_OF_MEMORY.search(reason):
            line = str(error).splitlines()[0]
            return Exit(1, "stopped", f"out of memory ({line})")
        case Interrupted():
            return Exit(error.exit_code, "interrupted", reason)
        case KeyboardInterrupt():
            number = error.number if isinstance(error, Stopped) else signal.SIGINT
            return Exit(128 + number, "interrupted", "nothing more was saved")
    return None


def lost_connection(error: BaseException) -> bool:
    """Return whether an error means that another process has ended.

    Such an error comes from a collective or from jax's coordination service. On CPUs
    gloo runs the collectives, and its errors are ValueErrors.
    """
    if isinstance(error, jax.errors.JaxRuntimeError):
        return is_distributed() and not OUT_OF_MEMORY.search(str(error))
    status = STATUS.match(str(error)) if isinstance(error, ValueError) else None
    return status is not None and is_distributed()


def run_and_exit(run: Callable[[], None]) -> NoReturn:
    """Run a program, and exit with a code and one line on stderr if it fails.

    If all processes end for the same reason, process 0 prints it. For an unexpected
    error the traceback is printed.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # some terminals cannot encode λ
            stream.reconfigure(errors="replace")
    with _sigterm_raises():
        exit_code, line, agreed = 0, "", True
        try:
            run()
            sys.stdout.flush()
        except BrokenPipeError:  # the reader closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            exit_code, agreed = 1, False
        except (Exception, KeyboardInterrupt) as error:
            found, agreed = exit_of(error), isinstance(error, AGREED)
            if found is None and not is_distributed():
                raise
            exit_code = found.exit_code if found else 1
            line = str(found) if found else traceback.format_exc()
        if not agreed:
            exit_at_once(exit_code, line)
        if line and is_process_zero():
            print(line, file=sys.stderr)
        sys.exit(exit_code)


def exit_at_once(exit_code: int, line: str) -> NoReturn:
    """Print a line and exit without waiting for the other processes; jax ends them.

    At an ordinary exit jax would wait for them for minutes.
    """
    try:
        if line:
            print(line, file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:  # even if the streams are closed or a signal arrives
        if is_distributed():
            os._exit(exit_code)
    sys.exit(exit_code)


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Raise `Stopped` in the block at SIGTERM, as Ctrl-C raises KeyboardInterrupt."""

    def end(number: int, _: FrameType | None) -> None:
        raise Stopped(signal.Signals(number))

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def print_warning(line: str) -> None:
    """Print a line on stderr at once."""
    print(line, file=sys.stderr, flush=True)
