"""The metrics files after a run, a kill and a resumed run."""

import json
import math
import os
import resource
import struct
import subprocess
import sys

import jax.numpy as jnp
import pytest
from runs import ROOT

from symjax import config
from symjax.monitor.metrics import Metrics


def lines(workdir):
    text = (workdir / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def run(workdir, first, last, *, start=0):
    """Log steps first … last, with an evaluation after every even step."""
    metrics = Metrics(workdir, start)
    for step in range(first, last + 1):
        metrics.write(step, {"train/loss": 1 / step})
        if step % 2 == 0:
            metrics.write(step, {"heldout/loss": 2 / step})
    return metrics


def test_the_file_holds_every_number_exactly(tmp_path):
    metrics = Metrics(tmp_path / "new" / "run")
    metrics.write(3, {"train/loss": 0.1, "tokens_per_second": jnp.float32(0.25)})
    metrics.write(3, {"heldout/loss": 1 / 3})
    metrics.close()
    assert lines(tmp_path / "new" / "run") == [
        {"step": 3, "train/loss": 0.1, "tokens_per_second": 0.25},
        {"step": 3, "heldout/loss": 1 / 3},
    ]


def test_pandas_reads_one_row_a_step_and_one_column_a_name(tmp_path):
    pandas = pytest.importorskip("pandas")
    run(tmp_path, 1, 4).close()
    frame = pandas.read_json(tmp_path / "metrics.jsonl", lines=True)
    wide = frame.groupby("step").first()
    assert list(wide.columns) == ["train/loss", "heldout/loss"]
    assert wide.loc[4, "heldout/loss"] == 0.5
    assert math.isnan(wide.loc[3, "heldout/loss"])


def test_every_line_is_readable_at_once(tmp_path):
    metrics = run(tmp_path, 1, 3)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 2, 3]
    metrics.close()


def test_what_is_not_finite_is_valid_json(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.write(1, {"train/loss": float("nan"), "gradient_norm": float("inf")})
    metrics.close()

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=refuse) == {
        "step": 1,
        "train/loss": None,
        "gradient_norm": None,
    }


def test_a_resumed_run_has_each_step_once(tmp_path):
    run(tmp_path, 1, 9).close()
    resumed = run(tmp_path, 6, 12, start=5)
    resumed.close()
    again = tmp_path / "again"
    run(again, 1, 12).close()
    found = (tmp_path / "metrics.jsonl").read_bytes()
    assert found == (again / "metrics.jsonl").read_bytes()


def test_a_new_run_starts_with_an_empty_file(tmp_path):
    run(tmp_path, 1, 9).close()
    Metrics(tmp_path).close()
    assert lines(tmp_path) == []


def test_a_line_cut_at_any_byte_leaves_the_lines_before_it(tmp_path):
    run(tmp_path, 1, 3).close()
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    start = whole.rstrip(b"\n").rindex(b"\n") + 1
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        metrics = Metrics(tmp_path, 2)
        metrics.write(3, {"train/loss": 1 / 3})
        metrics.close()
        assert path.read_bytes() == whole


def test_nothing_is_left_of_the_rewriting(tmp_path):
    run(tmp_path, 1, 3).close()
    Metrics(tmp_path, 2).close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_kill_during_the_rewriting_leaves_the_old_lines(tmp_path, monkeypatch):
    run(tmp_path, 1, 3).close()
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            Metrics(tmp_path, 1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def logged(**keys):
    return config.Config(log=config.Log(**keys))


def test_tensorboard_files_are_written_only_if_asked_for(tmp_path):
    pytest.importorskip("tensorboardX")
    run(tmp_path, 1, 2).close()
    assert not (tmp_path / "tensorboard").exists()
    metrics = Metrics(tmp_path, 2, logged(tensorboard=True))
    metrics.write(3, {"train/loss": 0.5})
    metrics.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"train/loss" in events.read_bytes()


def test_a_missing_tensorboardx_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match="pip install tensorboardX"):
        Metrics(tmp_path, 0, logged(tensorboard=True))
    Metrics(tmp_path).close()


OFFLINE = """
import sys
from pathlib import Path
from symjax.config import Config, Log
from symjax.monitor.metrics import Metrics
step = int(sys.argv[2])
options = Config(log=Log(wandb="sheep", name="fox"))
metrics = Metrics(Path(sys.argv[1]), step - 1, options)
metrics.write(step, {"train/loss": 0.5 * step, "mfu": 0.25})
metrics.write(step, {"heldout/loss": 1.5})
metrics.close()
"""


def records(path):
    """Return the records in the file of an offline run.

    The file is a LevelDB log: blocks of 32 KiB; checksum, size and kind before each
    part of a record; 7 bytes at the start.
    """
    from wandb.proto.wandb_internal_pb2 import (  # pyright: ignore
        Record,
    )

    content, place, part = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if (room := 2**15 - place % 2**15) < 7:
            place += room
            continue
        size, kind = struct.unpack_from("<HB", content, place + 4)
        part += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or its last part
            yield Record.FromString(part)
            part = b""


def history(path):
    """Return the logged rows, without the entries that wandb adds."""
    rows = [x.history for x in records(path) if x.HasField("history")]
    found = [
        {(x.key or "/".join(x.nested_key)): json.loads(x.value_json) for x in row.item}
        for row in rows
    ]
    own = "_timestamp", "_runtime"
    return [{n: x for n, x in row.items() if n not in own} for row in found]


def test_wandb_keeps_one_run_of_a_workdir_offline(tmp_path):
    """In processes of their own: the package writes its last bytes when a process
    ends."""
    pytest.importorskip("wandb", reason="wandb is in no extra of the tests")
    place = {**os.environ, "WANDB_MODE": "offline", "JAX_PLATFORMS": "cpu"}
    place["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    for step in "12":
        words = [sys.executable, "-c", OFFLINE, str(tmp_path), step]
        subprocess.run(words, env=place, check=True)
    identity = (tmp_path / "wandb" / "id").read_text()
    written = sorted((tmp_path / "wandb").glob(f"offline-run-*/run-{identity}.wandb"))
    assert len(written) == 2
    for step, path in enumerate(written, 1):
        run = next(x.run for x in records(path) if x.HasField("run"))
        assert (run.project, run.display_name, run.run_id) == ("sheep", "fox", identity)
        sizes = {x.key: json.loads(x.value_json) for x in run.config.update}
        assert sizes["model"]["width"] == 256
        numbers = {"train/loss": 0.5 * step, "mfu": 0.25, "heldout/loss": 1.5}
        assert history(path) == [{**numbers, "_step": step}]


def test_a_missing_wandb_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="pip install wandb"):
        Metrics(tmp_path, 0, logged(wandb="sheep"))
    assert not list(tmp_path.iterdir())


class Board:
    """Stand-in for a project of Weights & Biases, without the package."""

    class Error(Exception):
        pass

    Settings = dict

    def __init__(self):
        self.started, self.rows, self.ended = [], [], 0

    def init(self, **given):
        if given["project"] == "refused":
            raise self.Error("No API key configured")
        self.started.append(given)
        return self

    def log(self, row, step):
        self.rows.append((step, row))

    def finish(self):
        self.ended += 1


def test_what_wandb_is_given(tmp_path, monkeypatch):
    board = Board()
    monkeypatch.setitem(sys.modules, "wandb", board)
    for step in (1, 2):
        metrics = Metrics(tmp_path, step - 1, logged(wandb="sheep"))
        metrics.write(step, {"train/loss": 0.5 * step})
        metrics.close()
    one, two = board.started
    assert one["id"] == two["id"] and one["config"]["model"]["width"] == 256
    assert (one["project"], one["name"]) == ("sheep", tmp_path.name)
    assert board.rows == [(1, {"train/loss": 0.5}), (2, {"train/loss": 1.0})]
    assert board.ended == 2
    with pytest.raises(ValueError, match="log.wandb 'refused': No API key"):
        Metrics(tmp_path, 0, logged(wandb="refused"))


def test_lines_wait_for_room_on_a_full_disk(tmp_path, capsys):
    """No line is lost, doubled or torn, and one message names the file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    metrics = Metrics(tmp_path)
    metrics.write(1, {"a": 1})
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (25, hard))  # within the second line
        metrics.write(2, {"a": 2})
        metrics.write(3, {"a": 3})
        assert len((tmp_path / "metrics.jsonl").read_bytes()) == 25
        (said,) = capsys.readouterr().err.splitlines()
        assert "metrics.jsonl cannot be written (File too" in said
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    metrics.write(4, {"a": 4})
    metrics.close()
    assert lines(tmp_path) == [{"step": n, "a": float(n)} for n in (1, 2, 3, 4)]
    assert capsys.readouterr().err == ""


def test_lines_that_never_found_room_are_counted(tmp_path, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    metrics = Metrics(tmp_path)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
        metrics.write(1, {"a": 1})
        metrics.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    lost = capsys.readouterr().err.splitlines()[-1]
    assert lost.endswith("metrics.jsonl misses its last 2 bytes")


def test_a_workdir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match="metrics in .*run cannot be written"):
        Metrics(tmp_path / "run")


def test_a_metric_called_step_is_refused(tmp_path):
    metrics = Metrics(tmp_path)
    with pytest.raises(ValueError, match="step"):
        metrics.write(1, {"step": 2.0})
    metrics.close()
