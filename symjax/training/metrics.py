"""The numbers of a run, in its workdir, as it goes.

`metrics.jsonl` has one object a line, with `step` and named floats, and is what a
resumed run reads. `metrics.csv` has the same numbers in long form, one a line
(`step,name,value`): lines of training and of evaluation have different names, and long
form can only be appended to, while a table would need all names in its first line.

    pandas.read_csv("metrics.csv").pivot(index="step", columns="name", values="value")

TensorBoard's files, if asked for, are in `tensorboard/`, ten seconds late.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from symjax.training.progress import print_warning

HEADER = ("step", "name", "value")


class Metrics:
    """Writes the numbers of a run; of several processes only the first.

    Args:
        step: the one the run starts or goes on from. What a killed run wrote after it
            goes, so that no step is there twice; so does a line it did not finish.
        tensorboard: also write TensorBoard's event files.
        writes: else there are no files, and nothing happens.
    Raises:
        ValueError: the files cannot be written, or tensorboardX is not installed.
    """

    def __init__(
        self,
        workdir: Path,
        step: int = 0,
        tensorboard: bool = False,
        *,
        writes: bool = True,
    ):
        self._files: dict[FileIO, bytes] = {}
        self._tensorboard = None
        if not writes:
            return
        if tensorboard:
            self._tensorboard = _event_files(workdir / "tensorboard", step)
        lines, table = workdir / "metrics.jsonl", workdir / "metrics.csv"
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            kept = [row for row in _rows(lines) if row["step"] <= step]
            _replace(lines, "".join(_json(row) for row in kept))
            _replace(table, _csv([HEADER]) + "".join(_table(row) for row in kept))
            # Unbuffered: what a full disk did not take is known, and written later.
            self._files = {
                open(path, "ab", buffering=0): b"" for path in (lines, table)
            }
        except OSError as error:
            raise ValueError(
                f"metrics cannot be written to {workdir}: {error.strerror}"
            ) from error

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append what was measured at a step, at once.

        What does not fit on a full disk is kept, said in one line, and written as soon
        as there is room.

        What is not a finite number is null in JSON, which has no word for it, and
        empty in CSV, which pandas reads as NaN.

        Args:
            values: name → what `float` takes, a JAX scalar too.
        Raises:
            ValueError: a value is called `step`.
        """
        if "step" in values:
            raise ValueError(f"a metric cannot be called step: {dict(values)}")
        row: dict[str, Any] = {"step": step}
        for name, value in values.items():
            number = float(value)
            row[name] = number if math.isfinite(number) else None
            if self._tensorboard is not None:
                self._tensorboard.add_scalar(name, number, step)
        texts = (_json(row), _table(row)) if self._files else ()
        for file, text in zip(self._files, texts, strict=True):
            self._append(file, text.encode())

    def _append(self, file: FileIO, text: bytes) -> None:
        late = self._files[file]
        rest = late + text
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError as error:
            if not late:
                print_warning(
                    f"{file.name} cannot be written ({error.strerror}): going on, its "
                    "lines wait for room"
                )
        self._files[file] = rest

    def close(self) -> None:
        for file in self._files:
            self._append(file, b"")
            if lost := self._files[file]:
                print_warning(f"{file.name} misses its last {len(lost)} bytes")
            file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def _rows(path: Path) -> list[dict[str, Any]]:
    """The lines that are whole."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line, parse_constant=_refuse)
            row["step"] = int(row["step"])
        except (ValueError, TypeError, KeyError):
            continue
        rows.append(row)
    return rows


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _json(row: dict[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _table(row: dict[str, Any]) -> str:
    return _csv([(row["step"], name, row[name]) for name in row if name != "step"])


def _csv(rows: list[tuple]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _replace(path: Path, text: str) -> None:
    """Write a file so that a kill leaves the old one or the new one."""
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _event_files(directory: Path, step: int) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ValueError(
            "log.tensorboard needs tensorboardX: pip install tensorboardX"
        ) from error
    # TensorBoard then hides what earlier files say about later steps.
    return SummaryWriter(str(directory), purge_step=step + 1, flush_secs=10)
