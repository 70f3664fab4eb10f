"""An optimizer on stacks of layers does what it does on each layer."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from symjax import config
from symjax.models.build import build
from symjax.training.optimizer import Stacks, optimizer

PATTERN = ("performer", "softmax")
MODEL = config.Model(
    vocabulary=7,
    width=8,
    depth=4,
    heads=2,
    length=5,
    attention=config.Attention(differential="v1", feature_count=8),
    pattern=PATTERN,
)
STACKS = Stacks(depth=4, period=len(PATTERN))
EMBEDDINGS = {"embedding_learning_rate": 0.5, "embedding_weight_decay": 0.3}


@pytest.fixture(scope="module")
def weights():
    model = build(MODEL, rngs=nnx.Rngs(0))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def drawn(weights, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape)), weights)


def test_what_is_stacked_and_split_is_as_it_was(weights):
    stacked = STACKS.stack(weights)
    assert list(stacked["blocks"]) == [0, 1]
    kernel = stacked["blocks"][1]["feedforward"]["up"]["kernel"]
    for index, layer in enumerate((1, 3)):
        wanted = weights["blocks"][layer]["feedforward"]["up"]["kernel"]
        np.testing.assert_array_equal(kernel[index], wanted)
    found = STACKS.split(stacked)
    assert jax.tree.structure(found) == jax.tree.structure(weights)
    jax.tree.map(np.testing.assert_array_equal, found, weights)
    first = jax.tree.map(lambda x: x[0], stacked["blocks"])
    jax.tree.map(np.testing.assert_array_equal, STACKS.first(weights)["blocks"], first)


@pytest.mark.parametrize(
    "chosen",
    [{"name": "adamw"}, {"name": "adam"}, {"name": "muon", **EMBEDDINGS}],
    ids=str,
)
def test_three_steps_are_those_of_layers_apart(chosen, weights):
    """Weight decay and the choice of matrices are those of a single layer."""
    chosen = dataclasses.replace(
        config.Optimizer(), weight_decay=0.1, ema=0.9, clip=1.0, **chosen
    )

    def after(transform, stack, split):
        @jax.jit
        def step(gradient, state, params):
            updates, state = transform.update(*map(stack, (gradient, state, params)))
            return optax.apply_updates(params, split(updates)), split(state)

        params, state = weights, split(transform.init(stack(weights)))
        for seed in range(3):
            params, state = step(drawn(weights, seed), state, params)
        return params, state

    wanted = after(optimizer(chosen, 10, weights), lambda x: x, lambda x: x)
    stacked = optimizer(chosen, 10, STACKS.first(weights))
    found = after(stacked, STACKS.stack, STACKS.split)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        found,
        wanted,
    )
