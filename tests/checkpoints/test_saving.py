"""Saves that fail or are killed, and what is kept beside the newest checkpoint."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import jax
import pytest
from jax.experimental import multihost_utils
from saved import assert_bitwise, few, flip

from symjax.checkpoints.checkpoint import Checkpoints, NotSaved


def test_a_save_that_fails_is_one_line_and_the_next_one_works(tmp_path):
    tree = {"params": {"a": jax.random.normal(jax.random.key(0), (300, 1000))}}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(tmp_path, 9) as checkpoints:
        checkpoints.save(1, tree, {})
        checkpoints.wait()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
            checkpoints.save(2, tree, {})
            with pytest.raises(ValueError, match="2 cannot be written") as caught:
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "\n" not in str(caught.value)
        assert checkpoints.steps() == [1]
        checkpoints.save(2, tree, {})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2]


def test_a_save_does_not_ask_jax_whether_a_signal_has_come(tmp_path, monkeypatch):
    """A run asks once per step, and all processes must ask equally often."""
    asked = []
    ask = "reached_preemption_sync_point"
    monkeypatch.setattr(multihost_utils, ask, lambda x: asked.append(x) or True)
    with Checkpoints(tmp_path, 2) as checkpoints:
        checkpoints.save(7, {"params": few(1)["params"]}, {})
        checkpoints.wait()
        assert checkpoints.steps() == [7]
    assert asked == []


@contextlib.contextmanager
def full_disk():
    """Limit the size of files so that meta fits, but arrays do not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_saves_that_fail_take_nothing_with_them(tmp_path, capfd):
    """The only checkpoint stays until there is another one.

    Failed saves free their space and do not count as kept checkpoints.
    """
    tree = {"params": {"a": jax.random.normal(jax.random.key(0), (300, 1000))}}
    with Checkpoints(tmp_path, 1, best=True) as checkpoints:
        checkpoints.save(1, tree, {"heldout_loss": 2.0})
        checkpoints.wait()
        with full_disk():
            checkpoints.save(2, tree, {"heldout_loss": 1.0})
            checkpoints.save(3, tree, {"heldout_loss": 1.0})
            with pytest.raises(NotSaved, match="3 cannot be written"):
                checkpoints.wait()
        checkpoints.wait()  # said once
        assert [path.name for path in tmp_path.iterdir()] == ["1"]
        assert checkpoints.improves(1.5)
        checkpoints.save(4, tree, {})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 4]
        checkpoints.save(5, tree, {"heldout_loss": 1.5})
        checkpoints.wait()
        assert checkpoints.steps() == [5]
    said = [line for line in capfd.readouterr().err.splitlines() if "heckpoint" in line]
    assert len(said) == 1 and said[0].startswith("checkpoint 2 cannot be written to")
    assert said[0].endswith("continuing without it")


def test_the_best_stays_beside_the_newest(tmp_path):
    with Checkpoints(tmp_path, 2, best=True) as checkpoints:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 1.0)):
            checkpoints.save(step, few(step), {"heldout_loss": loss})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 4, 5]
    shapes = jax.eval_shape(lambda: few(1))
    with Checkpoints(tmp_path, 2, best=True) as checkpoints:
        checkpoints.restore(shapes)
        assert checkpoints.improves(0.9) and not checkpoints.improves(1.0)
        checkpoints.save(6, few(6), {"heldout_loss": 1.5})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 5, 6]
        trees, meta = checkpoints.restore(shapes, best=True)
        assert meta == checkpoints.read_meta(best=True)
        assert meta == {"step": 2, "heldout_loss": 1.0}
        assert_bitwise(trees, few(2))
        assert checkpoints.read_meta()["step"] == 6


def test_a_damaged_best_is_named_and_the_next_best_is_used(tmp_path):
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 4.0}
    with Checkpoints(tmp_path, 9) as checkpoints:
        for step, loss in losses.items():
            checkpoints.save(step, few(step), {"heldout_loss": loss})
    flip(tmp_path / "2" / "params" / "manifest.ocdbt")
    shutil.rmtree(tmp_path / "4" / "meta")  # its metric is unknown
    lines: list[str] = []
    shapes = jax.eval_shape(lambda: few(1))
    reader = Checkpoints(tmp_path)
    trees, meta = reader.restore(shapes, best=True, warn=lines.append)
    assert meta["step"] == 3
    assert_bitwise(trees, few(3))
    assert [line.split(" (")[0] for line in lines] == [
        "checkpoint 4 is damaged",
        "checkpoint 2 is damaged",
    ]
    with pytest.raises(ValueError, match="no checkpoint in .* has a held-out loss"):
        shutil.rmtree(tmp_path / "2")
        shutil.rmtree(tmp_path / "3")
        shutil.rmtree(tmp_path / "1")
        reader.restore(shapes, best=True)


FAILING = """
import resource, sys
from pathlib import Path
import jax
jax.config.update("jax_num_cpu_devices", 8)
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from symjax.checkpoints.checkpoint import Checkpoints

place = NamedSharding(Mesh(jax.devices(), "a"), PartitionSpec("a"))
value = jax.random.normal(jax.random.key(0), (400, 1000))
trees = {"params": {"a": jax.device_put(value, place)}}
shapes = {"params": {"a": jax.ShapeDtypeStruct((400, 1000), "float32", sharding=place)}}
checkpoints = Checkpoints(Path(sys.argv[1]), 9)
for step in (1, 2):
    checkpoints.save(step, trees, {})
checkpoints.wait()
for data in Path(sys.argv[1], "2", "params").glob("**/d/*"):
    if data.stat().st_size > 10_000:
        data.write_bytes(bytes(data.stat().st_size))
for _ in range(3):
    checkpoints.restore(shapes, warn=lambda line: None)
checkpoints.restore(shapes)
print("---", file=sys.stderr)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
checkpoints.save(3, trees, {})
try:
    checkpoints.close()
except ValueError as error:
    print(error, file=sys.stderr)
"""


def test_damage_is_one_line_and_a_full_disk_is_no_page(tmp_path):
    """In a process of its own, because pytest hides what threads of Orbax print."""
    done = subprocess.run(
        [sys.executable, "-c", FAILING, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=True,
    )
    damage, rest = done.stderr.split("---")
    assert len(damage.splitlines()) == 1, damage
    assert damage.startswith("checkpoint 2 is damaged (params cannot be read")
    assert "checkpoint 3 cannot be written" in rest
    assert "orbax" not in rest  # its pages; TensorStore may still add a line or two
    assert done.stdout == ""


CHILD = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from symjax.checkpoints.checkpoint import Checkpoints

checkpoints = Checkpoints(Path(sys.argv[1]), 2)
shapes = {"params": {"a": jax.ShapeDtypeStruct((1000, 1000), "uint32")}}
step = checkpoints.restore(shapes)[1]["step"] if checkpoints.steps() else 0
while True:
    step += 1
    value = jax.random.bits(jax.random.key(step), (1000, 1000))
    checkpoints.save(step, {"params": {"a": value}}, {})
    print(step, flush=True)
"""


@pytest.mark.slow
def test_the_newest_checkpoint_survives_kills_during_saves(tmp_path):
    # Integers, because two processes may round floats differently.
    shapes = {"params": {"a": jax.ShapeDtypeStruct((1000, 1000), "uint32")}}
    directory, last, interrupted = tmp_path / "checkpoints", 0, 0
    for delay in (0.0, 0.015, 0.03):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(directory)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        begun = [int(child.stdout.readline()) for _ in range(4)]
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        rest, errors = child.communicate()
        begun += [int(line) for line in rest.split()]
        assert child.returncode == -signal.SIGKILL and errors == b""
        assert begun[0] == last + 1
        interrupted += any("tmp" in path.name for path in directory.iterdir())
        lines: list[str] = []
        trees, meta = Checkpoints(directory).restore(shapes, warn=lines.append)
        last = meta["step"]
        assert lines == []
        assert begun[-1] - 1 <= last <= begun[-1]
        wanted = jax.random.bits(jax.random.key(last), (1000, 1000))
        assert_bitwise(trees["params"]["a"], wanted)
    assert interrupted


def test_what_ended_a_run_is_not_hidden_by_a_save_that_failed(
    tmp_path, monkeypatch, capsys
):
    def fail(self):
        raise NotSaved("checkpoint 3 cannot be written")

    monkeypatch.setattr(Checkpoints, "wait", fail)
    with pytest.raises(KeyError, match="the cause"):
        with Checkpoints(tmp_path / "one", 1):
            raise KeyError("the cause")
    assert capsys.readouterr().err == "checkpoint 3 cannot be written\n"
    with pytest.raises(NotSaved):
        with Checkpoints(tmp_path / "two", 1):
            pass
