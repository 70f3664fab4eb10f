"""Runs survive damage, kills, a full disk, a second process, and hostile files."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from runs import ROOT, call, train, words

from symjax.checkpoints import record
from symjax.checkpoints.checkpoint import Checkpoints
from symjax.evaluation.loading import load
from symjax.training import heldout
from symjax.training.step import Means
from symjax.training.workdir import LOCK, locked

pytestmark = pytest.mark.usefixtures("cache")

SMALL = {"model__width": 16, "checkpoint__every": 2, "log__every": 1}


@pytest.fixture(scope="module")
def original(text, tmp_path_factory):
    """Return a run with checkpoints 2 and 4, and trees to restore them."""
    workdir = tmp_path_factory.mktemp("original") / "run"
    assert train(text, workdir, steps=4, **SMALL) == 0
    return workdir


@pytest.fixture
def workdir(original, tmp_path):
    shutil.copytree(original, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def shapes(original):
    program = load(original).program
    state = program.state
    return {"params": state.params, "optimizer": state.optimizer}


def bits(workdir, shapes, step=None):
    """Return every array, its step, and the messages."""
    said: list[str] = []
    checkpoints = Checkpoints(workdir / "checkpoints")
    trees, meta = checkpoints.restore(shapes, step, warn=said.append)
    leaves = jax.tree_util.tree_flatten_with_path(trees)[0]
    arrays = {jax.tree_util.keystr(p): np.asarray(x).tobytes() for p, x in leaves}
    return arrays, meta["step"], said


def steps(workdir):
    return Checkpoints(workdir / "checkpoints").steps()


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


def delete(path):
    path.unlink()


def flip(path, place=0.5):
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 4
    path.write_bytes(content)


def files(checkpoint):
    found = [path for path in checkpoint.rglob("*") if path.is_file()]
    return sorted(path.relative_to(checkpoint) for path in found)


def restored_or_named(workdir, shapes, wanted):
    """Return whether the newest checkpoint was refused; no third outcome is allowed."""
    arrays, step, said = bits(workdir, shapes)
    assert arrays == wanted[step]
    if step == 4:
        assert said == []
        return False
    (line,) = said
    assert line.startswith("checkpoint 4 is damaged (")
    assert line.endswith("): restored 2 instead") and len(line) < 250
    return True


@pytest.fixture(scope="module")
def wanted(original, shapes):
    return {step: bits(original, shapes, step)[0] for step in (2, 4)}


@pytest.mark.parametrize(
    ("damage", "pattern"),
    [
        (truncate, "params/ocdbt.process_0/d/*"),
        (zero, "optimizer/manifest.ocdbt"),
        (delete, "meta/metadata"),
        (flip, "optimizer/ocdbt.process_0/d/*"),
        (flip, "meta/metadata"),
        (truncate, "params/d/*"),
    ],
)
def test_a_damaged_file_is_named(damage, pattern, workdir, shapes, wanted):
    paths = [*(workdir / "checkpoints" / "4").glob(pattern)]
    damage(max(paths, key=lambda path: path.stat().st_size))
    assert restored_or_named(workdir, shapes, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [truncate, zero, delete, flip])
def test_damage_to_any_file_of_a_trained_model_is_harmless_or_named(
    damage, workdir, shapes, wanted
):
    """Damage each file in turn; flip a bit at nine places of the file."""
    newest = workdir / "checkpoints" / "4"
    places = np.linspace(0, 1, 9) if damage is flip else [None]
    tried = named = 0
    for name in files(newest):
        whole = (newest / name).read_bytes()
        for place in places if whole else ():
            damage(newest / name, *([] if place is None else [place]))
            named += restored_or_named(workdir, shapes, wanted)
            tried += 1
            (newest / name).write_bytes(whole)
    print(f"{damage.__name__}: {tried} damages, {named} named, the others harmless")
    assert restored_or_named(workdir, shapes, wanted) is False
    assert named >= 6


@pytest.mark.slow
def test_a_checkpoint_deleted_up_to_any_file_is_harmless_or_named(
    workdir, shapes, wanted
):
    newest = workdir / "checkpoints" / "4"
    found = files(newest)
    named = 0
    for name in found:
        (newest / name).unlink()
        named += restored_or_named(workdir, shapes, wanted)
    print(f"{len(found)} stages of a deletion, {named} named")
    assert named > len(found) // 2


def test_torn_empty_and_stray_directories_do_not_stop_a_run(
    workdir, shapes, text, tmp_path, capsys
):
    """As kills leave them: during a deletion, during a save, before the first file."""
    checkpoints = workdir / "checkpoints"
    for path in files(checkpoints / "4")[::2]:
        (checkpoints / "4" / path).unlink()
    (checkpoints / "5").mkdir()
    (checkpoints / "6" / "params").mkdir(parents=True)
    shutil.copytree(checkpoints / "2", checkpoints / "8.orbax-checkpoint-tmp")
    (checkpoints / "notes").mkdir()
    capsys.readouterr()
    assert train(text, workdir, steps=8, optimizer__decay_steps=4, **SMALL) == 2
    assert "optimizer.decay_steps" in capsys.readouterr().err
    assert load(workdir).step == 2
    assert len(capsys.readouterr().err.splitlines()) == 3
    assert train(text, workdir, steps=4, **SMALL) == 0
    said = capsys.readouterr().err
    for step in (4, 5, 6):
        assert said.count(f"checkpoint {step} is damaged (") == 1
    assert "resumed at step 2" in said and "Traceback" not in said
    assert steps(workdir) == [2, 4]
    assert bits(workdir, shapes)[1:] == (4, [])


def test_eval_names_the_damage_in_one_line(workdir, quiet, capsys):
    zero(workdir / "checkpoints" / "4" / "params" / "manifest.ocdbt")
    capsys.readouterr()
    assert call("eval", ["--workdir", str(workdir), "--tokens", "1"]) == 0
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("checkpoint 4 is damaged (params cannot be read")
    assert "\nstep 2, " in captured.out


def test_the_second_process_in_a_workdir_is_refused(workdir, text, capsys):
    before = files(workdir)
    with locked(workdir):
        capsys.readouterr()
        assert train(text, workdir, steps=9, **SMALL) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(
            f"error: --workdir {str(workdir)!r} is in use by process"
        )
        assert str(os.getpid()) in line
        assert load(workdir).step == 4  # reading is allowed
    assert files(workdir) == before


def test_a_lock_that_a_kill_left_is_no_lock(workdir):
    (workdir / LOCK).write_text("1")
    with locked(workdir), pytest.raises(ValueError, match=f" {os.getpid()}:"):
        with locked(workdir):
            pass
    assert not (workdir / LOCK).exists()


FULL = """
import sys
sys.path.insert(0, "tests")
from pathlib import Path
from runs import compile_cache, train
from symjax.training import loop
from symjax.checkpoints.checkpoint import Checkpoints

disk, text, cache = map(Path, sys.argv[1:])
fill, report, give_up = disk / "fill", loop.report, Checkpoints._give_up

def reported(run, done, metrics):
    report(run, done, metrics)
    if done in (7, 17):
        run.checkpoints.settle()
        with open(fill, "wb", buffering=0) as file:
            try:
                while file.write(b" " * 256):
                    pass
            except OSError:
                pass

def given_up(self, step, error):
    give_up(self, step, error)
    if step == 10:
        fill.unlink()

loop.report, Checkpoints._give_up = reported, given_up
changes = {"model__width": 16, "checkpoint__every": 5, "log__every": 1, "steps": 20}
with compile_cache(cache):
    print("---", train(text, disk / "run", **changes), file=sys.stderr)
    fill.unlink()
    loop.report = report
    print("---", train(text, disk / "run", **changes), file=sys.stderr)
print(*sorted(path.name for path in (disk / "run" / "checkpoints").iterdir()))
print((disk / "run" / "metrics.jsonl").read_text())
"""
TMPFS = 'mount -t tmpfs -o size="$1" tmpfs "$2" || exit 77; shift 2; exec "$@"'


def on_a_small_disk(size, disk, words):
    """Run a process that sees a disk of this size."""
    place = ["unshare", "-rm", "bash", "-c", TMPFS, "bash", size, str(disk)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            [*place, *words], cwd=ROOT, env=environment, capture_output=True, text=True
        )
    except FileNotFoundError:
        pytest.skip("unshare or bash is missing here")
    if done.returncode in (1, 77) and (
        "mount" in done.stderr or "unshare" in done.stderr
    ):
        pytest.skip(f"mounting is not allowed here: {done.stderr.splitlines()[-1]}")
    return done


@pytest.mark.slow
def test_a_full_disk_is_a_warning_and_at_the_end_an_error(text, tmp_path):
    """The disk is full in steps 7 to 10 and from step 17 on.

    It has room again after the failed save of step 10, so 15 is there. The save of step
    20 ends the run with one line, and the same command continues from 15.
    """
    (tmp_path / "disk").mkdir()
    script = [sys.executable, "-c", FULL, tmp_path / "disk", text, tmp_path / "cache"]
    done = on_a_small_disk("4m", tmp_path / "disk", map(str, script))
    assert done.returncode == 0, done.stderr
    first, second, rest = done.stderr.split("---")
    assert second.startswith(" 2") and rest.startswith(" 0"), done.stderr
    lines = first.splitlines()
    (missing,) = [line for line in lines if line.startswith("checkpoint 10 cannot be")]
    assert "No space left" in missing and missing.endswith("continuing without it")
    assert lines[-1].startswith("error: checkpoint 20 cannot be written to")
    assert "Traceback" not in done.stderr
    assert "resumed at step 15" in second
    names, *rows = done.stdout.split("\n")
    assert names == "15 20"
    logged = [json.loads(row) for row in rows if row]
    assert [row["step"] for row in logged if "train/loss" in row] == [*range(1, 21)]


class Evil:
    """A class that writes a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


watched: list[tuple[str, str]] = []
watching = False


def watch(event, arguments):
    """Record what is unpickled, and the files of code that runs."""
    if watching and event in ("pickle.find_class", "exec", "import", "os.system"):
        code = getattr(arguments[0], "co_filename", arguments)
        watched.append((event, str(code)))


@pytest.fixture
def audit():
    """Return the audit events of the interpreter during a test."""
    global watching
    watched.clear()
    watching = True
    yield watched
    watching = False


sys.addaudithook(watch)  # it cannot be removed, only switched off


def test_no_code_of_a_checkpoint_runs(
    workdir, shapes, wanted, tmp_path, monkeypatch, audit
):
    mark = tmp_path / "run" / "mark"
    payload, line = pickle.dumps(Evil(mark)), f"open({str(mark)!r}, 'w')\n"
    newest = workdir / "checkpoints" / "4"
    for folder in (workdir, newest, *(newest / item for item in ("meta", "params"))):
        for name in ("__init__.py", "sitecustomize.py", "conftest.py", "handler.py"):
            (folder / name).write_text(line)
        for name in ("params.pkl", "metadata.pkl", "_METADATA.pickle"):
            (folder / name).write_bytes(payload)
        np.save(folder / "array.npy", np.array(Evil(mark)), allow_pickle=True)
    described = json.loads((newest / "_CHECKPOINT_METADATA").read_text())
    described["item_handlers"] = dict.fromkeys(
        described["item_handlers"], "handler.Evil"
    )
    (newest / "_CHECKPOINT_METADATA").write_text(json.dumps(described))
    monkeypatch.chdir(newest)
    assert bits(workdir, shapes) == (wanted[4], 4, [])
    hidden = ("params/_METADATA", "params/_sharding", "params/checkpoint")
    for name in (*hidden, "meta/metadata"):
        (newest / name).write_bytes(payload)
        arrays, step, _ = bits(workdir, shapes)
        assert arrays == wanted[step]
    assert step == 2  # without its meta
    assert load(workdir).step == 2
    assert not mark.exists()
    assert [what for _, what in audit if str(tmp_path) in what] == []
    assert {event for event, _ in audit} <= {"exec", "import"}
    pickle.loads(payload)
    assert (
        mark.exists() and audit[-1][0] == "pickle.find_class"
    )  # it would have been found


HOSTILE = [
    ({"model": "__import__('os').system('touch mark')"}, "model is a group of keys"),
    ({"model.width": "__import__('os').getpid()"}, "model.width must be int"),
    ({"__class__": "os.system"}, "__class__ is unknown"),
    ({"model.wibble": 1}, "model.wibble is unknown"),
    ({"model.width": -1}, "model.width must be at least 1"),
    ({"batch_size": 10**400}, "batch_size must be at most 2147483647, got 1000"),
    ({"optimizer.learning_rate": 10**400}, "too large"),
    ({"optimizer.eps": float("nan")}, "optimizer.eps must be"),
    ({"model.attention.mechanism": ["softmax"]}, "model.attention.mechanism must be"),
    ({"data.source": "../../etc"}, "data.source '../../etc' is unknown"),
    ({"": None}, "has no configuration"),
    ({"": []}, "has no configuration"),
]


@pytest.mark.parametrize(("changes", "said"), HOSTILE, ids=[s for _, s in HOSTILE])
def test_a_hostile_configuration_is_refused_in_one_line(
    changes, said, workdir, text, monkeypatch, capsys
):
    """Under a correct seal, which any writer of the file can compute."""
    monkeypatch.chdir(workdir)
    for step in ("2", "4"):
        path = workdir / "checkpoints" / step / "meta" / "metadata"
        document = json.loads(path.read_text())
        for name, value in changes.items():
            put(document["meta"], name, value)
        del document["checksum"]
        document["checksum"] = record._seal(document)
        path.write_text(json.dumps(document))
    before = files(workdir)
    capsys.readouterr()
    for program, arguments in (
        ("eval", ["--workdir", str(workdir)]),
        ("train", words(text, workdir, steps=4, **SMALL)),
    ):
        assert call(program, arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and "checkpoint 4 of" in line and said in line
    assert files(workdir) == before


def put(meta, name, value):
    if not name:
        meta["config"] = value
        return
    *groups, last = name.split(".")
    tree = meta["config"]
    for group in groups:
        tree = tree[group]
    tree[last] = value


@pytest.mark.slow
def test_the_best_is_kept_apart_and_never_made_way_for_a_bad_one(
    text, tmp_path, monkeypatch, capsys
):
    losses = {1: 3.0, 3: 1.0, 5: 2.0, 6: 2.5}

    def judged(run, state, count):
        return Means(losses[int(state.step)], 0.0)

    changes = {**SMALL, "evaluate__every": 1, "checkpoint__best": True}
    changes |= {"checkpoint__keep": 1, "optimizer__decay_steps": 9}
    monkeypatch.setattr(heldout, "measure", judged)
    losses |= {2: 2.9, 4: 1.0}
    assert train(text, tmp_path, steps=6, **changes) == 0
    assert steps(tmp_path) == [3, 6]
    losses |= {7: float("nan"), 8: 0.5}
    assert train(text, tmp_path, steps=8, **changes) == 1
    assert "held-out loss is nan at step 7; the last" in capsys.readouterr().err
    assert steps(tmp_path) == [3, 6]
    assert load(tmp_path, best=True).step == 3 and load(tmp_path).step == 6
    losses[7] = 0.9
    assert train(text, tmp_path, steps=8, **changes) == 0
    assert steps(tmp_path) == [8]
    assert call("eval", ["--workdir", str(tmp_path), "--best", "--step", "3"]) == 2


@pytest.mark.slow
def test_kills_lose_nothing(tmp_path, monkeypatch):
    """A short form of benchmarks/kills.py, which kills a hundred times."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    from benchmarks import kills

    monkeypatch.setattr(kills, "SHARES", {"save": 1})
    result = kills.measure(tmp_path, kills=2, seed=1, steps=80, every=10)
    assert len(result.killed) == 2 and result.good(), result
    assert (tmp_path / "run-0" / "metrics.jsonl").exists()
    assert not (tmp_path / "run-0" / "lock").exists()
