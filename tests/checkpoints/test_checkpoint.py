"""Checkpoints: what is restored, what is kept, and what is refused."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from saved import ITEMS, abstract, assert_bitwise, flip, make, mesh, restore, save

from symjax.checkpoints.checkpoint import Checkpoints


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
        with pytest.raises(ValueError, match="two leaves of params have one name"):
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
        with pytest.raises(ValueError, match="in .*file.* cannot be written") as caught:
            Checkpoints(place, 2)
        assert "\n" not in str(caught.value)
