"""Checkpoints that several test files read."""

import shutil

import pytest
from saved import few, save

from symjax.checkpoints.checkpoint import Checkpoints


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two") / "checkpoints"
    save(directory, 1000, 1200)
    return directory


@pytest.fixture
def copy(two_steps, tmp_path):
    shutil.copytree(two_steps, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


@pytest.fixture(scope="module")
def two_small_steps(tmp_path_factory):
    directory = tmp_path_factory.mktemp("small")
    with Checkpoints(directory, 2) as checkpoints:
        for step in (1000, 1200):
            checkpoints.save(step, few(step), {})
    return directory
