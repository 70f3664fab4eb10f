"""Sizes of the programs that the first call of a mechanism compiles."""

from pathlib import Path

import jax
import numpy as np
import pytest

from symjax.attention.core.devices import lowered_for

LIMITS = {  # lines of StableHLO of the gradient at [1, 1024, 8, 64]
    "softmax": 450,
    "differential": 800,
    "cosine": 900,
    "performer": 1_120,
    "gla": 780,
    "delta": 800,
    "sparsemax": 700,
    "entmax15": 700,
}


@pytest.mark.always
@pytest.mark.parametrize("name", LIMITS)
def test_the_gradient_is_a_short_program(name, monkeypatch):
    """Count as `python -m benchmarks.first_call --lines` does on a user's machine.

    The mesh of one device stands for a machine with one: the tests have eight.
    """
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import first_call

    device = np.array(jax.devices()[:1])
    with jax.set_mesh(jax.sharding.Mesh(device, ("device",))):
        assert first_call.lines(name) <= LIMITS[name]


@pytest.mark.parametrize("name", ["sparsemax", "entmax15"])
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_the_gradient_is_a_short_program_on_accelerators(name, platform, monkeypatch):
    """Row blocks of a few key lengths: eight would take three times as many lines."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import first_call

    graded, arrays = first_call.gradient(name)
    with lowered_for(platform):
        program = graded.trace(*arrays).lower(lowering_platforms=(platform,))
    assert program.as_text().count("\n") <= 1_100
