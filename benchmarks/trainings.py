"""Train several small models at a time, each in a process."""

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from symjax.checkpoints.checkpoint import Checkpoints

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
    state first, so that the same call continues it.

    Args:
        runs: workdir → words of train.py, with --config.steps.
        seconds: time until all are stopped; None: no limit.
    Raises:
        RuntimeError: a run fails; the others are stopped.
    """
    end = time.monotonic() + seconds - SAVING if seconds else float("inf")
    waiting = [x for x, words in runs.items() if not is_complete(x, runs[x])]
    running: dict[Path, subprocess.Popen] = {}
    while (waiting or running) and time.monotonic() < end:
        while waiting and len(running) < together:
            workdir = waiting.pop(0)
            command = [sys.executable, str(ROOT / "train.py"), *runs[workdir]]
            command += ["--workdir", str(workdir)]
            running[workdir] = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        time.sleep(0.2)
        ended = {
            x: process for x, process in running.items() if process.poll() is not None
        }
        for workdir, process in ended.items():
            del running[workdir]
            if process.returncode:
                _stop(running.values())
                code = process.returncode
                raise RuntimeError(f"{workdir} ended with exit code {code}")
    _stop(running.values())
    return [x for x, words in runs.items() if not is_complete(x, words)]


def _stop(processes) -> None:
    """Let each process save its state and end; kill those that do not."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(SAVING - 5)
        except subprocess.TimeoutExpired:
            process.kill()
