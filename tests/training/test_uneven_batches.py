"""A batch has one loss and one gradient, however it is split.

Rows have unequal numbers of targets, as with separate documents and with answers. All
is in float64, so that only the order of sums differs.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from symjax import config
from symjax.models.build import build
from symjax.training import loss, step
from symjax.training.sharding import make_mesh
from symjax.training.step import build_program, means

SHAPE, VOCABULARY, Z_LOSS = (8, 6), 17, 0.3
MODEL = config.Model(
    vocabulary=VOCABULARY, width=16, depth=1, heads=2, length=6, positions="rope"
)
UNIVERSAL = replace(MODEL, kind="universal", depth=2, ponder=0.5)
PLAIN = config.Optimizer(
    name="sgd",
    betas=(0.0, 0.9),
    schedule="constant_schedule",
    learning_rate=1.0,
    weight_decay=0.0,
    clip=0.0,
    z_loss=Z_LOSS,
)


def wide(model):
    """Return the model with float64 weights, which computes in float64."""
    for _, module in nnx.iter_modules(model):
        if "dtype" in vars(module):
            vars(module)["dtype"] = jnp.dtype(jnp.float64)
    weights = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.float64), weights))
    return model


@pytest.fixture
def float64(x64, monkeypatch):
    narrow = build
    monkeypatch.setattr(step, "build", lambda *a, **b: wide(narrow(*a, **b)))
    monkeypatch.setattr(
        step,
        "abstract",
        lambda model: nnx.eval_shape(lambda: wide(narrow(model, rngs=nnx.Rngs(0)))),
    )


def batch(counts):
    """Return inputs and targets, with so many targets per row."""
    rng = np.random.default_rng(0)
    inputs, targets = (rng.integers(0, VOCABULARY, SHAPE) for _ in range(2))
    places = np.arange(SHAPE[1])[None]
    return inputs, np.where(places < np.array(counts)[:, None], targets, -1)


def stepped(model, mesh, accumulate, counts):
    """Return (reported loss, gradient by path of the weight) of one step of SGD."""
    options = config.Config(
        steps=2,
        batch_size=SHAPE[0],
        model=model,
        mesh=mesh,
        optimizer=replace(PLAIN, accumulate=accumulate),
    )
    devices = jax.devices()[: mesh.data * mesh.fsdp * mesh.sequence]
    program = build_program(options, make_mesh(mesh, devices))
    with jax.set_mesh(program.mesh):
        state, constants = program.initial(0)
        before = jax.device_get(state.params)
        rows = program.place(SHAPE, lambda a, b: [x[a:b] for x in batch(counts)])
        state, metrics = program.train(state, constants, *rows, jax.random.key(0))
    gradient = jax.tree.map(np.subtract, before, jax.device_get(state.params))
    return float(metrics["train/loss"]), gradient, program, before


def defined(program, params, counts):
    """Return the same, by a definition for the whole batch at once."""
    inputs, targets = batch(counts)
    asked = targets >= 0
    count = max(1, asked.sum())

    def minimised(params):
        model = nnx.merge(program.graph, params, {})
        hidden = model.hidden(jnp.asarray(inputs), dropout_key=jax.random.key(0))
        logits = hidden @ model.head.kernel[...] + model.head.bias[...][None, None]
        normaliser = jnp.log(jnp.exp(logits).sum(-1))
        own = (logits * np.eye(VOCABULARY)[targets]).sum(-1)
        mean = (asked * (normaliser - own)).sum() / count
        squares = (asked * normaliser**2).sum() / count
        ponder = [x.mean() for x in jax.tree.leaves(nnx.pop(model, nnx.Intermediate))]
        return mean + Z_LOSS * squares + program.model.ponder * sum(ponder), mean

    (_, mean), gradient = jax.value_and_grad(minimised, has_aux=True)(params)
    return float(mean), gradient


def assert_same(found, wanted):
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-12)
    size = max(float(np.abs(x).max()) for x in jax.tree.leaves(wanted[1]))
    for x, y in zip(*map(jax.tree.leaves, (found[1], wanted[1])), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-12 * size)


UNEVEN = (6, 1, 5, 1, 2, 0, 6, 1)
ONE = config.Mesh(data=1)
EIGHT, EACH_AXIS = config.Mesh(data=8), config.Mesh(data=2, fsdp=2, sequence=2)
CASES = {
    "micro-batches": (MODEL, loss.MOST_LOGITS, ((ONE, 1), (ONE, 4))),
    "meshes": (MODEL, loss.MOST_LOGITS, ((EIGHT, 1), (EACH_AXIS, 2))),
    "parts of logits": (MODEL, 2 * VOCABULARY, ((ONE, 2), (EIGHT, 1))),
    "ponder": (
        UNIVERSAL,
        loss.MOST_LOGITS,
        ((ONE, 4), (config.Mesh(data=2, fsdp=2), 2)),
    ),
}
SLOW = "meshes", "ponder"


@pytest.mark.always
@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=[pytest.mark.slow] if x in SLOW else []) for x in CASES],
)
def test_any_split_of_a_batch_gives_one_gradient(case, float64, monkeypatch):
    model, largest, splits = CASES[case]
    monkeypatch.setattr(loss, "MOST_LOGITS", largest)
    for mesh, accumulate in splits:
        *found, program, params = stepped(model, mesh, accumulate, UNEVEN)
        assert_same(found, defined(program, params, UNEVEN))


def test_micro_batches_without_targets_add_nothing(float64):
    """A micro-batch takes every fourth row; two of them have no target."""
    counts = (6, 0, 2, 0, 1, 0, 6, 0)
    *found, program, params = stepped(MODEL, ONE, 4, counts)
    assert_same(found, defined(program, params, counts))


def test_a_batch_without_targets_has_a_loss_and_a_gradient_of_zero(float64):
    found, gradient, *_ = stepped(MODEL, ONE, 2, (0,) * SHAPE[0])
    assert found == 0 and not any(x.any() for x in jax.tree.leaves(gradient))


def test_heldout_batches_have_the_mean_over_all_their_targets(float64):
    *_, program, params = stepped(MODEL, ONE, 1, UNEVEN)
    inputs, targets = batch(UNEVEN)

    def rows(first, start, stop):  # one of four batches, of two rows and their copies
        x, y = (np.tile(x[first : first + 2], (4, 1)) for x in (inputs, targets))
        return [each[start:stop] for each in (x, y, (y >= 0).astype(np.float32))]

    given = [functools.partial(rows, first) for first in range(0, SHAPE[0], 2)]
    found = means(program, params, {}, SHAPE, given)
    np.testing.assert_allclose(found.loss, defined(program, params, UNEVEN)[0], 1e-12)
    nothing = [lambda a, b: [*rows(0, a, b)[:2], np.zeros((b - a, SHAPE[1]))]]
    with pytest.raises(ValueError, match="1 held-out batch.* have no target"):
        means(program, params, {}, SHAPE, nothing)
