"""Runs whose data is deleted, cut or edited print one line and lose no checkpoint."""

import os
import shutil

import pytest
from runs import packed, train, write_text

from symjax.checkpoints.checkpoint import Checkpoints
from symjax.training import loop

pytestmark = pytest.mark.usefixtures("cache")

OPTIONS = {"checkpoint__every": 2, "evaluate__every": 0, "model__width": 16}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the last line that an undisturbed run logs."""
    folder = tmp_path_factory.mktemp("finished")
    assert train(write_text(folder), folder / "run", **OPTIONS) == 0
    return last_loss(folder / "run")


def last_loss(workdir):
    return (workdir / "metrics.jsonl").read_text().split('"train/loss": ')[-1][:12]


def after_first_save(monkeypatch, accident):
    save = loop.save_checkpoint

    def saved(run, state, *rest):
        save(run, state, *rest)
        if int(state.step) == 2:
            accident(packed(run.workdir))

    monkeypatch.setattr(loop, "save_checkpoint", saved)


def test_a_run_whose_tokens_are_cut_stops_with_its_checkpoint(
    tmp_path, monkeypatch, capsys, finished
):
    text, workdir = write_text(tmp_path), tmp_path / "run"
    with monkeypatch.context() as patch:
        after_first_save(patch, lambda data: os.truncate(data / "train.npy", 200))
        assert train(text, workdir, **OPTIONS) == 2
    tokens = packed(workdir) / "train.npy"
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"error: corpus file {str(tokens)!r} is damaged (cut short")
    assert Checkpoints(workdir / "checkpoints").steps() == [2]
    assert train(text, workdir, **OPTIONS) == 2
    assert "delete the folder to build it again" in capsys.readouterr().err
    shutil.rmtree(tokens.parent)
    assert train(text, workdir, **OPTIONS) == 0
    assert "resumed at step 2" in capsys.readouterr().err
    assert last_loss(workdir) == finished


def test_a_run_whose_tokens_are_deleted_goes_on(
    tmp_path, monkeypatch, capsys, finished
):
    text, workdir = write_text(tmp_path), tmp_path / "run"
    after_first_save(monkeypatch, shutil.rmtree)
    assert train(text, workdir, **OPTIONS) == 0
    said = capsys.readouterr().err
    assert "was deleted or replaced: this run continues with the file that it " in said
    assert last_loss(workdir) == finished


def test_an_edited_source_is_named_and_not_read(tmp_path, capsys):
    text, workdir = write_text(tmp_path), tmp_path / "run"
    assert train(text, workdir, **OPTIONS, steps=4) == 0
    text.write_text("edited " * 3000)
    capsys.readouterr()
    assert train(text, workdir, **OPTIONS) == 0
    said = capsys.readouterr().err
    assert f"data.path {str(text)!r} has changed since it was packed" in said
    shutil.rmtree(packed(workdir))
    assert train(text, workdir, **OPTIONS) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"is gone, and data.path {str(text)!r} has changed since: use" in line
    shutil.rmtree(workdir / "data")
    assert train(text, workdir, **OPTIONS) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "is not the one of its checkpoints (sha256 " in line
    assert Checkpoints(workdir / "checkpoints").steps()[-1] == 6
    assert not (workdir / "data").exists()
