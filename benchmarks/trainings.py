"""Train several small models at a time, each in a process."""

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from symjax.checkpoints.checkpoint import Checkpoints
from symjax.distributed.exit_codes import Refused

ROOT = Path(__file__).resolve().parents[1]
SAVING = 30  # seconds before the end at which runs are told to save and stop


def is_complete(workdir: Path, words: Sequence[str]) -> bool:
    """Return whether the last step of a run is saved.

    Args:
        words: words of train.py; the last --config.steps among them counts.
    """
    flag = "--config.steps="
    steps = int([x for x in words if x.startswith(flag)][-1].removeprefix(flag))
    folder = workdir / "checkpoints"
    return folder.is_dir() and steps in Checkpoints(folder).steps()


def train_together(
    runs: Mapping[Path, Sequence[str]], together: int, seconds: float | None = None
) -> list[Path]:
    """Train the runs that are not complete, and return those that still are not.

    Runs start in their order, `together` at a time. A run that is stopped saves its
    state first, so that the same call continues it. All are stopped if one fails, and
    if this process gets Ctrl-C or, inside `run_and_exit`, SIGTERM.

    Args:
        runs: workdir → words of train.py, with --config.steps.
        seconds: time until all are stopped; None: no limit.
    Raises:
        Refused: a run fails. The exception has its exit code.
    """
    end = time.monotonic() + seconds - SAVING if seconds else float("inf")
    waiting = [x for x, words in runs.items() if not is_complete(x, words)]
    running: dict[Path, subprocess.Popen] = {}
    try:
        while (waiting or running) and time.monotonic() < end:
            while waiting and len(running) < together:
                workdir = waiting.pop(0)
                running[workdir] = _start(workdir, runs[workdir])
            time.sleep(0.2)
            for workdir, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[workdir]
                if code := process.returncode:
                    code = code if code > 0 else 128 - code  # ended by a signal
                    line = f"{workdir}: train.py ended with exit code {code}"
                    raise Refused(line, exit_code=code)
    finally:
        _stop(running.values())
    return [x for x, words in runs.items() if not is_complete(x, words)]


def _start(workdir: Path, words: Sequence[str]) -> subprocess.Popen:
    """Start train.py in a separate process group.

    In the group of this process train.py would get two signals, Ctrl-C from the
    terminal and SIGTERM from `_stop`. A second signal keeps it from saving.
    """
    command = [sys.executable, str(ROOT / "train.py"), *words]
    command += ["--workdir", str(workdir)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, process_group=0)


def _stop(processes) -> None:
    """Let each process save its state and end; kill those that do not in time."""
    for process in processes:
        process.terminate()
    end = time.monotonic() + SAVING - 10
    for process in processes:
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
