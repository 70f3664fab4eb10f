"""The Universal Transformer against the definition of adaptive computation time."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from symjax import config
from symjax.layers import UniversalBlock
from symjax.layers.universal import Halting, halt

BATCH, TIME, WIDTH, DEPTH = 2, 11, 24, 3


def definition(probabilities):
    """Return weights [steps] and ponder cost of a token from halting probabilities."""
    weights, total = np.zeros(len(probabilities)), 0.0
    for step, probability in enumerate(probabilities):
        if total + probability >= 0.99 or step == len(probabilities) - 1:
            weights[step] = 1 - total
            return weights, step + 1 + weights[step]
        weights[step] = probability
        total += probability


def options(*, depth=DEPTH, **more):
    return config.Model(
        width=WIDTH, heads=3, positions="rope", feedforward=31, depth=depth, **more
    )


def layer_of(**more):
    """Return a layer whose tokens halt at different steps."""
    layer = UniversalBlock(options(**more), rngs=nnx.Rngs(0))
    layer.halting.kernel[...] = 12 * layer.halting.kernel[...]
    layer.halting.bias[...] = jnp.array([-0.5])
    return layer


def tokens(seed=1):
    return np.random.default_rng(seed).normal(size=(BATCH, TIME, WIDTH)).astype("f4")


def weights_and_ponder(probabilities):
    halting = Halting(*jnp.zeros((2, *probabilities.shape[1:])))
    weights = []
    for step, probability in enumerate(probabilities):
        last = step == len(probabilities) - 1
        weight, halting = halt(halting, probability, last=last)
        weights.append(weight)
    return jnp.stack(weights), halting.ponder


def test_weights_and_ponder_cost_equal_their_definition(x64):
    """Tokens halt at once, at the threshold, in between, and at the last step."""
    probabilities = np.random.default_rng(0).random((5, 3, 7))
    probabilities[:, 0, 0], probabilities[:, 0, 1] = 0.995, 1e-3
    probabilities[:, 0, 2] = (0.5, 0.49, 0.3, 0.3, 0.3)
    weights, ponder = weights_and_ponder(probabilities)
    steps = (np.asarray(weights) > 0).sum(axis=0)
    assert set(steps.ravel()) == {1, 2, 3, 4, 5}
    for index in np.ndindex(3, 7):
        wanted, cost = definition(probabilities[:, *index])
        np.testing.assert_allclose(weights[:, *index], wanted, atol=1e-15)
        np.testing.assert_allclose(ponder[index], cost, atol=1e-15)
    np.testing.assert_allclose(weights.sum(axis=0), 1, atol=1e-15)


def test_the_ponder_cost_falls_as_a_token_halts_earlier(x64):
    """Its gradient is −1 for probabilities before the remainder, and 0 for the
    remainder."""
    probabilities = np.array([0.2, 0.3, 0.1, 0.6, 0.7])[:, None, None]
    slope = jax.grad(lambda p: weights_and_ponder(p)[1].sum())(probabilities)
    np.testing.assert_array_equal(slope.ravel(), [-1, -1, -1, 0, 0])


@nnx.jit
def pondered(layer, x):
    output = layer(x, dropout_key=jax.random.key(0))
    return output, nnx.pop(layer, nnx.Intermediate)["ponder"][...]


@nnx.jit
def apply_block(layer, x, step):
    return layer.block(x + layer.step_embedding[step][None, None])


def test_a_layer_equals_its_definition():
    """Halted tokens stay as they are, and other tokens see them so."""
    layer, state = layer_of(), tokens()
    kernel = np.float64(layer.halting.kernel[...])[:, 0]
    bias = np.float64(layer.halting.bias[...])
    probabilities = np.zeros((DEPTH, BATCH, TIME))
    states, steps = [], np.zeros((BATCH, TIME), int)
    for step in range(DEPTH):
        going = np.zeros((BATCH, TIME), bool)
        for b, t in np.ndindex(BATCH, TIME):
            sums = np.cumsum(probabilities[:step, b, t])
            going[b, t] = all(total < 0.99 for total in sums)
        new = apply_block(layer, state, step)
        state = np.where(going[..., None], new, state)
        length = np.linalg.norm(np.float64(state), axis=-1, keepdims=True)
        probabilities[step] = 1 / (1 + np.exp(-(state / length @ kernel + bias)))
        states.append(state)
        steps += going
    assert set(steps.ravel()) == {1, 2, 3}
    output, ponder = pondered(layer, tokens())
    for b, t in np.ndindex(BATCH, TIME):
        weights, cost = definition(probabilities[:, b, t])
        wanted = sum(w * s[b, t] for w, s in zip(weights, states, strict=True))
        np.testing.assert_allclose(output[b, t], wanted, atol=1e-5)
        np.testing.assert_allclose(ponder[b, t], cost, atol=1e-5)


def test_a_halted_token_changes_no_more():
    """A token that surely halts has one step; inputs of later steps do not matter."""
    layer, x = layer_of(), tokens()
    layer.halting.bias[...] = jnp.array([90.0])
    output, ponder = pondered(layer, x)
    np.testing.assert_array_equal(ponder, np.full((BATCH, TIME), 2.0))
    np.testing.assert_allclose(output, apply_block(layer, x, 0), atol=1e-6)
    layer.step_embedding[1:] = jnp.nan
    np.testing.assert_array_equal(pondered(layer, x)[0], output)


def test_one_step_is_one_block():
    layer = UniversalBlock(options(depth=1), rngs=nnx.Rngs(0))
    output, ponder = pondered(layer, tokens())
    np.testing.assert_allclose(output, apply_block(layer, tokens(), 0), atol=1e-6)
    np.testing.assert_array_equal(ponder, np.full((BATCH, TIME), 2.0))


def test_decoding_equals_the_whole():
    """A prefill of rows of different lengths, then four tokens one by one."""
    layer = layer_of()
    graph, weights = nnx.split(layer)
    x, lengths = tokens(), np.array([6, 3])

    @jax.jit
    def decode(weights, x, state, position, padding_mask):
        layer = nnx.merge(graph, weights)
        return layer.decode(x, state, position, padding_mask)

    whole = np.asarray(pondered(layer, x)[0])
    padding_mask = np.arange(6)[None] < lengths[:, None]
    state, position = layer.init_cache(BATCH, 16), jnp.zeros(BATCH, jnp.int32)
    output, state = decode(weights, x[:, :6], state, position, padding_mask)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(output[row, :length], whole[row, :length], atol=2e-5)
    for step in range(4):
        position = jnp.array(lengths + step)
        now = np.stack([x[row, [position[row]]] for row in range(BATCH)])
        output, state = decode(weights, now, state, position, None)
        wanted = [whole[row, [position[row]]] for row in range(BATCH)]
        np.testing.assert_allclose(output, wanted, atol=2e-5)


def test_the_ponder_cost_reaches_the_loss():
    """As in a training step: merge, call, pop; with and without remat."""

    def gradient(remat):
        graph, weights = nnx.split(layer_of(remat=remat, dropout=0.1))

        def loss(weights, share):
            layer = nnx.merge(graph, weights)
            output = layer(tokens(), dropout_key=jax.random.key(3))
            (ponder,) = jax.tree.leaves(nnx.pop(layer, nnx.Intermediate))
            assert ponder.shape == (BATCH, TIME)
            return (1 - share) * (output**2).mean() + share * ponder.mean()

        program = jax.make_jaxpr(loss)(weights, 0.0)
        names = [equation.primitive.name for equation in program.eqns]
        assert names.count("remat2") == (DEPTH if remat == "full" else 0), set(names)
        return partial(jax.jit(jax.grad(loss)), weights)

    slope = gradient(remat="none")
    of_loss, of_ponder = slope(0.0), slope(1.0)
    for slopes in (of_loss, of_ponder):
        assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(slopes))
        assert jnp.abs(slopes["halting"]["kernel"][...]).max() > 1e-3
    assert of_ponder["halting"]["bias"][...] < -1e-3
    assert jnp.abs(of_loss["step_embedding"][...]).max() > 1e-4
    recomputed = gradient(remat="full")(0.0)
    for one, two in zip(*map(jax.tree.leaves, (of_loss, recomputed)), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)


def test_without_a_dropout_key_the_module_stays_as_it_is():
    layer = layer_of()
    before = nnx.graphdef(layer)
    output = jax.jit(lambda x: layer(x))(tokens())
    assert nnx.graphdef(layer) == before
    assert output.shape == (BATCH, TIME, WIDTH)


def test_weights_do_not_grow_with_the_number_of_steps():
    def shapes(depth):
        layer = nnx.eval_shape(
            lambda: UniversalBlock(options(depth=depth), rngs=nnx.Rngs(0))
        )
        return {
            path: x.shape for path, x in nnx.to_flat_state(nnx.state(layer, nnx.Param))
        }

    few, many = shapes(2), shapes(5)
    assert {path for path in few if few[path] != many[path]} == {("step_embedding",)}
    assert few.keys() == many.keys()


def test_mechanisms_that_do_not_fit_one_block_are_refused_by_name():
    with pytest.raises(ValueError, match="model.pattern performer, softmax"):
        UniversalBlock(options(pattern=("performer", "softmax")), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="model.attention.mechanism 'gau'"):
        UniversalBlock(options(pattern=("gau",)), rngs=nnx.Rngs(0))
