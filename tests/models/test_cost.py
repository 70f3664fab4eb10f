"""FLOPs of attention by formula, against the products of the compiled program."""

import math

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from flax import nnx

from symjax import config
from symjax.attention import MECHANISMS
from symjax.attention.features import PLAIN
from symjax.attention.random_features import RANDOM_FEATURES
from symjax.layers.parts.table import part_of
from symjax.models import transformer
from symjax.models.cost import attention_flops, decoding_bytes

LENGTH = 4096
ATTENTION = "differential", "signals"


def counted(function, *arrays, branch=min) -> int:
    """Return the FLOPs of all matrix products, with the cheapest of several branches,
    or with the most expensive one (max)."""
    return of_products(jax.make_jaxpr(function)(*arrays).jaxpr, branch)


def of_products(jaxpr, branch) -> int:
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), (batch, _) = equation.params["dimension_numbers"]
            one, two = (operand.aval for operand in equation.invars)
            free = one.ndim + two.ndim - 2 * len((*contracted, *batch))
            if contracted and free:  # else it multiplies element by element
                sizes = [one.shape[axis] for axis in contracted]
                total += 2 * equation.outvars[0].aval.size * math.prod(sizes)
        inner = [of_products(x, branch) for x in computed(equation)]
        joined = branch if equation.primitive.name == "cond" else sum
        times = equation.params.get("length", 1)  # of a scan
        total += times * joined(inner or [0])
    return total


def computed(equation):
    """Return the programs inside an equation that run when it is computed.

    A linear solve also names products with its matrix and solves of its transpose,
    which only its derivatives run.
    """
    if equation.primitive.name == "custom_linear_solve":
        return [equation.params["jaxprs"].solve.jaxpr]
    return jax.extend.core.jaxprs_in_params(equation.params)


def both(mechanism: str, **changes) -> tuple[float, float]:
    """Return the FLOPs of one token by formula, and as counted."""
    of_attention = {x: changes.pop(x) for x in ATTENTION if x in changes}
    chosen = config.Attention(mechanism=mechanism, **of_attention)
    options = config.Model(
        width=96, heads=3, length=LENGTH, attention=chosen, **changes
    )

    def operands(x):
        layer = transformer.block(options, 0, nnx.Rngs(jax.random.key(0))).attentions[0]
        return layer, layer.operands(x, jnp.arange(LENGTH)[None])

    def prepared(x):
        return [operand.array for operand in operands(x)[1].values()]

    def mixed(x):
        layer, given = operands(x)
        return layer.mixer(given)

    x = jnp.zeros((1, LENGTH, options.width))
    # A term of the exponential is a branch, and the formula counts all terms.
    branch = max if mechanism == "matrix_function" else min
    found = counted(mixed, x, branch=branch) - counted(prepared, x, branch=branch)
    return attention_flops(options, 0), found / LENGTH


@pytest.mark.parametrize("name", [x for x, y in MECHANISMS.items() if y.bidirectional])
def test_over_all_keys_the_formula_counts_the_products(name):
    """A matrix function also takes H³ operations per head, which do not grow with T."""
    formula, found = both(name, kind="encoder", classes=2)
    assert 0.9 < found / formula < 1.15


@pytest.mark.parametrize("name", ["softmax", "linear"])
def test_noise_maps_are_counted_once_if_they_are_computed_once(name):
    chosen = {"differential": "v1", "signals": 3}
    formula, found = both(name, kind="encoder", classes=2, **chosen)
    assert 0.9 < found / formula < 1.15


@pytest.mark.parametrize(
    "name", [x for x, y in MECHANISMS.items() if y.causal or y.is_causal]
)
def test_of_causal_pairs_the_formula_counts_half(name):
    """The program computes more: whole blocks of pairs, and all pairs of a chunk."""
    formula, found = both(name)
    assert 0.9 < found / formula < 2.1


@pytest.mark.parametrize(
    ("mechanism", "features"),
    [
        ("cosine", ""),
        *(("linear", x) for x in (*PLAIN, "hedgehog", "t2r")),
        *(("performer", x) for x in RANDOM_FEATURES),
    ],
)
def test_features_are_counted_as_the_state_has_them(mechanism, features):
    count = 7 if features == "t2r" else 256
    chosen = config.Attention(
        mechanism=mechanism, features=features, feature_count=count
    )
    options = config.Model(width=60, heads=3, attention=chosen)

    def cache():
        layer = transformer.block(options, 0, nnx.Rngs(jax.random.key(0))).attentions[0]
        return layer.init_cache(1, 1)

    state = jax.eval_shape(cache)
    found = part_of(mechanism).feature_count(chosen, 20)
    assert found == max(x.shape[2] for x in jax.tree.leaves(state))


def test_memory_to_decode_is_that_of_keys_values_and_states():
    def decoding(length, kind="decoder", **chosen):
        attention = config.Attention(**chosen)
        options = config.Model(
            *(kind,), vocabulary=7, width=24, depth=3, heads=4, attention=attention
        )
        return decoding_bytes(options, length)

    keys_and_values = 3 * 24 * 2 * 4  # layers, width, both, bytes of a float32
    assert decoding(100) == 100 * keys_and_values
    assert decoding(100, symmetric="kv") == 100 * keys_and_values / 2
    assert decoding(100, symmetric="qkv") == 100 * keys_and_values / 2
    assert decoding(100, differential="v1") == 100 * keys_and_values
    assert decoding(100, key_size=2) == 100 * keys_and_values * (2 + 6) / (6 + 6)
    assert decoding(100, mechanism="decay") == decoding(1000, mechanism="decay")
    with pytest.raises(ValueError, match="the model is an encoder"):
        decoding(100, "encoder")
