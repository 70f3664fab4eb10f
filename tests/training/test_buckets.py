"""A run in an emulated bucket equals the run on disk, through kills and damage."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time

import aiohttp
import jax
import numpy as np
import pytest
from buckets import numbers, objects
from etils import epath
from runs import ROOT, call, environment, train, words

import symjax
from symjax.checkpoints import record
from symjax.checkpoints.checkpoint import Checkpoints
from symjax.evaluation.loading import load
from symjax.monitor import mirror
from symjax.storage import local_folder, resolve

pytestmark = pytest.mark.usefixtures("cache")

SMALL = {"model__width": 16, "checkpoint__every": 2, "log__every": 1}


@pytest.fixture(scope="module")
def runs(bucket, text, tmp_path_factory):
    """Return a run of four steps on disk, and the same run in the bucket."""
    folder = tmp_path_factory.mktemp("disk") / "run"
    for workdir in (folder, f"{bucket}/run"):
        assert train(text, workdir, steps=4, **SMALL) == 0
    return epath.Path(folder), resolve(f"{bucket}/run")


@pytest.fixture
def workdir(runs, request):
    """Return a copy of the run in the bucket."""
    copy = resolve(f"gs://models/{request.node.name.replace('[', '-').strip(']')}")
    for name, content in objects(runs[1]).items():
        (copy / name).write_bytes(content)
    return copy


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """Act as a machine that has no file of any run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))


def bits(workdir, step=None):
    """Return every array of a checkpoint, its meta without dates, and the messages."""
    program = load(workdir, step).program
    shapes = {"params": program.state.params, "optimizer": program.state.optimizer}
    said: list[str] = []
    checkpoints = Checkpoints(workdir / "checkpoints")
    trees, meta = checkpoints.restore(shapes, step, warn=said.append)
    meta["sessions"] = [{**x, "date": ""} for x in meta["sessions"]]
    leaves = jax.tree_util.tree_flatten_with_path(trees)[0]
    arrays = {jax.tree_util.keystr(p): np.asarray(x).tobytes() for p, x in leaves}
    return arrays, meta, said


def steps(workdir):
    return Checkpoints(workdir / "checkpoints").steps()


@pytest.mark.always
def test_a_run_in_a_bucket_is_the_run_on_disk(runs):
    disk, bucket = runs
    assert steps(bucket) == steps(disk) == [2, 4]
    for step in (2, 4):
        assert bits(bucket, step) == bits(disk, step)
    assert numbers(bucket) == numbers(disk) and numbers(disk)[-1]["step"] == 4
    parts = {name.split("/")[0] for name in objects(bucket)}
    assert parts == {"checkpoints", "data", "metrics.jsonl", "metrics.png"}
    assert not [x for x in local_folder(bucket).iterdir() if x.name == "checkpoints"]


def test_it_goes_on_on_another_machine(
    workdir, runs, text, elsewhere, tmp_path, capsys
):
    capsys.readouterr()
    assert train(text, workdir, steps=6, **SMALL) == 0
    said = capsys.readouterr().err
    assert "resumed at step 4" in said
    assert f"a bucket has no locks: start no second run in {workdir}" in said
    shutil.copytree(runs[0], tmp_path / "disk")
    assert train(text, tmp_path / "disk", steps=6, **SMALL) == 0
    assert bits(workdir) == bits(epath.Path(tmp_path / "disk"))
    assert numbers(workdir) == numbers(tmp_path / "disk")
    assert steps(workdir) == [4, 6]


def test_another_machine_with_another_text_is_refused(
    workdir, text, elsewhere, tmp_path, capsys
):
    before = objects(workdir)
    other = tmp_path / "text.txt"
    other.write_text(text.read_text().replace("fox", "cat"))
    shutil.copystat(text, other)
    capsys.readouterr()
    text.rename(text.with_suffix(".away"))
    try:
        shutil.copy(other, text)
        assert train(text, workdir, steps=6, **SMALL) == 2
    finally:
        text.with_suffix(".away").rename(text)
    (line,) = capsys.readouterr().err.splitlines()
    assert "has changed since" in line
    assert objects(workdir) == before


@pytest.mark.slow
def test_a_bucket_is_read_as_a_folder_is(runs, elsewhere, capsys, tmp_path):
    disk, bucket = runs
    found = [symjax.load(str(x)) for x in runs]
    texts = [x.generate("1 sheep", 9, temperature=0) for x in found]
    assert texts[0] == texts[1]
    for number, workdir in enumerate(runs):
        asked = ["--tasks", "loss,lambda", "--json", str(tmp_path / f"{number}.json")]
        assert call("eval", ["--workdir", str(workdir), *asked]) == 0
    assert (tmp_path / "0.json").read_bytes() == (tmp_path / "1.json").read_bytes()
    (tmp_path / "given").write_text("1 sheep, 2 goats and 3 crows met a fox. " * 9)
    given = ["--text", str(tmp_path / "given"), "--tasks", "loss"]
    assert call("eval", ["--workdir", str(bucket), *given]) == 0
    json_there = ["--json", f"{bucket}/found.json", "--tasks", "lambda"]
    assert call("eval", ["--workdir", str(bucket), *json_there]) == 0
    assert json.loads((bucket / "found.json").read_text())["step"] == 4
    (bucket / "found.json").unlink()


def test_weights_are_taken_from_a_bucket(runs, text, tmp_path, capsys):
    changes = SMALL | {"init_from": runs[1], "steps": 1}
    assert train(text, tmp_path / "run", **changes) == 0
    assert f"weights of {runs[1]} in" in capsys.readouterr().err
    changes["init_from"] = f"{runs[1]}/nowhere"
    assert train(text, tmp_path / "other", **changes) == 2
    assert "nowhere is no workdir of train.py" in capsys.readouterr().err


def remove(path):
    path.unlink()


def truncate(path):
    path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // 2])


def zero(path):
    path.write_bytes(bytes(len(path.read_bytes())))


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def restored_or_named(workdir, wanted):
    """Return whether the newest checkpoint was refused; no third outcome is allowed."""
    arrays, meta, said = bits(workdir)
    assert (arrays, meta) == wanted[meta["step"]][:2]
    if meta["step"] == 4:
        assert said == []
        return False
    if 4 in steps(workdir):
        (line,) = said
        assert line.startswith("checkpoint 4 is damaged (")
        assert line.endswith("): restored 2 instead") and len(line) < 250
    return True


@pytest.mark.parametrize(
    ("damage", "pattern"),
    [
        (flip, "optimizer/ocdbt.process_0/d"),
        (remove, "meta"),
        (truncate, "params/d"),
        (remove, "params/ocdbt.process_0/d"),
    ],
)
def test_a_damaged_object_is_named(damage, pattern, workdir, runs):
    paths = [*(workdir / "checkpoints" / "4" / pattern).iterdir()]
    damage(max(paths, key=lambda path: len(path.read_bytes())))
    wanted = {2: bits(runs[0], 2), 4: bits(runs[0], 4)}
    assert restored_or_named(workdir, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [remove, truncate, zero, flip])
def test_damage_to_any_object_is_harmless_or_named(damage, workdir, runs):
    newest, named = workdir / "checkpoints" / "4", 0
    wanted = {step: bits(runs[0], step) for step in (2, 4)}
    found = {name: content for name, content in objects(newest).items() if content}
    for name, content in found.items():
        damage(newest / name)
        named += restored_or_named(workdir, wanted)
        (newest / name).write_bytes(content)
    print(f"{damage.__name__}: {len(found)} damages, {named} named")
    assert named >= 6


@pytest.mark.slow
def test_what_kills_leave_does_not_stop_a_run(workdir, text, runs, capsys):
    """A save without its last object, and metrics later than the newest checkpoint."""
    for name, content in objects(workdir / "checkpoints" / "4").items():
        if name != "commit_success.txt":
            (workdir / "checkpoints" / "6" / name).write_bytes(content)
    (workdir / "checkpoints" / "4" / "commit_success.txt").unlink()
    assert steps(workdir) == [2]
    capsys.readouterr()
    assert train(text, workdir, steps=4, **SMALL) == 0
    assert "resumed at step 2" in capsys.readouterr().err
    assert bits(workdir) == bits(runs[0])
    assert numbers(workdir) == numbers(runs[0])
    assert not (workdir / "checkpoints" / "6").exists()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_is_killed_three_times_is_complete(seed, bucket, text, tmp_path):
    """Kill −9 at random moments of the whole run."""
    changes = SMALL | {"steps": 120, "checkpoint__every": 5, "model__dropout": 0.1}
    disk, workdir = epath.Path(tmp_path / "disk"), resolve(f"{bucket}/killed-{seed}")
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"), "JAX_PLATFORMS": "cpu"}
    cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    chance, kills = random.Random(seed), 0

    def start(workdir):
        command = [sys.executable, "train.py", *words(text, workdir, **changes)]
        said = open(tmp_path / "said", "a")
        surroundings = environment() | cache
        return subprocess.Popen(command, cwd=ROOT, env=surroundings, stderr=said)

    assert start(disk).wait() == 0
    newest = max(steps(workdir), default=0)  # imports the bucket client first
    while kills < 3:
        running, (until, wanted) = start(workdir), (time.monotonic() + 120, newest)
        while running.poll() is None and wanted == newest and until > time.monotonic():
            time.sleep(0.02)
            newest = max(steps(workdir), default=0)
        time.sleep(chance.uniform(0, 0.5))
        running.kill()
        if running.wait() == 0:
            break
        assert running.returncode == -signal.SIGKILL
        kills += 1
        newest = max(steps(workdir), default=0)
        print(f"kill {kills}: the newest checkpoint is {newest}")
    assert start(workdir).wait() == 0
    said = (tmp_path / "said").read_text()
    assert "damaged" not in said and "Traceback" not in said
    assert kills == 3 and said.count("resumed at step") >= 2
    assert bits(workdir) == bits(disk)
    assert numbers(workdir) == numbers(disk)


def test_a_store_that_does_not_answer_is_no_damage(runs, monkeypatch):
    """Otherwise a run would continue from an older checkpoint and delete newer ones."""

    def refuse(*_, **__):
        raise aiohttp.ClientConnectionError("Cannot connect to host")

    newest = runs[1] / "checkpoints" / "4"
    with monkeypatch.context() as patch:
        patch.setattr(record.ocp.JsonCheckpointHandler, "restore", refuse)
        with pytest.raises(OSError, match="meta cannot be read: ClientConnection"):
            record.read_meta(newest)
        patch.setattr(record.ocp.JsonCheckpointHandler, "restore", _aborted)
        with pytest.raises(OSError, match="meta cannot be read: ValueError: ABORTED"):
            record.read_meta(newest)
    assert record.read_meta(newest)["step"] == 4


def _aborted(*_, **__):
    raise ValueError("ABORTED: Error reading gs://models/manifest.ocdbt: All 32 retry")


def test_a_bucket_that_cannot_be_written_is_refused(bucket, text, capsys):
    capsys.readouterr()
    assert train(text, "gs://missing/run", steps=4, **SMALL) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --workdir 'gs://missing/run' cannot be written: ")
    assert not local_folder(epath.Path("gs://missing/run")).exists()
    assert call("eval", ["--workdir", f"{bucket}/nothing"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: no workdir '{bucket}/nothing': train.py makes one"


def test_metrics_that_cannot_be_copied_are_copied_later(
    runs, text, bucket, monkeypatch, capsys
):
    """They stay on the disk, and one line says so."""
    workdir, sent, refused = resolve(f"{bucket}/late"), mirror.upload, []

    def fails(workdir, name):
        if len(refused) < 2:
            refused.append(name)
            raise OSError(0, "HttpError: 503")
        sent(workdir, name)

    monkeypatch.setattr(mirror, "upload", fails)
    capsys.readouterr()
    assert train(text, workdir, steps=4, **SMALL) == 0
    said = capsys.readouterr().err
    assert said.count("cannot be copied to") == 1 and "HttpError: 503" in said
    assert numbers(workdir) == numbers(runs[0])
