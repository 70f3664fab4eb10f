"""LayerNorm and RMSNorm against formulas in float64, and against Flax's norms."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from symjax import validation
from symjax.layers.norms import LayerNorm, RMSNorm, norm
from symjax.models.build import abstract

SHAPE = 3, 5, 37
FLAX = {"layernorm": nnx.LayerNorm, "rmsnorm": nnx.RMSNorm}


def parameters(kind, bias=True, seed=0):
    rng = np.random.default_rng(seed)
    made = {"scale": rng.normal(size=SHAPE[-1])}
    if kind == "layernorm" and bias:
        made["bias"] = rng.normal(size=SHAPE[-1])
    return made


def filled(module, values):
    for name, value in values.items():
        getattr(module, name)[...] = jnp.asarray(value, jnp.float32)
    return module


def oracle(kind, x, scale, bias=None):
    """Compute the definition in the precision of its arguments."""
    distance = x - x.mean(axis=-1, keepdims=True) if kind == "layernorm" else x
    variance = (distance**2).mean(axis=-1, keepdims=True)
    output = distance / jnp.sqrt(variance + 1e-5) * scale[None, None]
    return output if bias is None else output + bias[None, None]


def inputs(seed=1):
    rng = np.random.default_rng(seed)
    return rng.normal(size=SHAPE) + 0.3, rng.normal(size=SHAPE)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", FLAX)
def test_outputs_and_derivatives_are_those_of_the_definition(kind, bias):
    values, (x, change) = parameters(kind, bias), inputs()

    def ours(values, x):
        return filled(norm(kind, SHAPE[-1], bias=bias, rngs=nnx.Rngs(0)), values)(x)

    def exact(values, x):
        return oracle(kind, x, **values)

    given, turn = jax.tree.map(jnp.float32, ((values, x), (values, change)))
    output, back = jax.vjp(ours, *given)
    found, moved = back(turn[1]), jax.jvp(ours, given, turn)[1]
    with jax.enable_x64(True):
        wanted, wanted_back = jax.vjp(exact, values, jnp.asarray(x))
        gradients = wanted_back(jnp.asarray(change))
        wanted_moved = jax.jvp(exact, (values, x), (values, change))[1]
    np.testing.assert_allclose(output, wanted, atol=2e-6)
    np.testing.assert_allclose(moved, wanted_moved, atol=4e-6)
    assert found[0].keys() == gradients[0].keys()
    for one, other in zip(*map(jax.tree.leaves, (found, gradients)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", FLAX)
def test_outputs_are_those_of_flax_bit_for_bit(kind, dtype):
    values, (x, _) = parameters(kind), inputs()
    options = {"dtype": dtype, "rngs": nnx.Rngs(0)}
    one = filled(norm(kind, SHAPE[-1], **options), values)
    other = filled(FLAX[kind](SHAPE[-1], epsilon=1e-5, **options), values)
    x = jnp.asarray(x, jnp.float32)
    assert one(x).dtype == other(x).dtype == dtype
    np.testing.assert_array_equal(one(x), other(x))


@pytest.mark.parametrize("kind", FLAX)
def test_the_backward_pass_keeps_one_array_of_the_size_of_x(kind):
    def kept(made):
        graph, state = nnx.split(made(SHAPE[-1], rngs=nnx.Rngs(0)))
        _, back = jax.vjp(lambda s, x: nnx.merge(graph, s)(x), state, jnp.ones(SHAPE))
        return sum(leaf.shape == SHAPE for leaf in jax.tree.leaves(back))

    assert kept(partial(norm, kind)) == 1
    assert kept(FLAX[kind]) > 1  # so that the count above can fail


@pytest.mark.parametrize("kind", FLAX)
def test_features_may_be_split_over_an_explicit_mesh(kind):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices()[:4])
    module = norm(kind, 6, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 6)), jnp.float32)
    change = jax.grad(lambda x: (module(x) ** 3).sum())
    with jax.set_mesh(mesh):
        split = jax.device_put(x, NamedSharding(mesh, P("data", None, "tensor")))
        found = jax.jit(change)(split)
    assert jax.typeof(found).sharding.spec == P("data", None, "tensor")
    np.testing.assert_allclose(found, change(x), atol=1e-5)


@pytest.mark.parametrize("kind", FLAX)
def test_rows_that_are_constant_or_zero_have_finite_derivatives(kind):
    module = norm(kind, SHAPE[-1], rngs=nnx.Rngs(0))
    for value in (0.0, 3.0):
        gradient = jax.grad(lambda x: module(x)[..., 0].sum())(jnp.full(SHAPE, value))
        assert np.isfinite(gradient).all()


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="'batchnorm' is unknown: choose from"):
        norm("batchnorm", 8, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("kind", FLAX)
def test_epsilon_is_that_of_the_module(kind):
    x = 1e-3 * jnp.float32(inputs()[0])
    one = type(norm(kind, SHAPE[-1], rngs=nnx.Rngs(0)))
    one = one(SHAPE[-1], epsilon=1e-2, rngs=nnx.Rngs(0))
    other = FLAX[kind](SHAPE[-1], epsilon=1e-2, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(one(x), other(x))
    given = [jax.grad(lambda x, m=m: (m(x) ** 3).sum())(x) for m in (one, other)]
    np.testing.assert_allclose(*given, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"attention": {"differential": "v1", "query_key_norm": True}}, 2 * 5 + 1),
        ({"attention": {"mechanism": "decay"}, "norm": "rmsnorm"}, 2 * 3 + 1),
        ({"attention": {"mechanism": "gau"}}, 2 + 1),
        ({"attention": {"mechanism": "delta"}, "kind": "universal"}, 3 + 1),
        ({"kind": "encoder", "norm": "rmsnorm"}, 2 * 2 + 1),
    ],
    ids=["differential", "decay", "gau", "universal", "encoder"],
)
def test_one_key_is_the_epsilon_of_every_norm_of_a_model(options, count):
    sizes = {"vocabulary": 9, "width": 16, "heads": 2, "depth": 2, "norm_eps": 0.25}
    model = validation.from_dict({"model": sizes | options}).model
    modules = nnx.iter_modules(abstract(model))
    found = [x.epsilon for _, x in modules if isinstance(x, LayerNorm | RMSNorm)]
    assert found == [0.25] * count


def test_older_configurations_keep_their_epsilon():
    assert validation.from_dict({"model": {"norm": "rmsnorm"}}).model.norm_eps == 1e-5
