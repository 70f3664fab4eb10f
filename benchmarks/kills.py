"""Kill a run with signal 9 at random moments, start it again, and count what was lost.

    python benchmarks/kills.py --kills 100 --seed 0

A tiny model is trained by `python train.py`, once undisturbed and then again and again
under kills, each restart by the same command and with no cleaning in between. A moment
is drawn from the whole start, from the training, from within a save (its unfinished
directory has just appeared) or from a clean-up (a new checkpoint has just been
committed, an old one is about to be deleted). Where a kill has landed is read from what
it left on the disk. The exit code is 1 if anything was lost but the steps since the
newest complete checkpoint.
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
# What every complete checkpoint has.
PARTS = ("meta/metadata", "params/manifest.ocdbt", "optimizer/manifest.ocdbt")
# Seconds after the event that a moment waits for, at most; how many are drawn of it.
REACH = {"start": 6.0, "training": 2.0, "save": 0.1, "clean-up": 0.01}
SHARES = {"start": 1, "training": 3, "save": 4, "clean-up": 2}
SAID = re.compile(r"(?:resumed at step (\d+)|new run) in ")


class Killed(NamedTuple):
    """One life of a run that was killed.

    Attributes:
        moment: what the kill was aimed at.
        began: the step it said it started from; None if it was killed before.
        newest: the newest complete checkpoint that it left, 0 without any.
        logged: the last step in its metrics.
        saving, cleaning: whether the disk shows that a save was cut, or that the old
            checkpoint was not deleted yet.
        torn: whether that one has lost some of its files already.
        warnings: lines on stderr about damage, and tracebacks.
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
    """The runs of one benchmark: all by the same command, but for the workdir."""

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
        with open(self.said(workdir), "w") as said:
            return subprocess.Popen(
                [sys.executable, "train.py", *self.words, "--workdir", str(workdir)],
                cwd=ROOT,
                env=self.environment,
                stdout=subprocess.DEVNULL,
                stderr=said,
            )

    def said(self, workdir: Path) -> Path:
        return self.folder / f"{workdir.name}.stderr"

    def kill_once(
        self, workdir: Path, moment: str, chance: random.Random
    ) -> Killed | None:
        """None if the run was complete before the moment came."""
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
            raise RuntimeError(f"a run failed: {self.said(workdir).read_text()}")
        steps = _steps(workdir)
        text = self.said(workdir).read_text()
        found = SAID.search(text)
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
        """Whether what a moment waits for has happened, `count` times for a save."""
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
            "training": lambda: bool(SAID.search(self.said(workdir).read_text())),
            "save": saving,
            "clean-up": cleaning,
        }[moment]

    def complete(self, workdir: Path) -> str:
        """Run to the end; what it said."""
        if self.start(workdir).wait() != 0:
            raise RuntimeError(f"a run failed: {self.said(workdir).read_text()}")
        return self.said(workdir).read_text()


def _names(workdir: Path) -> list[str]:
    try:
        return os.listdir(workdir / "checkpoints")
    except FileNotFoundError:
        return []


def _steps(workdir: Path) -> set[int]:
    return {int(name) for name in _names(workdir) if name.isdecimal()}


def logged(workdir: Path) -> list[int]:
    """The steps of the metrics, without a line that the kill has cut."""
    try:
        lines = (workdir / "metrics.jsonl").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [row["step"] for row in map(json.loads, lines) if "train/loss" in row]


def bits(workdir: Path) -> dict[str, bytes]:
    """Every array of the newest checkpoint, with its checksum compared on the way."""
    state = load(workdir).program.state
    wanted = {"params": state.params, "optimizer": state.optimizer}
    trees, _ = Checkpoints(workdir / "checkpoints").restore(wanted)
    leaves = jax.tree_util.tree_flatten_with_path(trees)[0]
    return {jax.tree_util.keystr(path): np.asarray(x).tobytes() for path, x in leaves}


class Result(NamedTuple):
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
    """Kill and restart until there were `kills`, and let the last run end."""
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
            found = SAID.search(runs.said(workdir).read_text())
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
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run")
    parser.add_argument("--every", type=int, default=EVERY, help="steps a checkpoint")
    chosen = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(
            Path(folder), chosen.kills, chosen.seed, chosen.steps, chosen.every
        )
    print(report(result, chosen.seed, chosen.steps, chosen.every))
    return 0 if result.good() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
