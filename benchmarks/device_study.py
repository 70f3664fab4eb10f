"""The Shakespeare study of device.py: several small models train at a time."""

import csv
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from device_rows import Row, Sizes

from symjax.checkpoints.checkpoint import Checkpoints
from symjax.programs import compare

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ("gpt", "sym", "diff", "diff_sym")
SAVING = 30  # seconds before the end at which runs are told to save and stop


def study(row: Row, sizes: Sizes, seconds: float) -> dict[str, Any]:
    """Train all COLUMNS at one depth, and return their held-out losses over the seeds.

    Each run is a process; `together` of them run at a time, seed by seed. Runs that do
    not end in time are saved, and the result is a fault until the same command has
    completed them.
    """
    end = time.monotonic() + seconds - SAVING
    data = ("data.source=text", f"data.path={sizes.text}", "data.tokenizer=char")
    keys = (*data, *sizes.study, f"steps={sizes.steps}")
    words = [f"--config.{x}" for x in keys]
    files = [f"{ROOT / 'configs' / x}.py:{row.subject}" for x in COLUMNS]
    out = Path(sizes.out)
    runs = {
        out / f"{column}-{row.subject}-seed{seed}": ["--config", file, *words]
        + [f"--config.seed={seed}"]
        for seed in map(int, sizes.seeds.split(","))
        for column, file in zip(COLUMNS, files, strict=True)
    }
    waiting = [
        [*given, "--workdir", str(workdir)]
        for workdir, given in runs.items()
        if sizes.steps not in Checkpoints(workdir / "checkpoints").steps()
    ]
    total, complete = len(runs), len(runs) - len(waiting)
    running: list[subprocess.Popen] = []
    while (waiting or running) and time.monotonic() < end:
        while waiting and len(running) < sizes.together:
            command = [sys.executable, str(ROOT / "train.py"), *waiting.pop(0)]
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        time.sleep(0.2)
        ended = [x for x in running if x.poll() is not None]
        running = [x for x in running if x.poll() is None]
        if wrong := [x for x in ended if x.returncode]:
            stop(running)
            raise RuntimeError(f"a run ended with exit code {wrong[0].returncode}")
        complete += len(ended)
    stop(running)
    if complete < total:
        return {"fault": f"{complete} of {total} runs are complete"}
    given = ["--configs", ",".join(files), "--seeds", sizes.seeds, *words]
    compare.main([*given, "--out", str(out)])
    table = (out / "compare.csv").read_text(encoding="utf-8")
    return {
        f"{x['configuration']}_heldout": float(x["held-out"])
        for x in csv.DictReader(table.splitlines())
    }


def stop(running: list[subprocess.Popen]) -> None:
    """Let each process save its state and end; kill those that do not."""
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(SAVING - 5)
        except subprocess.TimeoutExpired:
            process.kill()
