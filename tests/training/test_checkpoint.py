"""Checkpoints: what comes back after a save, a kill, and every kind of damage."""

import contextlib
import functools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from symjax.training.checkpoint import Checkpoints, NotSaved

ITEMS = ("params", "constants", "optimizer")


def mesh(rows, columns):
    devices = jax.devices()[: rows * columns]
    axis_types = (AxisType.Auto,) * 2
    return jax.make_mesh((rows, columns), ("a", "b"), axis_types, devices=devices)


def sharding(shape, leaf):
    """Over all devices, along the first axis of a length that eight divides."""
    axes = []
    for size in leaf.shape:
        axes.append(("a", "b") if size and size % 8 == 0 and not any(axes) else None)
    return NamedSharding(mesh(*shape), PartitionSpec(*axes))


def abstract(trees, shape=(4, 2)):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding(shape, leaf)
        ),
        trees,
    )


def make(step, shape=(4, 2)):
    """Trees that differ at every step, with every kind of leaf."""
    key = jax.random.key(step)
    params = {
        "embed": {"embedding": jax.random.normal(key, (40, 24))},
        "blocks": {
            0: {"kernel": jax.random.normal(key, (24, 16)), "lambda_1": jnp.ones(5)},
            1: {"kernel": jax.random.normal(key, (7, 3)), "empty": jnp.zeros((0, 8))},
        },
    }
    constants = {
        "half": jax.random.normal(key, (8, 2), jnp.bfloat16),
        "count": jnp.int32(step),
        "mask": jnp.arange(9) % (step + 2) == 0,
        "bits": jax.random.bits(key, (3, 8)),
    }
    transform = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            optax.linear_schedule(1.0, 0.0, 9), mask={"embed": True, "blocks": False}
        ),
    )
    moments = transform.init(params)
    trees = {"params": params, "constants": constants, "optimizer": moments}
    moved = jax.tree.map(lambda leaf: leaf + leaf.dtype.type(step), trees["optimizer"])
    trees = {**trees, "optimizer": moved}
    return jax.tree.map(lambda x: jax.device_put(x, sharding(shape, x)), trees)


def assert_bitwise(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def save(directory, *steps, keep=9):
    with Checkpoints(directory, keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, make(step), {"config": {"seed": step}})


def restore(directory, items=ITEMS, step=None):
    """(trees, meta, warnings) of a checkpoint opened for reading."""
    lines: list[str] = []
    wanted = {item: tree for item, tree in abstract(make(1)).items() if item in items}
    trees, meta = Checkpoints(directory).restore(wanted, step, warn=lines.append)
    return trees, meta, lines


def flip(path, place=0.5):
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 16
    path.write_bytes(content)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two") / "checkpoints"
    save(directory, 1000, 1200)
    return directory


@pytest.fixture
def copy(two_steps, tmp_path):
    shutil.copytree(two_steps, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def test_every_kind_of_leaf_comes_back_bitwise(two_steps):
    trees, meta, lines = restore(two_steps)
    assert_bitwise(trees, make(1200))
    assert meta == {"config": {"seed": 1200}, "step": 1200}
    assert lines == []
    assert all(
        leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
        for leaf, wanted in zip(
            jax.tree.leaves(trees), jax.tree.leaves(abstract(make(1))), strict=True
        )
    )


@pytest.mark.parametrize("shape", [(8, 1), (2, 4), (1, 8), (2, 2), (1, 1)])
def test_another_mesh_changes_nothing(two_steps, shape):
    shapes = abstract(make(1), shape)
    trees, _ = Checkpoints(two_steps).restore(shapes)
    assert_bitwise(trees, make(1200))


def test_without_shardings_arrays_go_to_the_default_device(two_steps):
    shapes = jax.eval_shape(lambda: make(1)["params"])
    trees, _ = Checkpoints(two_steps).restore({"params": shapes})
    assert_bitwise(trees["params"], make(1200)["params"])
    assert trees["params"]["embed"]["embedding"].devices() == {jax.devices()[0]}


def test_float64_comes_back_bitwise(tmp_path, x64):
    tree = {"params": {"wide": jax.random.normal(jax.random.key(0), (5, 3))}}
    assert tree["params"]["wide"].dtype == jnp.float64
    with Checkpoints(tmp_path, 1) as checkpoints:
        checkpoints.save(1, tree, {})
        assert_bitwise(checkpoints.restore(jax.eval_shape(lambda: tree))[0], tree)


def test_empty_trees_are_fine(tmp_path):
    trees = {
        "params": {"a": jnp.ones(3)},
        "constants": {},
        "optimizer": optax.EmptyState(),
        "no_elements": {"deep": [jnp.zeros((0, 2))]},
    }
    with Checkpoints(tmp_path, 1) as checkpoints:
        checkpoints.save(1, trees, {})
        assert_bitwise(checkpoints.restore(jax.eval_shape(lambda: trees))[0], trees)


def test_meta_is_read_without_any_array(copy):
    for item in ITEMS:
        shutil.rmtree(copy / "1200" / item)
    checkpoints = Checkpoints(copy)
    assert checkpoints.read_meta() == {"config": {"seed": 1200}, "step": 1200}
    assert checkpoints.read_meta(1000) == {"config": {"seed": 1000}, "step": 1000}


def test_meta_may_hold_what_is_not_a_number(tmp_path):
    with Checkpoints(tmp_path, 1) as checkpoints:
        checkpoints.save(1, {"params": {"a": jnp.ones(3)}}, {"best": float("nan")})
    assert str(Checkpoints(tmp_path).read_meta()["best"]) == "nan"


def test_buffers_may_be_donated_as_soon_as_save_returns(tmp_path):
    grid = NamedSharding(mesh(4, 2), PartitionSpec(("a", "b")))
    overwrite = jax.jit(
        lambda tree: jax.tree.map(lambda x: x * 0 + 7, tree), donate_argnums=0
    )
    with Checkpoints(tmp_path, 9) as checkpoints:
        for step in (1, 2, 3):
            wanted = np.random.default_rng(step).normal(size=(1000, 1000))
            tree = {"params": {"a": jax.device_put(jnp.float32(wanted), grid)}}
            checkpoints.save(step, tree, {})
            jax.block_until_ready(overwrite(overwrite(tree)))
        for step in (1, 2, 3):
            wanted = np.random.default_rng(step).normal(size=(1000, 1000))
            trees, _ = checkpoints.restore(jax.eval_shape(lambda: tree), step)
            np.testing.assert_array_equal(trees["params"]["a"], np.float32(wanted))


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def empty(path):
    if path.is_dir():
        shutil.rmtree(path)
        path.mkdir()
    else:
        path.write_bytes(b"")


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


DAMAGE = {
    "removed": remove,
    "emptied": empty,
    "truncated": truncate,
    "zeroed": zero,
    "early_byte_flipped": functools.partial(flip, place=0.2),
    "middle_byte_flipped": functools.partial(flip, place=0.5),
    "last_byte_flipped": functools.partial(flip, place=1.0),
}


def few(step):
    """One tree an item, small: a restore for every file of it is to take no time."""
    key = jax.random.key(step)
    return {
        "params": {"kernel": jax.random.normal(key, (40, 30)), "bias": jnp.ones(3)},
        "constants": {"projection": jax.random.normal(key, (4, 4))},
        "optimizer": {"count": jnp.int32(step)},
    }


@pytest.fixture(scope="module")
def two_small_steps(tmp_path_factory):
    directory = tmp_path_factory.mktemp("small")
    with Checkpoints(directory, 2) as checkpoints:
        for step in (1000, 1200):
            checkpoints.save(step, few(step), {})
    return directory


@pytest.mark.parametrize(
    "kind",
    [
        kind
        if kind in ("truncated", "removed", "middle_byte_flipped")
        else pytest.param(kind, marks=pytest.mark.slow)
        for kind in DAMAGE
    ],
)
def test_damage_to_any_file_is_harmless_or_named(
    two_small_steps, tmp_path, kind, capfd
):
    """To each file and folder of the newest checkpoint in turn. Some of them Orbax
    only keeps for itself, so they may be lost; the others must be missed."""
    newest = two_small_steps / "1200"
    paths = [path for path in newest.rglob("*") if path.is_dir() or path.read_bytes()]
    if kind not in ("removed", "emptied"):
        paths = [path for path in paths if path.is_file()]
    wanted = {step: few(step) for step in (1000, 1200)}
    shapes, named = jax.eval_shape(lambda: few(1)), 0
    for path in paths:
        shutil.copytree(two_small_steps, tmp_path / "copy")
        DAMAGE[kind](tmp_path / "copy" / path.relative_to(two_small_steps))
        lines: list[str] = []
        checkpoints = Checkpoints(tmp_path / "copy")
        trees, meta = checkpoints.restore(shapes, warn=lines.append)
        assert_bitwise(trees, wanted[meta["step"]])
        if meta["step"] == 1000:
            (line,) = lines
            assert line.startswith("checkpoint 1200 is damaged (")
            assert line.endswith("): restored 1000 instead")
            assert "\n" not in line and len(line) < 250
            named += 1
        else:
            assert meta["step"] == 1200 and lines == []
        shutil.rmtree(tmp_path / "copy")
    assert named >= 7  # meta, and a manifest and data of each of three items


@pytest.mark.parametrize("kind", ["removed", "emptied"])
def test_a_checkpoint_that_lost_everything_is_no_obstacle(copy, kind):
    DAMAGE[kind](copy / "1200")
    _, meta, lines = restore(copy)
    assert meta["step"] == 1000
    assert len(lines) == (kind == "emptied")


def test_a_flipped_bit_of_an_array_is_named_by_its_path(two_small_steps, tmp_path):
    """Orbax restores this one without a word."""
    shutil.copytree(two_small_steps, tmp_path / "copy")
    files = [p for p in (tmp_path / "copy" / "1200").rglob("*") if p.is_file()]
    flip(max(files, key=lambda path: path.stat().st_size))
    shapes, lines = jax.eval_shape(lambda: few(1)), []
    checkpoints = Checkpoints(tmp_path / "copy")
    trees, _ = checkpoints.restore(shapes, warn=lines.append)
    assert_bitwise(trees, few(1000))
    assert lines == [
        "checkpoint 1200 is damaged (params/kernel does not match its checksum): "
        "restored 1000 instead"
    ]
    with pytest.raises(ValueError, match="1200 is damaged .*kernel does not match"):
        checkpoints.restore(shapes, 1200)


@pytest.mark.parametrize(
    "error", [MemoryError("no room"), PermissionError("not yours")]
)
def test_a_machine_that_cannot_read_is_not_called_damage(
    two_small_steps, monkeypatch, error
):
    def refuse(*_, **__):
        raise RuntimeError("as Orbax wraps it") from error

    monkeypatch.setattr(ocp.StandardCheckpointHandler, "restore", refuse)
    with pytest.raises(type(error), match=str(error)):
        Checkpoints(two_small_steps).restore(jax.eval_shape(lambda: few(1)))


def test_a_changed_word_of_the_meta_is_named(copy):
    path = copy / "1200" / "meta" / "metadata"
    document = json.loads(path.read_text())
    document["meta"]["config"]["seed"] = 7
    path.write_text(json.dumps(document))
    _, meta, lines = restore(copy)
    assert meta["config"]["seed"] == 1000
    assert "meta does not match its checksum" in lines[0]
    assert Checkpoints(copy).read_meta()["step"] == 1000


def test_a_renamed_checkpoint_is_named(copy):
    (copy / "1200").rename(copy / "1300")
    _, meta, lines = restore(copy)
    assert meta["step"] == 1000
    assert lines == [
        "checkpoint 1300 is damaged (meta is that of step 1200): restored 1000 instead"
    ]


def test_each_damaged_checkpoint_on_the_way_is_named(tmp_path):
    save(tmp_path, 1, 2, 3)
    empty(tmp_path / "3")
    remove(tmp_path / "2" / "optimizer")
    _, meta, lines = restore(tmp_path)
    assert meta["step"] == 1
    assert [line.split(" (")[0] for line in lines] == [
        "checkpoint 3 is damaged",
        "checkpoint 2 is damaged",
    ]


def test_an_item_that_is_not_asked_for_may_be_damaged(copy):
    remove(copy / "1200" / "optimizer")
    trees, meta, lines = restore(copy, items=("params", "constants"))
    assert meta["step"] == 1200 and lines == []
    wanted = make(1200)
    assert_bitwise(trees, {item: wanted[item] for item in ("params", "constants")})


def test_none_left_is_one_line(copy):
    for step in ("1000", "1200"):
        flip(copy / step / "params" / "manifest.ocdbt")
    with pytest.raises(ValueError, match="no checkpoint is whole") as caught:
        restore(copy)
    message = str(caught.value)
    assert "1000 is damaged" in message and "1200 is damaged" in message
    assert "\n" not in message


def test_a_damaged_step_asked_for_is_refused(copy):
    flip(copy / "1200" / "params" / "manifest.ocdbt")
    with pytest.raises(
        ValueError, match="checkpoint 1200 is damaged .*params cannot be read"
    ):
        restore(copy, step=1200)
    assert restore(copy, step=1000)[1]["step"] == 1000


def test_a_step_that_is_not_there_is_refused_with_those_that_are(two_steps, tmp_path):
    with pytest.raises(ValueError, match="no checkpoint 7 in .* only 1000, 1200"):
        restore(two_steps, step=7)
    with pytest.raises(ValueError, match="no checkpoint in"):
        restore(tmp_path)
    with pytest.raises(ValueError, match="no checkpoint in"):
        Checkpoints(tmp_path / "absent").read_meta()


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"a": jnp.ones((3, 5))},
            r"params/a is float32\[3, 4\] there, float32\[3, 5\]",
        ),
        ({"a": jnp.ones((3, 4), jnp.bfloat16)}, r"there, bfloat16\[3, 4\] here"),
        ({}, r"params/a is float32\[3, 4\] there, nothing here"),
        (
            {"a": jnp.ones((3, 4)), "b": jnp.ones(2)},
            r"params/b is nothing there, float32\[2\] here",
        ),
    ],
)
def test_another_model_is_refused_and_not_called_damage(tmp_path, change, message):
    with Checkpoints(tmp_path, 2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"params": {"a": jnp.ones((3, 4))}}, {})
    with pytest.raises(ValueError, match=f"checkpoint 2 does not fit: .*{message}"):
        Checkpoints(tmp_path).restore({"params": jax.eval_shape(lambda: change)})


def test_the_newest_are_kept(tmp_path):
    with Checkpoints(tmp_path, 2) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, make(step), {})
        checkpoints.wait()
        assert checkpoints.steps() == [3, 4]


def test_a_damaged_step_is_saved_again(copy):
    flip(copy / "1200" / "params" / "manifest.ocdbt")
    with Checkpoints(copy, 2) as checkpoints:
        checkpoints.restore(abstract(make(1)), warn=lambda line: None)
        checkpoints.save(1200, make(1200), {"again": True})
    trees, meta, lines = restore(copy)
    assert_bitwise(trees, make(1200))
    assert meta == {"again": True, "step": 1200} and lines == []


def test_damaged_steps_do_not_count_among_those_kept(copy):
    flip(copy / "1200" / "params" / "manifest.ocdbt")
    with Checkpoints(copy, 1) as checkpoints:
        checkpoints.restore(abstract(make(1)), warn=lambda line: None)
        checkpoints.save(1100, make(1100), {})
        checkpoints.wait()
        assert checkpoints.steps() == [1100]
    assert restore(copy)[1]["step"] == 1100


def test_going_on_from_an_older_step_leaves_the_later_ones_behind(tmp_path):
    save(tmp_path, 1, 2, 3)
    with Checkpoints(tmp_path, 9) as checkpoints:
        checkpoints.restore(abstract(make(1)), 1)
        assert checkpoints.steps() == [1, 2, 3]
        checkpoints.save(2, make(20), {})
    assert Checkpoints(tmp_path).steps() == [1, 2]
    assert_bitwise(restore(tmp_path)[0], make(20))


@pytest.mark.parametrize("step", [1100, 1200])
def test_whole_checkpoints_are_neither_overwritten_nor_overtaken(copy, step):
    with Checkpoints(copy, 1) as checkpoints:
        for _ in range(2):
            with pytest.raises(ValueError, match=f"checkpoint {step} .*already"):
                checkpoints.save(step, make(1), {})
            checkpoints.restore(abstract(make(1)))
    assert Checkpoints(copy).steps() == [1000, 1200]
    assert_bitwise(restore(copy)[0], make(1200))


def test_steps_nobody_has_read_are_not_deleted_for_one_new_step(copy):
    with Checkpoints(copy, 2) as checkpoints:
        checkpoints.save(1300, make(1300), {})
        checkpoints.wait()
        assert checkpoints.steps() == [1000, 1200, 1300]
        checkpoints.save(1400, make(1400), {})
        checkpoints.wait()
        assert checkpoints.steps() == [1300, 1400]


def test_reading_makes_and_deletes_nothing(copy, tmp_path):
    (copy / "1300.orbax-checkpoint-tmp").mkdir()
    before = sorted(copy.rglob("*"))
    restore(copy)
    Checkpoints(copy).read_meta()
    assert sorted(copy.rglob("*")) == before
    assert Checkpoints(tmp_path / "absent").steps() == []
    assert not (tmp_path / "absent").exists()
    with pytest.raises(ValueError, match="open for reading"):
        Checkpoints(copy).save(1, {"params": {"a": jnp.ones(2)}}, {})


def test_names_that_are_no_steps_are_passed_over(copy):
    for name in ("1300.orbax-checkpoint-tmp", "best", "007", "-1", "²"):
        (copy / name).mkdir()
    (copy / "1400").write_text("")
    assert Checkpoints(copy).steps() == [1000, 1200]
    assert restore(copy)[1]["step"] == 1200


@pytest.mark.parametrize(
    "tree",
    [
        {"a": {"b": jnp.ones(2)}, "a/b": jnp.zeros(2)},
        {"a": {"b": jnp.ones(2)}, "a.b": jnp.zeros(2)},
        {"a": jnp.ones(2), "a/b": jnp.zeros(2)},
    ],
)
def test_leaves_that_share_a_name_are_refused(tmp_path, tree):
    with Checkpoints(tmp_path, 1) as checkpoints:
        with pytest.raises(ValueError, match="params have the same name"):
            checkpoints.save(1, {"params": tree}, {})
        assert checkpoints.steps() == []


def test_a_directory_that_cannot_hold_checkpoints_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="absolute directory, got runs"):
        Checkpoints(Path("runs"), 2)
    with pytest.raises(ValueError, match="checkpoint.keep 0"):
        Checkpoints(tmp_path, 0)
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "checkpoints"):
        with pytest.raises(ValueError, match="cannot be written to .*file") as caught:
            Checkpoints(place, 2)
        assert "\n" not in str(caught.value)


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


@contextlib.contextmanager
def full_disk():
    """No file may grow beyond a size that meta has and arrays have not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_saves_that_fail_take_nothing_with_them(tmp_path, capfd):
    """The only checkpoint stays until there is another; room that was taken is freed;
    and those that failed do not count among the ones that are kept."""
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
    assert said[0].endswith("going on without it")


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
    remove(tmp_path / "4" / "meta")  # so nobody knows that it is not the best
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
from symjax.training.checkpoint import Checkpoints

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
    """In a process of its own: pytest hides what Orbax's threads print and log."""
    done = subprocess.run(
        [sys.executable, "-c", FAILING, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=True,
    )
    damage, rest = done.stderr.split("---")
    (line,) = damage.splitlines()
    assert line.startswith("checkpoint 2 is damaged (params cannot be read")
    assert "checkpoint 3 cannot be written" in rest
    assert "orbax" not in rest  # its pages; TensorStore may still add a line or two
    assert done.stdout == ""


CHILD = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from symjax.training.checkpoint import Checkpoints

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
    # Integers: another process may compile a float to another rounding.
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
