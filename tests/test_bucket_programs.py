"""A bucket in place of a folder: dry runs, comparisons, weights, boards, streams."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from buckets import numbers, objects
from etils import epath
from runs import TEXT, call, train, words

import symjax
from symjax import config
from symjax.monitor.boards import WeightsAndBiases
from symjax.storage import local_copy, local_folder, resolve, upload_file

pytestmark = pytest.mark.usefixtures("cache")

SMALL = {"model__width": 16, "log__every": 1, "steps": 2}


@pytest.fixture(scope="module")
def run(bucket, text):
    """Return a run of two steps, with a trace and events of TensorBoard."""
    changes = SMALL | {"log__tensorboard": True, "log__profile": "2:2"}
    assert train(text, f"{bucket}/run", **changes) == 0
    return resolve(f"{bucket}/run")


def test_a_dry_run_makes_nothing(bucket, text, capsys):
    assert train(text, f"{bucket}/dry", "--dry_run", **SMALL) == 0
    assert "parameters" in capsys.readouterr().out
    assert not resolve(f"{bucket}/dry").exists()
    assert not local_folder(resolve(f"{bucket}/dry")).exists()


def test_traces_and_events_are_copied(run):
    """Byte for byte, as TensorBoard and XProf read them."""
    found = objects(run)
    there = [x for x in found if x.startswith(("tensorboard/", "profile/"))]
    assert [x for x in there if "tensorboard/events.out.tfevents" in x]
    assert [x for x in there if x.endswith(".xplane.pb")]
    here = local_folder(run)
    assert {x: found[x] for x in there} == {x: (here / x).read_bytes() for x in there}


def test_weights_are_written_to_a_bucket_and_read_from_it(
    bucket, run, text, tmp_path, capsys
):
    """The same bytes and the same model as on a disk, and no stale objects."""
    model, folder = symjax.load(str(run)), resolve(f"{bucket}/weights")
    (folder / "config.json").write_text("{}")
    found = f"{bucket}/found.json"
    assert (
        call("eval", ["--workdir", str(run), "--tasks", "loss", "--json", found]) == 0
    )
    symjax.save_pretrained(model, tmp_path, results=found)
    symjax.save_pretrained(model, str(folder), results=found)
    written = {x.name: x.read_bytes() for x in tmp_path.iterdir()}
    assert objects(folder) == written and "config.json" not in written
    loaded = symjax.load_pretrained(str(folder))
    ids = model.encode("1 sheep, 2 goats")
    np.testing.assert_array_equal(loaded.logits(ids), model.logits(ids))
    changes = SMALL | {"init_from": folder, "steps": 1}
    capsys.readouterr()
    assert train(text, tmp_path / "run", **changes) == 0
    assert f"weights of {folder} in" in capsys.readouterr().err
    (folder / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=f"{folder}/model.safetensors is damaged"):
        symjax.load_pretrained(str(folder))


def test_large_files_are_copied_in_pieces(bucket, tmp_path):
    content = np.random.default_rng(0).bytes(11 * 2**20)
    (tmp_path / "large.json").write_bytes(content)
    upload_file(tmp_path / "large.json", epath.Path(f"{bucket}/large/large.json"))
    upload_file(tmp_path / "large.json", epath.Path(f"{bucket}/large/other.bin"))
    with local_copy(epath.Path(f"{bucket}/large"), ".json") as here:
        assert [x.name for x in here.iterdir()] == ["large.json"]
        assert (here / "large.json").read_bytes() == content


def test_runs_are_compared_in_a_bucket(bucket, text, capsys):
    out = f"{bucket}/compare"
    module, (_, config, *changes) = "symjax.programs.compare", words(text, **SMALL)
    asked = ["--configs", config, "--out", out, "--batches", "1"]
    assert call(module, [*asked, *changes]) == 0
    found = objects(resolve(out))
    table = found["compare.md"].decode()
    assert "diff_sym-tiny" in table and found["heldout.png"].startswith(b"\x89PNG")
    assert found["diff_sym-tiny-seed0/metrics.jsonl"]
    there = ["--workdirs", f"{out}/diff_sym-tiny-seed0", "--batches", "1"]
    assert call(module, [*there, "--out", f"{bucket}/again"]) == 0
    assert (resolve(f"{bucket}/again") / "compare.md").read_bytes() == found[
        "compare.md"
    ]


def test_an_evaluation_is_written_to_a_bucket(bucket, run):
    found = resolve(f"{bucket}/evaluated")
    asked = ["--tasks", "lambda,entropy", "--batches", "1", "--out", str(found)]
    page = ["--report", str(found / "page.html")]
    assert call("eval", ["--workdir", str(run), *asked, *page]) == 0
    names = {x.name for x in found.iterdir()}
    assert {"lambda.csv", "page.html"} <= names
    assert (found / "page.html").read_text().startswith("<!doctype html>")


def test_a_stream_is_trained_on_in_a_bucket(bucket, tmp_path, monkeypatch, capsys):
    """The run is resumed on a machine that has no file of it."""
    lines = [json.dumps({"text": line}) for line in TEXT.splitlines()]
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text("\n".join(lines))
    keys = SMALL | {
        "data__source": "hub",
        "data__name": tmp_path / "rows",
        "data__streaming": True,
        "data__tokens": 9000,
        "optimizer__decay_steps": 4,
    }
    for workdir in (tmp_path / "disk", f"{bucket}/stream"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one"))
        assert train("", workdir, **keys) == 0
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
        assert train("", workdir, **keys | {"steps": 4}) == 0
        assert "resumed at step 2" in capsys.readouterr().err
    there = resolve(f"{bucket}/stream")
    assert numbers(there) == numbers(epath.Path(tmp_path / "disk"))
    assert (there / "data" / "corpus.json").exists()


def test_wandb_keeps_one_run_of_a_workdir_in_a_bucket(bucket, tmp_path, monkeypatch):
    """From two machines; files that wandb writes itself stay on each machine."""
    started = []
    board = SimpleNamespace(
        init=lambda **given: started.append(given) or SimpleNamespace(finish=id),
        Settings=dict,
    )
    monkeypatch.setitem(sys.modules, "wandb", board)
    workdir = resolve(f"{bucket}/board")
    for machine in ("one", "other"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
        WeightsAndBiases(config.Log(wandb="sheep"), workdir, {})
        assert started[-1]["dir"] == local_folder(workdir)
    one, other = started
    assert one["id"] == other["id"] == (workdir / "wandb" / "id").read_text()
    assert one["name"] == "board" and one["dir"] != other["dir"]
