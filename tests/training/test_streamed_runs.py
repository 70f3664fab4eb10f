"""Runs on a stream: batches do not depend on packing, and a run can end while
waiting."""

import json
import os
import shutil
import signal

import pytest
from runs import TEXT, train

from symjax.checkpoints.checkpoint import Checkpoints
from symjax.data.store import stream
from symjax.training import loop

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def keys(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "SHARD", 2500)  # 8 rows of 32 tokens, 9 steps
    lines = [json.dumps({"text": line}) for line in TEXT.splitlines()]
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text("\n".join(lines))
    return {
        "data__source": "hub",
        "data__name": tmp_path / "rows",
        "data__streaming": True,
        "data__tokens": 9000,
        "data__cache": tmp_path / "cache",
        "model__width": 16,
        "batch_size": 8,
        "log__every": 1,
        "evaluate__every": 0,
        "optimizer__decay_steps": 40,
    }


def losses(workdir):
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


def test_a_resumed_run_reads_the_same_batches_bitwise(keys, tmp_path, capsys):
    """With three shards, also after the cache was cleared."""
    assert train("", tmp_path / "whole", steps=22, **keys) == 0
    assert "9,000 training tokens of a stream" in capsys.readouterr().err
    for steps in (9, 22):
        assert train("", tmp_path / "parts", steps=steps, **keys) == 0
        shutil.rmtree(keys["data__cache"])
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == 22


def test_a_signal_ends_a_run_that_waits_for_its_stream(
    keys, tmp_path, monkeypatch, capsys
):
    def until_step_two(pool, make, first, last, stop):
        yield from real(pool, make, first, 2, stop)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop()
        yield None

    with monkeypatch.context() as patch:
        real = loop.prefetch
        patch.setattr(loop, "prefetch", until_step_two)
        assert train("", tmp_path / "run", steps=5, **keys) == 143
    assert "saved checkpoint 2 in" in capsys.readouterr().err
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [2]
    assert train("", tmp_path / "run", steps=5, **keys) == 0
    assert [*losses(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_packing_alone_packs_all(keys, tmp_path, capsys):
    assert train("", tmp_path / "run", "--pack", **keys) == 0
    said = capsys.readouterr().out
    assert "9,000 training tokens of a stream in" in said
    [place] = (x for x in keys["data__cache"].iterdir() if x.name[0] != ".")
    assert str(place) in said and (place / "corpus.json").exists()
