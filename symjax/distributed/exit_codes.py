"""How a run ends: the exit code and the line that belong to each kind of error."""

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
    """A run was told to stop; the message says what was kept."""

    def __init__(self, number: signal.Signals, message: str):
        super().__init__(message)
        self.exit_code = 128 + number


class Stopped(KeyboardInterrupt):
    """A signal, raised wherever the program is."""

    def __init__(self, number: signal.Signals):
        super().__init__()
        self.number = number


class Refused(ValueError):
    """What one process could not do, raised in all; the first one prints it."""

    def __init__(self, reason: str, *, exit_code: int = 2, kind: str = "error"):
        super().__init__(reason)
        self.exit_code = exit_code
        self.kind = kind


AGREED = (Refused, FloatingPointError, Interrupted)  # raised in all processes at once
OUT_OF_MEMORY = re.compile("RESOURCE_EXHAUSTED|Out of memory")
STATUS = re.compile("(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED): ")
LONG = re.compile(r"(\S{100})\S{200,}(\S{20})")  # a word that no line shows whole


class Exit(NamedTuple):
    exit_code: int
    kind: str  # the first word of the line
    reason: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


def exit_of(error: BaseException) -> Exit | None:
    """What an error means for a run; None for one that symjax does not expect."""
    reason = LONG.sub(r"\1…\2", " ".join(str(error).split()))
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
    """Whether a collective or the coordination service failed because another
    process is gone; gloo's errors come as ValueErrors."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return is_distributed() and not OUT_OF_MEMORY.search(str(error))
    status = STATUS.match(str(error)) if isinstance(error, ValueError) else None
    return status is not None and is_distributed()


def run_and_exit(run: Callable[[], None]) -> NoReturn:
    """Run, and exit with the code that belongs to its end and one line on stderr.

    Of several processes that end for one reason, the first prints it. An error that
    symjax does not expect shows where it is by its traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not every terminal can write λ
            stream.reconfigure(errors="replace")
    with _told_to_end():
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
    """Exit, of several processes while the others are at work: jax will end them.

    At an ordinary exit jax would wait for the others, for minutes.
    """
    try:
        if line:
            print(line, file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:  # also where nobody reads them any more, or a signal comes
        if is_distributed():
            os._exit(exit_code)
    sys.exit(exit_code)


@contextlib.contextmanager
def _told_to_end() -> Iterator[None]:
    """Inside, SIGTERM ends the program as Ctrl-C does: at once, with a line."""

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
    print(line, file=sys.stderr, flush=True)
