"""Kill a run with signal 9 at random moments, restart it, and count what was lost.

    python benchmarks/kills.py --kills 100 --seed 0

`python train.py` trains a tiny model once undisturbed, and then many times with kills.
Each restart is the same command, and nothing is cleaned up in between. The moment of a
kill is drawn from one of four intervals:

start     from the start of the process
training  from its first message about the step at which training starts
save      after the unfinished directory of a save has appeared
clean-up  after a new checkpoint was committed, when an old one is about to be deleted

The files on the disk after a kill show which part of the run it hit. The exit code is 1
if more was lost than the steps since the newest complete checkpoint.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import jax
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from symjax.checkpoints.checkpoint import Checkpoints  # noqa: E402
from symjax.evaluation.loading import load  # noqa: E402

STEPS, EVERY, KEEP = 400, 20, 2
KEYS = {
    "model.width": 16,
    "model.depth": 1,
    "model.length": 32,
    "model.dropout": 0.1,
    "mesh.data": 1,
    "batch_size": 8,
    "evaluate.batches": 1,
    "log.every": 1,
    "checkpoint.keep": KEEP,
    "data.source": "text",
}
# Files of every complete checkpoint.
PARTS = ("meta/metadata", "params/manifest.ocdbt", "optimizer/manifest.ocdbt")
# Longest delay in seconds after the event, and the share of kills, by interval.
REACH = {"start": 6.0, "training": 2.0, "save": 0.1, "clean-up": 0.01}
SHARES = {"start": 1, "training": 3, "save": 4, "clean-up": 2}
START_LINE = re.compile(r"(?:resumed at step (\d+)|new run) in ")


class Killed(NamedTuple):
    """A process of a run that was killed, and what it left.

    Attributes:
        moment: the interval from which the moment of the kill was drawn.
        began: the step that it printed as its start; None if it was killed earlier.
        newest: step of the newest complete checkpoint, 0 if there is none.
        logged: the last step in its metrics.
        saving: whether the disk has an unfinished save.
        cleaning: whether an old checkpoint was not deleted yet.
        torn: whether some files of this old checkpoint are deleted already.
        warnings: number of tracebacks and of lines about damage on stderr.
    """

    moment: str
    began: int | None
    newest: int
    logged: int
    saving: bool
    cleaning: bool
    torn: bool
    warnings: int


class Runs:
    """Runs of one benchmark: the same command, each with a separate workdir."""

    def __init__(self, folder: Path, steps: int, every: int):
        self.folder = folder
        text = folder / "text.txt"
        text.write_text(
            "".join(f"{i} sheep and {i * i % 97} goats\n" for i in range(999))
        )
        keys = KEYS | {"steps": steps, "checkpoint.every": every, "data.path": text}
        self.words = ["--config", f"{ROOT}/configs/diff_sym.py:tiny"]
        self.words += [f"--config.{name}={value}" for name, value in keys.items()]
        cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}
        cache["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        self.environment = {**os.environ, "JAX_PLATFORMS": "cpu", **cache}

    def start(self, workdir: Path) -> subprocess.Popen:
        with open(self.stderr_file(workdir), "w") as stderr:
            return subprocess.Popen(
                [sys.executable, "train.py", *self.words, "--workdir", str(workdir)],
                cwd=ROOT,
                env=self.environment,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )

    def stderr_file(self, workdir: Path) -> Path:
        return self.folder / f"{workdir.name}.stderr"

    def kill_once(
        self, workdir: Path, moment: str, chance: random.Random
    ) -> Killed | None:
        """Start the run and kill it; None if it was complete before the moment came."""
        before = _steps(workdir)
        delay, count = chance.uniform(0, REACH[moment]), chance.randint(1, 4)
        running = self.start(workdir)
        event = self._event(workdir, moment, count)
        while running.poll() is None and not event():
            time.sleep(0.0005)
        until = time.monotonic() + delay
        while running.poll() is None and time.monotonic() < until:
            time.sleep(0.0005)
        running.kill()
        if running.wait() == 0:
            return None
        if running.returncode != -signal.SIGKILL:
            raise RuntimeError(f"a run failed: {self.stderr_file(workdir).read_text()}")
        steps = _steps(workdir)
        text = self.stderr_file(workdir).read_text()
        found = START_LINE.search(text)
        cleaning = len(steps) > KEEP and not steps <= before
        return Killed(
            moment,
            int(found[1] or 0) if found else None,
            newest=max(steps, default=0),
            logged=max(logged(workdir), default=0),
            saving=bool(found) and any("tmp" in name for name in _names(workdir)),
            cleaning=cleaning,
            torn=cleaning
            and not all(
                (workdir / "checkpoints" / str(step) / part).exists()
                for step in steps
                for part in PARTS
            ),
            warnings=text.count("damaged") + text.count("Traceback"),
        )

    def _event(self, workdir: Path, moment: str, count: int) -> Callable[[], bool]:
        """Return a function that tells whether the event of an interval has happened.

        Args:
            count: number of saves or deletions that must have begun.
        """
        seen: set[str] = set()

        def saving() -> bool:
            seen.update(name for name in _names(workdir) if "tmp" in name)
            return len(seen - before) >= count

        def cleaning() -> bool:
            seen.update(map(str, _steps(workdir) - steps))
            return len(seen) >= count

        before, steps = set(_names(workdir)), _steps(workdir)
        return {
            "start": lambda: True,
            "training": lambda: bool(
                START_LINE.search(self.stderr_file(workdir).read_text())
            ),
            "save": saving,
            "clean-up": cleaning,
        }[moment]

    def complete(self, workdir: Path) -> str:
        """Run to the end, and return what it wrote on stderr."""
        if self.start(workdir).wait() != 0:
            raise RuntimeError(f"a run failed: {self.stderr_file(workdir).read_text()}")
        return self.stderr_file(workdir).read_text()


def _names(workdir: Path) -> list[str]:
    try:
        return os.listdir(workdir / "checkpoints")
    except FileNotFoundError:
        return []


def _steps(workdir: Path) -> set[int]:
    return {int(name) for name in _names(workdir) if name.isdecimal()}


def logged(workdir: Path) -> list[int]:
    """Return the steps in the metrics, without a line that the kill has cut off."""
    try:
        lines = (workdir / "metrics.jsonl").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [row["step"] for row in map(json.loads, lines) if "train/loss" in row]


def bits(workdir: Path) -> dict[str, bytes]:
    """Return the bytes of every array of the newest checkpoint, checksums compared."""
    state = load(workdir).program.state
    wanted = {"params": state.params, "optimizer": state.optimizer}
    trees, _ = Checkpoints(workdir / "checkpoints").restore(wanted)
    leaves = jax.tree_util.tree_flatten_with_path(trees)[0]
    return {jax.tree_util.keystr(path): np.asarray(x).tobytes() for path, x in leaves}


class Result(NamedTuple):
    """Counts of a benchmark.

    Attributes:
        killed: the processes that were killed.
        checked: starts that printed the step from which they continue.
        continued: those that continued from the newest complete checkpoint.
        completed: runs that came to their end.
        same: those with every step logged once and the bits of an undisturbed run.
    """

    killed: list[Killed]
    continued: int
    checked: int
    completed: int
    same: int

    def good(self) -> bool:
        return (
            self.continued == self.checked
            and self.same == self.completed
            and not any(life.warnings for life in self.killed)
        )


def measure(folder: Path, kills: int, seed: int, steps: int, every: int) -> Result:
    """Kill and restart runs until there were `kills`, and let the last run end."""
    chance, runs = random.Random(seed), Runs(folder, steps, every)
    runs.complete(folder / "whole")
    whole = bits(folder / "whole")
    killed: list[Killed] = []
    continued = checked = completed = same = 0
    while len(killed) < kills:
        workdir, newest = folder / f"run-{completed}", 0
        while True:
            life = None
            if len(killed) < kills:
                moment = chance.choices([*SHARES], [*SHARES.values()])[0]
                life = runs.kill_once(workdir, moment, chance)
            else:
                runs.complete(workdir)
            found = START_LINE.search(runs.stderr_file(workdir).read_text())
            if found:
                checked += 1
                continued += int(found[1] or 0) == newest
            if life is None:
                break
            killed.append(life)
            newest = life.newest
            print(len(killed), *life, sep="\t", flush=True)
        completed += 1
        each_once = logged(workdir) == [*range(1, steps + 1)]
        same += each_once and bits(workdir) == whole
    return Result(killed, continued, checked, completed, same)


def report(result: Result, seed: int, steps: int, every: int) -> str:
    killed = result.killed
    again = [max(0, life.logged - life.newest) for life in killed]
    aims = Counter(life.moment for life in killed)
    saving = sum(life.saving for life in killed)
    cleaning = sum(life.cleaning for life in killed)
    return "\n".join(
        [
            f"{len(killed)} kills, seed {seed}; {result.completed} runs of {steps} "
            f"steps, a checkpoint every {every}, the newest {KEEP} kept",
            "aimed at " + ", ".join(f"{name} {aims[name]}" for name in SHARES),
            f"landed inside a save {saving}, inside a clean-up {cleaning} "
            f"(in {sum(life.torn for life in killed)} a checkpoint was half-deleted)",
            f"starts from the newest complete checkpoint: {result.continued} of "
            f"{result.checked} (the others were killed before they said it)",
            f"logged steps run again after a kill: median {median(again):g}, "
            f"most {max(again)}",
            f"warnings of damage or tracebacks: {sum(x.warnings for x in killed)}",
            f"runs that ended with every step logged once and the bits of an "
            f"undisturbed one: {result.same} of {result.completed}",
        ]
    )


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each run")
    parser.add_argument(
        "--every", type=int, default=EVERY, help="steps between checkpoints"
    )
    chosen = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(
            Path(folder), chosen.kills, chosen.seed, chosen.steps, chosen.every
        )
    print(report(result, chosen.seed, chosen.steps, chosen.every))
    return 0 if result.good() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
