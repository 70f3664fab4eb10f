"""Metrics of a run, written to `metrics.jsonl` of its workdir without delay.

For a workdir in a bucket the file is in the run's local folder, and `Mirror` copies it
to the bucket.

Each line is a JSON object with `step` and named floats. A resumed run reads the file,
and so can pandas:

    frame = pandas.read_json("metrics.jsonl", lines=True)
    frame.groupby("step").first()  # training and evaluation of a step in one row
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from etils import epath

from symjax import validation
from symjax.config import Config
from symjax.distributed.exit_codes import print_warning
from symjax.distributed.launch import is_process_zero
from symjax.monitor.boards import boards
from symjax.monitor.mirror import Mirror
from symjax.storage import check_writable, local_folder, replaced, store_errors

NAME = "metrics.jsonl"
# Prefixes of metrics; the number of a layer follows.
LAMBDA, GRADIENT_NORM = "lambda/", "gradient_norm/"


class Metrics:
    """Writer of a run's metrics. With several processes only the first one writes.

    Args:
        workdir: the folder of the run. Earlier lines of its metrics.jsonl are kept,
            also if they were written on another machine.
        step: the step that the run starts or continues from. Lines that a killed run
            wrote for later steps are removed, so that no step occurs twice. A line that
            was not finished is removed too.
        options: its `log` names the boards that show the metrics too.
    Raises:
        ValueError: the files cannot be written, or as `boards`.
    """

    def __init__(
        self, workdir: epath.Path, step: int = 0, options: Config | None = None
    ):
        self._file: FileIO | None = None
        self._late = b""  # lines that a full disk has not taken yet
        self._boards = []
        self._mirror = Mirror(workdir)
        if not is_process_zero():
            return
        if options is not None:
            whole = validation.to_dict(options)
            self._boards = boards(options.log, workdir, step, whole)
        here = local_folder(workdir)
        check_writable(here, f"metrics in {here}")
        kept = [_json(row) for row in rows_of(workdir) if row["step"] <= step]
        with replaced(here, NAME) as folder:
            Path(folder, NAME).write_text("".join(kept), encoding="utf-8")
        # Unbuffered, so that `_append` knows what a full disk did not take.
        self._file = open(here / NAME, "ab", buffering=0)
        self.upload()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append the values of a step without delay.

        If the disk is full, one warning says so, and the rest is written when there is
        room. Infinities and NaN become null, since JSON has no other form for them.

        Args:
            values: name → a number, or anything that `float` accepts.
        Raises:
            ValueError: a value is called `step`.
        """
        if "step" in values:
            raise ValueError(f"a metric cannot be called step: {dict(values)}")
        row: dict[str, Any] = {"step": step}
        for name, value in values.items():
            number = float(value)
            row[name] = number if math.isfinite(number) else None
            for board in self._boards:
                board.add_scalar(name, number, step)
        self._append(_json(row).encode())

    def _append(self, text: bytes) -> None:
        if self._file is None:
            return
        rest = self._late + text
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            if not self._late:
                print_warning(
                    f"{self._file.name} cannot be written ({error.strerror}): "
                    "continuing, its lines wait for room"
                )
        self._late = rest

    def upload(self) -> None:
        """Copy the files to the workdir, if it is in a bucket."""
        self._mirror.copy()

    def close(self) -> None:
        """Write what is left, close the files and boards, and `upload` them."""
        self._append(b"")
        if self._file is not None:
            if self._late:
                print_warning(
                    f"{self._file.name} misses its last {len(self._late)} bytes"
                )
            self._file.close()
        for board in self._boards:
            board.close()
        self.upload()


def rows_of(workdir: epath.Path) -> list[dict[str, Any]]:
    """Return the whole lines of metrics.jsonl, parsed."""
    path = workdir / NAME
    with store_errors(workdir):
        content = path.read_bytes() if path.exists() else b""
    rows = []
    for line in content.decode(errors="replace").splitlines():
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
