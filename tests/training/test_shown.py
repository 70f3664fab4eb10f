"""Messages of a run while it trains, and messages that it can leave out."""

import json

import pytest
from runs import train

from symjax.training import compile as fits
from symjax.training import heldout

pytestmark = pytest.mark.usefixtures("cache")


def rows(workdir):
    return [json.loads(x) for x in (workdir / "metrics.jsonl").read_text().splitlines()]


def evaluations(capsys):
    lines = capsys.readouterr().err.splitlines()
    return [x for x in lines if x.startswith("step ") and ": held-out loss " in x]


def test_samples_can_be_turned_off(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(heldout, "generate", None)  # calling it would fail
    assert train(text, tmp_path / "run", steps=2, evaluate__sample="false") == 0
    said = capsys.readouterr().err
    assert "held-out loss" in said and ": sample " not in said


def test_the_line_says_where_tables_are_of_other_batches(text, tmp_path, capsys):
    keys = {"steps": 1, "evaluate__sample": "false", "batch_size": 2}
    assert train(text, tmp_path / "part", **keys) == 0
    [line] = evaluations(capsys)
    [found] = [x for x in rows(tmp_path / "part") if "heldout/loss" in x]
    total = line.partition(" on 2 of ")[2].partition(" ")[0]
    assert found["heldout/batches"] == 2 < int(total)
    assert f" on 2 of {total} batches (n-gram tables on all {total}: unigram " in line
    assert line.endswith(" bits/byte)")
    keys["evaluate__batches"] = 999
    assert train(text, tmp_path / "all", **keys) == 0
    [line] = evaluations(capsys)
    assert f" on {total} of {total} batches (n-gram tables: unigram " in line
    [found] = [x for x in rows(tmp_path / "all") if "heldout/loss" in x]
    assert found["heldout/batches"] == int(total)


class Compiled:
    """Stand-in for a program and its step."""

    mesh = state = constants = None

    def lower(self, shape):
        return self

    def compile(self):
        return self

    def memory_analysis(self):
        return None


def test_a_compilation_for_another_machine_names_it(capsys):
    fits.compiled_step(Compiled(), (1, 1), refuse=False, machine="v5e-64")
    assert capsys.readouterr().err == "compiling the training step for v5e-64\n"


def test_a_dry_run_says_that_it_compiles_and_prints_its_table_alone(text, capsys):
    assert train(text, None, "--dry_run") == 0
    said = capsys.readouterr()
    assert said.err == "compiling the training step\n"
    assert "compiling" not in said.out and "parameters" in said.out
