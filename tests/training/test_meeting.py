"""Processes meet at one port, or each says in one line why not; none lives alone."""

import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, contextmanager

import pytest
from runs import ROOT, SECONDS, call, reserve_port

from symjax.training import meeting

# One process of a run that does nothing, and says so when all have come.
WAITING = """
import sys, time
from symjax.training import meeting
place, count, process = sys.argv[1:]
meeting.meet(place, int(count), int(process), 900)
print("met", flush=True)
if sys.stdin.readline().strip() == "end":
    meeting.farewell()
elif process == "2":
    meeting.give_up("process 2 ended: error: no room")
else:
    time.sleep(100)
"""


@pytest.fixture
def place():
    return f"127.0.0.1:{reserve_port()}"


def words(place, processes, process, wait=1):
    return (
        f"--coordinator {place} --processes {processes} --process {process} "
        f"--wait {wait}"
    ).split()


def refused(capsys, *arguments):
    """The line that ends a process which does not meet the others."""
    assert call("train", words(*arguments)) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    return said


def at_the_side(task):
    """What a task in another thread says when it is refused."""
    found = []

    def run():
        with pytest.raises(ValueError) as error:
            task()
        found.append(str(error.value))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def test_process_0_says_who_did_not_come(place, capsys):
    said = refused(capsys, place, 3, 0)
    assert "process 1, 2 of 3 did not come to port" in said and "1 seconds" in said


def test_who_finds_no_process_0_says_where(place, capsys):
    assert f"no process 0 answers at {place} for 1 seconds" in refused(
        capsys, place, 2, 1
    )


@pytest.mark.parametrize("process", [0, 1])
def test_an_unknown_host_is_refused_at_once(process, capsys):
    said = refused(capsys, "nowhere.invalid:29500", 2, process, 300)
    assert "host 'nowhere.invalid' is unknown" in said


@pytest.mark.parametrize("wait", ["0", "-3", "soon", "1e3"])
def test_a_wait_that_is_no_number_is_refused(wait, place, capsys):
    assert f"--wait must be a number of at least 1, got '{wait}'" in refused(
        capsys, place, 2, 0, wait
    )


def test_processes_that_count_differently_both_say_so(place, capsys):
    thread, found = at_the_side(lambda: meeting.meet(place, 3, 1, SECONDS))
    said = refused(capsys, place, 2, 0, SECONDS)
    thread.join()
    reason = (
        "process 1 is one of 3 processes, process 0 one of 2: all need the same number"
    )
    assert found == [reason] and said == f"error: {reason}\n"


def test_two_processes_of_one_number_and_process_0_all_say_so(place, capsys):
    both = [at_the_side(lambda: meeting.meet(place, 3, 1, SECONDS)) for _ in range(2)]
    said = refused(capsys, place, 3, 0, SECONDS)
    for thread, found in both:
        thread.join()
        assert found == ["two processes have the number 1"]
    assert said == "error: two processes have the number 1\n"


def test_a_port_of_something_else_is_said_to_be_that(capsys):
    with socket.create_server(("127.0.0.1", 0)) as door:

        def answer():
            line = door.accept()[0]
            line.sendall(b"SSH-2.0-OpenSSH\r\n")
            line.close()

        thread = threading.Thread(target=answer)
        thread.start()
        said = refused(capsys, f"127.0.0.1:{door.getsockname()[1]}", 2, 1, SECONDS)
        thread.join()
    assert "is no process 0 of symjax" in said and "SSH-2.0" in said


def test_nobody_takes_himself_for_process_0(capsys, monkeypatch):
    """As the kernel may make it: this end has the port that is asked for."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        place = f"127.0.0.1:{door.getsockname()[1]}"
    connect = socket.create_connection
    monkeypatch.setattr(
        socket, "create_connection", lambda to, timeout: connect(to, timeout, to)
    )
    assert f"no process 0 answers at {place} for 1 seconds" in refused(
        capsys, place, 2, 1
    )


@pytest.mark.parametrize("bound", ["", "[::]:1", "0.0.0.0:1", "127.0.0.1:1"])
def test_the_port_is_open_to_ipv4_wherever_it_may_be(bound, place, monkeypatch):
    if "::" in bound and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", bound)
    host, port = place.split(":")
    with meeting._door(int(port)) as door:
        with closing(socket.create_connection((host, int(port)))):
            door.accept()[0].close()


def knock(place, said):
    """A connection on which that was said."""
    host, port = place.split(":")
    while True:
        try:
            line = socket.create_connection((host, int(port)))
        except OSError:
            time.sleep(0.02)
            continue
        line.sendall(said)
        return line


def test_the_silent_and_those_who_left_again_hold_up_nobody(place):
    """One after another, the silent alone would take longer than process 0 waits."""
    found = []
    port, wait = int(place.split(":")[1]), 60
    silent = wait // meeting.KNOCK + 2
    thread = threading.Thread(
        target=lambda: found.append(meeting._gather(port, 3, wait))
    )
    thread.start()
    with ExitStack() as stack:
        for _ in range(silent):
            stack.enter_context(closing(knock(place, b"")))
        left = stack.enter_context(closing(knock(place, b"symjax 1 3\n")))
        left.shutdown(socket.SHUT_WR)
        assert left.recv(1) == b""  # process 0 has noticed
        both = [knock(place, f"symjax {number} 3\n".encode()) for number in (1, 2)]
        for line in both:
            stack.enter_context(closing(line))
            assert meeting._hear(line, SECONDS) == meeting.WELCOME
        thread.join()
    assert sorted(found[0]) == [1, 2]
    for line in found[0].values():
        line.close()


@contextmanager
def three(place):
    """Process 0 first; before the others, something that is no process of the run."""
    running = []
    try:
        for process in range(3):
            program = [sys.executable, "-c", WAITING, place, "3", str(process)]
            pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            running.append(subprocess.Popen(program, cwd=ROOT, text=True, **pipes))
            if process == 0:
                knock(place, b"GET / HTTP/1.1\r\n\r\n").close()
        for process in running:
            assert process.stdout.readline() == "met\n"
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        (0, "process 0 is gone without a word"),
        (1, "process 1 is gone without a word"),
        (2, "process 2 ended: error: no room"),
    ],
)
def test_no_process_outlives_one_that_is_killed_or_gives_up(ended, reason, place):
    with three(place) as running:
        if ended == 2:
            print("alone", file=running[2].stdin, flush=True)
        else:
            running[ended].kill()
        running.pop(ended)
        for process in running:
            assert process.wait(SECONDS) == 1
            said = process.stderr.read()
            assert said.startswith(f"stopped: {reason}; the same command")
            assert said.count("\n") == 1


def test_a_process_whose_lines_nobody_reads_ends_too(place):
    with three(place) as running:
        for process in running[1:]:
            process.stderr.close()
        running[0].kill()
        assert [process.wait(SECONDS) for process in running[1:]] == [1, 1]


def test_a_farewell_ends_nobody_else(place):
    with three(place) as running:
        for process in running:
            print("end", file=process.stdin, flush=True)
            assert process.wait(SECONDS) == 0
            assert process.stderr.read() == ""
