"""The position term of scores, against the formula of its paper in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from flax import nnx
from projected import TIME, WIDTH, layer_of

from symjax import attention
from symjax.layers.segments import segments_of

FEATURES = 6
TERM = {"symmetric": "plain", "position_term": FEATURES}


def waves(positions):
    """Return the sinusoidal features [… M] of positions."""
    rates = 10000.0 ** (-2 * np.arange(FEATURES // 2) / FEATURES)
    angles = np.asarray(positions)[..., None] * rates
    return np.stack([np.sin(angles), np.cos(angles)], -1).reshape(
        *angles.shape[:-1], -1
    )


def paper_scores(products, positions, scale, weights, more, module=np):
    """Return a·S + [w₁, w₂]·[f(t), f(s)] + b of one example [N T T].

    Args:
        more: w₁ [N M] and b [N], which change no weight of a row.
    """
    features = waves(positions)
    rows = module.einsum("nm,tm->nt", more[0], features) + more[1][:, None]
    keys = module.einsum("nm,sm->ns", weights, features)
    return scale[:, None, None] * products + rows[:, :, None] + keys[:, None]


@pytest.mark.parametrize("attend", [attention.softmax, attention.entmax15])
def test_the_parts_that_are_left_out_change_no_weight(attend, x64):
    """Value and gradient by a, w and queries equal those of the whole formula."""
    rng = np.random.default_rng(0)
    query, value = rng.normal(size=(1, 13, 3, 4)), rng.normal(size=(1, 13, 3, 5))
    scale, weights = 1 + 0.3 * rng.normal(size=3), rng.normal(size=(3, FEATURES))
    more, positions = (
        (rng.normal(size=(3, FEATURES)), rng.normal(size=3)),
        np.arange(13),
    )
    direction = rng.normal(size=(1, 13, 3, 5))

    def found(query, scale, weights):
        bias = attention.position_bias(weights, jnp.asarray(positions)[None])
        scaled = query * scale[None, None, :, None]
        return (attend(scaled, query, value, bias, is_causal=True) * direction).sum()

    def wanted(query, scale, weights):
        products = jnp.einsum("tnh,snh->nts", query[0], query[0]) / 2
        scores = paper_scores(products, positions, scale, weights, more, jnp)
        pairs = np.tril(np.ones((13, 13), bool))
        if attend is attention.softmax:
            maps = jax.nn.softmax(jnp.where(pairs, scores, -jnp.inf), axis=-1)
        else:
            maps = oracles.sparse_weights(2, scores[None], pairs[None, None], jnp)[0]
        mixed = jnp.einsum("nts,snv->tnv", maps, value[0])
        return (mixed * direction[0]).sum()

    arrays = query, scale, weights
    one, other = (jax.value_and_grad(f, (0, 1, 2))(*arrays) for f in (found, wanted))
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-11)


def definition(layer, x, positions, visible, differential):
    """Compute one example of a symmetric layer with a position term, in float64."""

    def weight(part, name):
        return np.asarray(getattr(part, name)[...], np.float64)

    def dense(name, x):
        part = getattr(layer, name)
        return x @ weight(part, "kernel") + weight(part, "bias")

    sizes, term = layer.mixer.sizes, layer.position_term
    query = dense("query", x).reshape(TIME, sizes.queries, sizes.head_size)
    value = dense("value", x).reshape(TIME, sizes.heads, sizes.value_size)
    products = np.einsum("tnh,snh->nts", query, query) / np.sqrt(sizes.head_size)
    scale, weights = weight(term, "scale"), weight(term, "bias")
    branches = sizes.queries // sizes.heads
    scale, weights = (np.repeat(x, branches, axis=0) for x in (scale, weights))
    zeros = np.zeros_like(weights), np.zeros(len(scale))
    scores = paper_scores(products, positions, scale, weights, zeros)
    maps = np.exp(scores) * visible
    maps /= maps.sum(axis=-1, keepdims=True)
    if differential == "v1":
        maps = maps[::2] - float(layer.lam()) * maps[1::2]
    mixed = np.einsum("nts,snv->tnv", maps, value)
    if differential == "v1":
        root = np.sqrt((mixed**2).mean(axis=-1, keepdims=True) + 1e-5)
        mixed = mixed / root * weight(layer.head_norm, "scale") * 0.8
    return dense("out", mixed.reshape(TIME, -1))


@pytest.mark.parametrize("differential", ["none", "v1"])
def test_a_layer_is_its_definition_with_and_without_documents(differential):
    layer = layer_of(**TERM, differential=differential)
    x = np.random.default_rng(3).normal(size=(2, TIME, WIDTH))
    ids = np.array([[0] * 4 + [1] * 7, [0] * 9 + [1] * 2])
    causal = np.tril(np.ones((TIME, TIME), bool))
    run = nnx.jit(lambda layer, x, segments: layer(x, None, segments))
    for segments in (None, segments_of(jnp.asarray(ids))):
        found = run(layer, jnp.asarray(x, jnp.float32), segments)
        for b in range(2):
            positions, visible = np.arange(TIME), causal
            if segments is not None:
                positions = np.asarray(segments.positions[b])
                visible = causal & (ids[b][:, None] == ids[b][None])
            given = positions, visible, differential
            wanted = definition(layer, x[b], *given)
            np.testing.assert_allclose(found[b], wanted, atol=1e-5)


def test_a_new_term_changes_nothing_until_it_has_learned():
    x = np.random.default_rng(3).normal(size=(2, TIME, WIDTH)).astype("f4")
    plain, termed = layer_of(symmetric="plain"), layer_of(**TERM)
    for name in ("query", "value", "out"):
        setattr(termed, name, getattr(plain, name))
    term = type(termed.position_term)(3, FEATURES)
    termed.position_term = term
    np.testing.assert_array_equal(termed(x), plain(x))
    term.bias[...] += 1
    assert abs(termed(x) - plain(x)).max() > 1e-2


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"mechanism": "linear"}, "position_term 6 is a bias of scores: linear takes"),
        ({"mechanism": "gau"}, "position_term 6: gau has no such option"),
        ({"position_term": 5}, "position_term must be an even number of features"),
    ],
    ids=str,
)
def test_what_takes_no_term_is_named(choice, words):
    with pytest.raises(ValueError, match=words):
        layer_of(**{"position_term": FEATURES, **choice})


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"got \(3,\) and \(1, 4\)"):
        attention.position_bias(jnp.zeros(3), jnp.zeros((1, 4), int))
    with pytest.raises(ValueError, match="even width, got 5"):
        attention.position_bias(jnp.zeros((3, 5)), jnp.zeros((1, 4), int))
