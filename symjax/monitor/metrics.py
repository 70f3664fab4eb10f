"""The numbers of a run, in `metrics.jsonl` of its workdir, as it goes.

Of a workdir in a bucket: in the run's `home`, from where `Mirror` copies them.

One object a line, with `step` and named floats; a resumed run reads it, and pandas:

    frame = pandas.read_json("metrics.jsonl", lines=True)
    frame.groupby("step").first()  # lines of training and of evaluation side by side
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
from symjax.storage import check_writable, local_folder, replaced, store_errors

NAME = "metrics.jsonl"
LAMBDA = "lambda/"  # and the number of a layer


class Metrics:
    """Writes the numbers of a run; of several processes only the first.

    Args:
        workdir: whose earlier lines are kept, also on another machine.
        step: the one the run starts or continues from. What a killed run wrote after it
            goes, so that no step is there twice; so does a line it did not finish.
        options: whose `log` names the boards that take the numbers, too.
    Raises:
        ValueError: the files cannot be written, or as `boards`.
    """

    def __init__(
        self, workdir: epath.Path, step: int = 0, options: Config | None = None
    ):
        self._file: FileIO | None = None
        self._late = b""
        self._boards = []
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
        # Unbuffered: what a full disk did not take is known, and written later.
        self._file = open(here / NAME, "ab", buffering=0)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append what was measured at a step, at once.

        What does not fit on a full disk is kept, said in one line, and written as soon
        as there is room. What is not a finite number is null: JSON has no word for it.

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

    def close(self) -> None:
        self._append(b"")
        if self._file is not None:
            if self._late:
                print_warning(
                    f"{self._file.name} misses its last {len(self._late)} bytes"
                )
            self._file.close()
        for board in self._boards:
            board.close()


def rows_of(workdir: epath.Path) -> list[dict[str, Any]]:
    """The lines that are whole."""
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
