"""Training with the TPU kernel, interpreted, has the losses of training by row blocks.

The first steps of Adam divide gradients by their size, so rounding errors grow from
step to step. Runs by row blocks from weights that are a few rounding errors away tell
how far they may grow.
"""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest
from runs import TEXT, preset

from symjax import config
from symjax.training import sharding
from symjax.training.step import build_program

STEPS = 20


def losses(name, dtype, implementation, *, moved=0.0, seed=0):
    """Return the losses of the first steps of :tiny on a text of a few words.

    Args:
        moved: each weight is first changed by up to this share of itself, drawn by the
            seed.
    """
    chosen = {
        "model": {"dtype": dtype},
        "attention": {"implementation": implementation},
    }
    options = preset(name, "tiny", **chosen, batch_size=4)
    options = dataclasses.replace(options, mesh=config.Mesh(data=1))
    program = build_program(options, sharding.make_mesh(options.mesh))
    shape = options.batch_size, options.model.length
    text = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int32)
    found = []
    with jax.set_mesh(program.mesh):
        state, constants = program.initial(3)
        state = state._replace(
            params=jax.tree.map(partial(move, moved, seed), state.params)
        )
        for step in range(STEPS):
            starts = np.random.default_rng(step).integers(0, len(text) - 129, shape[0])
            rows = np.stack([text[i : i + shape[1] + 1] for i in starts])
            both = program.place(shape, lambda a, b, x=rows: (x[a:b, :-1], x[a:b, 1:]))
            state, metrics = program.train(state, constants, *both, jax.random.key(1))
            found.append(float(metrics["train/loss"]))
    return np.array(found)


def move(share, seed, x):
    change = np.random.default_rng(seed).uniform(-share, share, x.shape)
    return jax.device_put(np.asarray(x) * (1 + change).astype(np.float32), x.sharding)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gpt", "diff_sym", "diff_v2"])
def test_losses_of_twenty_steps(name, dtype):
    fused = losses(name, dtype, "fused")
    rows = losses(name, dtype, "rows")
    share = 4 * jax.numpy.finfo(dtype).eps
    apart = [losses(name, dtype, "rows", moved=share, seed=n) - rows for n in range(3)]
    assert fused[-1] < fused[0] - 1
    assert np.abs(fused - rows).max() < 2 * np.abs(apart).max()
