"""Damage of any kind to a checkpoint is harmless, or named."""

import functools
import json
import os
import shutil

import jax
import orbax.checkpoint as ocp
import pytest
from saved import assert_bitwise, few, flip, make, restore, save

from symjax.checkpoints.checkpoint import Checkpoints


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
    """Damage each file and folder of the newest checkpoint in turn.

    Some files are only used by Orbax itself and may be missing. Others must be missed.
    """
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
    """Orbax restores this array without an error."""
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
