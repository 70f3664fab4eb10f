"""Paths that name a folder, a bucket, or no place for a run."""

import importlib.util
from pathlib import Path

import pytest
from runs import call, train, write_text

import symjax
from symjax.storage import is_unanswered, local_folder, resolve, resolve_url

REFUSED = {
    "s3://models/run": "s3:// is not supported: Orbax, which writes the checkpoints,",
    "hdfs://host/run": "hdfs:// is not supported: give a folder of this machine, or gs",
    "https://host/run": "https:// is not supported: give a folder of this machine, or",
    "gs://models": "'gs://models' names no folder in a bucket: gs://BUCKET/FOLDER",
    "gs://": "'gs://' names no folder in a bucket: gs://BUCKET/FOLDER",
}


@pytest.mark.parametrize("workdir", REFUSED)
def test_a_path_that_no_run_can_use_is_refused_in_one_line(
    workdir, tmp_path, monkeypatch, capsys
):
    """Otherwise it would become a folder of that name."""
    monkeypatch.chdir(tmp_path)
    text = write_text(tmp_path)
    assert train(text, workdir) == 2
    assert train(text, tmp_path / "run", init_from=workdir) == 2
    assert call("eval", ["--workdir", workdir]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(REFUSED[workdir] in line for line in lines)
    with pytest.raises(ValueError, match=r"not supported|names no folder"):
        symjax.load(workdir)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_a_bucket_without_its_client_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="needs gcsfs: pip install gcsfs"):
        resolve("gs://models/run")


def test_a_workdir_is_absolute_and_has_a_local_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert str(resolve("runs/one")) == f"{tmp_path}/runs/one"
    assert local_folder(resolve("runs/one")) == tmp_path / "runs" / "one"
    found = resolve("gs://models/runs/one/")
    assert str(found) == str(resolve(found)) == "gs://models/runs/one"
    assert str(resolve("one:/two")) == str(resolve(Path("one:/two")))
    assert str(local_folder(found)) == "/cache/symjax/runs/gs/models/runs/one"


def test_pathlib_takes_a_slash_of_a_bucket():
    """The path would name a folder gs: on the disk, and weights in it would be lost."""
    for find in (resolve, resolve_url):
        assert str(find(Path("gs://models/runs/one"))) == "gs://models/runs/one"
        with pytest.raises(ValueError, match="s3:// is not supported"):
            find(Path("s3://models/run"))


def test_an_unreachable_store_is_told_from_a_missing_object():
    assert is_unanswered(ValueError("UNAVAILABLE: CURL error"))
    assert is_unanswered(OSError("Forbidden: https://storage"))
    assert not is_unanswered(ValueError("NOT_FOUND: Error opening"))
    assert not is_unanswered(FileNotFoundError("gs://models/run"))
