"""How a run ends: the exit code and the line that belong to each kind of error."""

import signal
from typing import NamedTuple

import jax


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


class Ending(NamedTuple):
    exit_code: int
    kind: str  # the first word of the line
    reason: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


class Refused(ValueError):
    """What one process could not do, raised in all; the first one prints it."""

    def __init__(self, reason: str, *, exit_code: int = 2, kind: str = "error"):
        super().__init__(reason)
        self.exit_code = exit_code
        self.kind = kind


def ending(error: BaseException, *, several: bool = False) -> Ending | None:
    """What an error means for a run; None where it is a fault of ours.

    Args:
        several: processes: then a failed device may be a failed connection.
    """
    reason = " ".join(str(error).split())
    match error:
        case Refused():
            return Ending(error.exit_code, error.kind, reason)
        case ValueError():
            return Ending(2, "error", reason)
        case OSError():
            where = f": {error.filename}" if error.filename else ""
            return Ending(2, "error", f"{error.strerror or reason}{where}")
        case FloatingPointError():
            return Ending(1, "stopped", reason)
        case MemoryError():
            return Ending(1, "stopped", f"out of memory ({reason})")
        case jax.errors.JaxRuntimeError():
            line = str(error).splitlines()[0]
            if any(words in line for words in ("RESOURCE_EXHAUSTED", "Out of memory")):
                return Ending(1, "stopped", f"out of memory ({line})")
            cause = f"another process or its connection has failed ({line})"
            return Ending(1, "stopped", cause) if several else None
        case Interrupted():
            return Ending(error.exit_code, "interrupted", reason)
        case KeyboardInterrupt():
            number = error.number if isinstance(error, Stopped) else signal.SIGINT
            return Ending(128 + number, "interrupted", "nothing more was saved")
    return None
