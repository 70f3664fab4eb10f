"""train.py: refusals, output, and that a killed run loses nothing."""

import json
import os
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from runs import ROOT, SECONDS, call, compile_cache, packed, train, words

from symjax import config, validation
from symjax.checkpoints.checkpoint import Checkpoints
from symjax.data.corpus import open_corpus
from symjax.evaluation.loading import load
from symjax.training import compile
from symjax.training.sharding import make_mesh
from symjax.training.step import build_program

pytestmark = pytest.mark.usefixtures("cache")


REFUSED = [
    ({"data.path": "missing.txt"}, "missing.txt"),
    ({"data.path": "empty.txt"}, "empty file"),
    ({"data.path": "short.txt"}, "tokens"),
    ({"data.path": "binary.txt"}, "not UTF-8"),
    ({"data.path": "*.wibble"}, "matches no file"),
    ({"data.path": "."}, "is not UTF-8"),
    ({"data.path": ""}, "data.path"),
    ({"data.source": "stdlib"}, "data.path"),
    ({"model.length": 2000000}, "model.length + 1 = 2000001 are needed"),
    ({"model.vocabulary": 10}, "model.vocabulary 10 is smaller than the 256"),
    ({"batch_size": 9, "mesh.data": 8}, "batch_size 9 does not divide over mesh"),
    ({"optimizer.accumulate": 3}, "optimizer.accumulate 3"),
    ({"mesh.data": 7, "mesh.fsdp": 2}, "needs 14 devices, there are 8"),
    ({"mesh.sequence": 3}, "model.length 32 does not divide over mesh sequence 3"),
    ({"mesh.data": 0}, "mesh data 0"),
    ({"mesh.data": -1, "mesh.fsdp": -1}, "one may be -1"),
    ({"model.width": 31}, "model.width 31"),
    ({"model.kv_heads": 3}, "model.kv_heads 3 must divide model.heads 4"),
    ({"model.dropout": 1}, "model.dropout"),
    ({"optimizer.warmup": 9}, "optimizer.warmup 9 must be less than the 6 steps"),
    ({"optimizer.betas": "(1,1)"}, "optimizer.betas"),
    ({"optimizer.learning_rate": -1}, "optimizer.learning_rate"),
    ({"model.attention.key_norm": "unit"}, "model.attention.symmetric"),
    ({"model.attention.features": "elu"}, "model.attention.features"),
    ({"model.width": 1000000000}, "GiB a device"),
    ({"batch_size": 2000000000}, "GiB a device"),
]
# Two cases must not have the symmetric keys of diff_sym.
PLAIN = {"model.attention.symmetric": "none"}


@pytest.mark.parametrize(("changes", "said"), REFUSED, ids=[str(c) for c, _ in REFUSED])
def test_a_refused_start_is_one_line_and_leaves_nothing(
    changes, said, text, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("twelve words")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfd\x00")
    keys = PLAIN | changes if "model.attention.key_norm" in changes else changes
    before = sorted(tmp_path.rglob("*"))
    assert train(text, tmp_path / "a" / "b", **keys) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [x for x in captured.err.splitlines() if ": not read: " not in x]
    assert len(lines) == 1 and said in lines[0]
    assert sorted(tmp_path.rglob("*")) == before


def test_files_that_no_run_wrote_are_not_overwritten(text, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("mine")
    assert train(text, tmp_path, steps=1) == 2
    assert "has metrics.jsonl, but no run" in capsys.readouterr().err
    assert (tmp_path / "metrics.jsonl").read_text() == "mine"


def test_what_was_in_the_folder_of_a_refused_start_stays(text, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "metrics.jsonl").write_text("mine")
    assert train(text, tmp_path, optimizer__warmup=9) == 2
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == ["metrics.jsonl", "notes"]
    assert (tmp_path / "metrics.jsonl").read_text() == "mine"


@pytest.mark.parametrize("place", ["file", "file/run", "/proc/wibble/run"])
def test_a_workdir_that_cannot_be_written_is_named(place, text, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert train(text, tmp_path / place, steps=1) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --workdir {str(tmp_path / place)!r} cannot be")
    assert said.count("\n") == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_a_corpus_that_nothing_was_trained_on_does_not_block(text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[::-1])
    options = config.Data(source="text", path=str(other))
    open_corpus(options, tmp_path / "run" / "data")  # as if a start was killed here
    assert train(text, tmp_path / "run", steps=1) == 0


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    text, tmp_path, capsys
):
    assert train(text, tmp_path, steps=4, checkpoint__every=2) == 0
    damage(tmp_path / "checkpoints" / "4")
    capsys.readouterr()
    assert train(text, tmp_path, steps=4, checkpoint__every=2) == 0
    said = capsys.readouterr().err
    assert "checkpoint 4 is damaged" in said and "restored 2 instead" in said
    assert "resumed at step 2" in said


@pytest.mark.slow
def test_a_run_may_go_on_as_a_loop_and_back(text, tmp_path):
    def losses(folder):
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [row["train/loss"] for row in rows if "train/loss" in row]

    listed, mixed = tmp_path / "list", tmp_path / "mixed"
    shared = {"model__depth": 2, "log__every": 1, "checkpoint__every": 0}
    shared["optimizer__eps"] = (
        1e-6  # Adam does not turn rounding noise into a whole step
    )
    assert train(text, listed, steps=6, **shared) == 0
    # the same learning rates as in a run of six steps
    shared["optimizer__decay_steps"] = 6
    for steps, loop, remat in (
        (2, True, "none"),
        (4, False, "full"),
        (6, True, "dots"),
    ):
        changes = {"model__scan_layers": loop, "model__remat": remat, "steps": steps}
        assert train(text, mixed, **shared, **changes) == 0
    np.testing.assert_allclose(losses(mixed), losses(listed), rtol=0, atol=5e-6)
    assert load(mixed).config.model.scan_layers


def test_a_damaged_corpus_is_named(text, tmp_path, capsys):
    keys = {"data__cache": tmp_path / "cache"}
    assert train(text, tmp_path, steps=1, **keys) == 0
    path = packed(tmp_path, tmp_path / "cache") / "train.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    capsys.readouterr()
    assert train(text, tmp_path, steps=2, **keys) == 2
    said = capsys.readouterr().err
    assert str(path) in said and said.count("\n") == 1
    assert Checkpoints(tmp_path / "checkpoints").steps() == [1]


def damage(checkpoint):
    for path in checkpoint.glob("params/**/d/*"):
        path.write_bytes(b"\0" * path.stat().st_size)


def test_the_dry_run_prints_the_model_and_writes_nothing(
    text, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert train(text, None, "--dry_run") == 0
    said = capsys.readouterr().out
    assert "parameters          28,376\n" in said
    assert "tokens a step       256\n" in said
    assert "tokens of the run   1,536 in 6 steps, 0.0541 a parameter\n" in said
    assert re.search(r"to decode a text    MiB by number of tokens: .* at 8\b", said)
    for word in ("blocks/*/attention/query/kernel", "FLOPs a step", "MiB", "mesh"):
        assert word in said
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_simulates_a_mesh_that_is_larger_than_the_machine(text, tmp_path):
    changes = {"mesh__fsdp": 16, "mesh__data": -1, "batch_size": 32, "model__depth": 2}
    changes |= {"model__scan_layers": True, "model__remat": "full"}
    arguments = words(text, None, "--dry_run", **changes)
    running = process([*arguments, "--config.mesh.tensor=2"], tmp_path)
    said, error = running.communicate(timeout=SECONDS)
    assert running.returncode == 0, error
    mesh = "{'data': 1, 'fsdp': 16, 'tensor': 2, 'sequence': 1}"
    assert f"mesh                {mesh} of simulated CPU devices\n" in said
    # 40,048 parameters and two moments of 4 bytes; only small vectors are not split
    found = re.search(r"([\d.]+) MiB: weights ([\d.]+), optimizer ([\d.]+)", said)
    total, weights, optimizer = (float(size) * 2**20 for size in found.groups())
    assert total > weights + optimizer
    assert weights < 40_048 * 4 / 3 and optimizer < 2 * 40_048 * 4 / 3
    assert re.search(r"all-gather +[\d.]+ MiB in \d+\n", said)
    assert re.search(r"32 × TPU v5e +16 GB +yes ", said)


def test_help_needs_nothing_but_the_word(capsys):
    assert call("train", ["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"--config.{name} (" in said for name, _, _ in validation.fields())


def test_the_compile_cache_is_the_users_unless_jax_has_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with compile_cache(tmp_path / "elsewhere"):
        compile.use_compile_cache()
        assert jax.config.jax_compilation_cache_dir == f"{tmp_path}/elsewhere"
        jax.config.update("jax_compilation_cache_dir", None)
        compile.use_compile_cache()
        assert jax.config.jax_compilation_cache_dir == f"{tmp_path}/symjax/jax"


def process(arguments, cache, program=("train.py",), **options):
    """Run Python with one device, writing only to the cache folder."""
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache)}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment.pop("XLA_FLAGS", None)
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_a_process_ends_with_the_code_and_one_line(tmp_path):
    arguments = ["--config", "configs/diff_sym.py:tiny", "--config.wibble=1"]
    running = process([*arguments, "--workdir", str(tmp_path / "run")], tmp_path)
    out, err = running.communicate(timeout=SECONDS)
    assert running.returncode == 2 and out == ""
    first, line = err.splitlines()
    assert first == "train.py starts: importing jax, which takes a while"
    assert line.startswith("error: config.wibble is unknown")
    assert not (tmp_path / "run").exists()


KILLED = """
import os, signal, sys, train
from symjax.training import loop

report = loop.report

def killed(run, done, metrics):
    report(run, done, metrics)
    if done == 13:
        run.checkpoints.wait()
        os.kill(os.getpid(), signal.SIGKILL)

loop.report = killed
train.main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "accumulate",
    [pytest.param(1, marks=pytest.mark.slow), 2],
    ids="accumulate {}".format,
)
def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(
    accumulate, text, tmp_path
):
    changes = {"steps": 20, "checkpoint__every": 10, "log__every": 1}
    changes |= {"model__dropout": 0.2, "optimizer__accumulate": accumulate}
    cache, whole, parts = (tmp_path / name for name in ("cache", "whole", "parts"))
    there = words(text, parts, **changes)
    other = process(words(text, whole, **changes), cache)
    killed = process(there, cache, program=("-c", KILLED))
    killed.communicate(timeout=SECONDS)
    assert killed.returncode == -signal.SIGKILL
    assert Checkpoints(parts / "checkpoints").steps() == [10]
    assert logged(parts)[-1] == 13
    resumed = process(there, cache)
    _, said = resumed.communicate(timeout=SECONDS)
    assert resumed.returncode == 0 and "resumed at step 10" in said
    other.communicate(timeout=SECONDS)
    assert other.returncode == 0
    assert logged(parts) == logged(whole) == list(range(1, 21))
    left, right = arrays(whole), arrays(parts)
    assert left.keys() == right.keys() and len(left) > 40
    for name in left:
        assert left[name].tobytes() == right[name].tobytes(), name


def logged(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    found = map(json.loads, lines)
    return [row["step"] for row in found if "train/loss" in row]


def arrays(workdir):
    """Return every array of the newest checkpoint by path."""
    options = load(workdir).config
    program = build_program(options, make_mesh(options.mesh))
    abstract = {"params": program.state.params, "optimizer": program.state.optimizer}
    trees, meta = Checkpoints(workdir / "checkpoints").restore(abstract)
    assert meta["step"] == 20
    leaves, _ = jax.tree_util.tree_flatten_with_path(trees)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
