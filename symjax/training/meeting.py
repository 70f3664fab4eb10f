"""How processes meet before jax connects them, and notice at once that one is gone.

jax alone waits for the others in silence, ends with a page of dump where one never
comes, and learns of a process that was killed by its missing heartbeats: a save waits
for them, and a sum may wait for ever. So process 0 opens the coordinator's port itself
first, and every other one says there who it is. Those connections stay open: the
kernel closes them with a process, however it ends, and the others end too.

    1 → 0  symjax 1 4       process 1 of 4
    0 → 1  welcome          all have come; or a line that says why not
    both   farewell         ends as all do; or a line that says why it ends alone
"""

import contextlib
import errno
import os
import selectors
import socket
import sys
import threading
import time
from typing import Any, NoReturn

MARK, WELCOME, FAREWELL = "symjax", "welcome", "farewell"
KNOCK = 5  # seconds for a connection, and for a line that has begun
IDLE = 60  # seconds after which the kernel asks whether the other machine is there
LONGEST = 1000  # letters of a line

_lines: dict[int, socket.socket] = {}  # to the others; to process 0 alone for them


def meet(coordinator: str, processes: int, process: int, wait: float) -> None:
    """Wait until all processes are there, and from then on end if one of them does.

    Args:
        coordinator: host:port of process 0.
        wait: seconds for all to come.
    Raises:
        ValueError: the host is unknown, the port is taken, nobody answers there, some
            do not come, or they disagree about who they are.
    """
    host, _, port = coordinator.rpartition(":")
    _check_host(host.strip("[]"))
    if process == 0:
        _lines.update(_gather(int(port), processes, wait))
    else:
        _lines[0] = _come(host.strip("[]"), int(port), processes, process, wait)
    for line in _lines.values():  # else firewalls forget one that is silent for long
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE)
    threading.Thread(target=_watch, daemon=True).start()


def farewell() -> None:
    """This process ends as all do: that it closes its connections is no news."""
    _tell(FAREWELL)


def give_up(reason: str) -> None:
    """This process ends alone: the others end too, and say this."""
    _tell(reason)


def _check_host(host: str) -> None:
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"the coordinator's host {host!r} is unknown: {why}") from None


def _gather(port: int, processes: int, wait: float) -> dict[int, socket.socket]:
    """A connection to each other process. Nobody who is silent holds up the others.

    Raises: ValueError: as `meet`; those who have come are told.
    """
    lines: dict[int, socket.socket] = {}
    until = time.monotonic() + wait
    with _door(port) as door, selectors.DefaultSelector() as selector:
        selector.register(door, selectors.EVENT_READ)
        while len(lines) < processes - 1:
            left = until - time.monotonic()
            if left <= 0:
                missing = [p for p in range(1, processes) if p not in lines]
                _refuse(
                    [*lines.values()],
                    f"process {', '.join(map(str, missing))} of {processes} did not "
                    f"come to port {port} of process 0 in {wait:g} seconds (--wait)",
                )
            found: list[Any] = [key.fileobj for key, _ in selector.select(left)]
            for line in found:
                if line is door:
                    selector.register(door.accept()[0], selectors.EVENT_READ)
                elif not _has_come(line, lines, processes):
                    selector.unregister(line)
                    line.close()
    for line in lines.values():
        _say(line, WELCOME)
    return lines


def _has_come(
    line: socket.socket, lines: dict[int, socket.socket], processes: int
) -> bool:
    """Note which process says its name there.

    False: it is none, but whoever else knocks at ports; or it has come before and is
    gone, and may come again. Raises: ValueError: as `meet`.
    """
    for number, known in lines.items():
        if line is known:
            del lines[number]
            return False
    number, count = _named(_hear(line, KNOCK))
    if count is None:
        return False
    everyone = [*lines.values(), line]
    if count != processes:
        _refuse(
            everyone,
            f"process {number} is one of {count} processes, process 0 one of "
            f"{processes}: all need the same number",
        )
    if number in (0, *lines):
        _refuse(everyone, f"two processes have the number {number}")
    lines[number] = line
    return True


def _named(said: str) -> tuple[int, int | None]:
    """The number of a process, and how many it thinks there are; None: it is none."""
    match said.split():
        case [word, number, count] if word == MARK and (number + count).isdecimal():
            return int(number), int(count)
    return 0, None


def _door(port: int) -> socket.socket:
    """The open port, on the interface that jax would take."""
    bound = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", "")
    host = bound.rpartition(":")[0].strip("[]")
    both = host in ("", "::") and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except OSError as error:
        number = error.errno or 0
        why = os.strerror(number) if number > 0 else error
        raise ValueError(
            f"the coordinator's port {port} cannot be opened: {why}"
        ) from None


def _come(
    host: str, port: int, processes: int, process: int, wait: float
) -> socket.socket:
    """The connection to process 0, once all have come to it."""
    until, line = time.monotonic() + wait, None
    while line is None:
        try:
            line = _connected(host, port)
        except OSError as error:
            if time.monotonic() > until:
                raise ValueError(
                    f"no process 0 answers at {host}:{port} for {wait:g} seconds "
                    f"(--wait; {error.strerror or error}): is it running there?"
                ) from None
            time.sleep(0.2)
    _say(line, f"{MARK} {process} {processes}")
    said = _hear(line, wait + KNOCK)  # process 0 waits no longer than that
    if said == WELCOME:
        return line
    if said.startswith(MARK):
        raise ValueError(said.removeprefix(MARK).strip())
    raise ValueError(
        f"what answers at {host}:{port} is no process 0 of symjax, or it ended before "
        f"all had come: it says {said!r}"
    )


def _connected(host: str, port: int) -> socket.socket:
    """Raises: OSError: nobody is there."""
    line = socket.create_connection((host, port), timeout=KNOCK)
    if line.getsockname() != line.getpeername():
        return line
    # The kernel gave this end the very port that is asked for: it has met itself.
    line.close()
    raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def _refuse(lines: list[socket.socket], reason: str) -> NoReturn:
    for line in lines:
        _say(line, f"{MARK} {reason}")
    raise ValueError(reason)


def _watch() -> None:
    """End this process as soon as another one has ended without a farewell."""
    with selectors.DefaultSelector() as selector:
        for process, line in _lines.items():
            selector.register(line, selectors.EVENT_READ, process)
        while selector.get_map():
            for key, _ in selector.select():
                said = _hear(_lines[key.data], KNOCK)
                if said != FAREWELL:
                    _end(said or f"process {key.data} is gone without a word")
                selector.unregister(key.fileobj)


def _end(reason: str) -> NoReturn:
    """Whatever the main thread waits for: it may never come."""
    _tell(reason)
    try:
        print(
            f"stopped: {reason}; the same command goes on from the newest checkpoint",
            file=sys.stderr,
            flush=True,
        )
    finally:  # also where nobody reads stderr any more
        os._exit(1)


def _tell(words: str) -> None:
    for line in _lines.values():
        _say(line, words)


def _say(line: socket.socket, words: str) -> None:
    with contextlib.suppress(OSError):  # it is gone, as `_watch` finds out
        line.sendall(f"{' '.join(words.split())[:LONGEST]}\n".encode())


def _hear(line: socket.socket, seconds: float) -> str:
    """One line; what came of it where the other side has hung up or fallen silent."""
    found, letter, until = b"", b"", time.monotonic() + seconds
    with contextlib.suppress(OSError):
        # A letter at a time: what follows the line is heard later.
        while len(found) <= LONGEST and letter != b"\n":
            found += letter
            line.settimeout(max(until - time.monotonic(), 0.001))
            if not (letter := line.recv(1)):
                break
    return found.decode(errors="replace")
