"""Maps that are read inside a model are those it computes; statistics of known maps."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from symjax import config
from symjax.evaluation.measures import attended, magnitudes, ranks, reading, spread
from symjax.evaluation.measures.reading import Layer, nan_mean, read, visible_by_layer
from symjax.evaluation.measures.windows import Window
from symjax.evaluation.results import Options
from symjax.models import Decoder
from symjax.models.build import attentions, build

TOKENS = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9])
TIME = len(TOKENS)
CAUSAL = np.tri(80) > 0
CASES = {
    "softmax": ({}, {"length_base": 64, "mask_self": True}),
    "v1": (
        {"kv_heads": 2, "positions": "alibi"},
        {
            **{"mechanism": "entmax15", "differential": "v1"},
            **{"forget": "fox", "sink": True},
        },
    ),
    "v2": (
        {"kv_heads": 2},
        {"mechanism": "linear", "features": "hedgehog", "differential": "v2"},
    ),
    "decay": (
        {"kv_heads": 2, "depth": 1},
        {"mechanism": "decay", "decay": "gated", "differential": "v1"},
    ),
    "grouped": (
        {"positions": "alibi"},
        {
            **{"symmetric": "plain", "differential": "v1", "signals": 2},
            **{"position_term": 2, "length_scale": "adaptive"},
        },
    ),
    "mesa": (
        {"kv_heads": 2, "depth": 1},
        {"mechanism": "mesa", "differential": "v1", "chunk_size": 4},
    ),
    "gated": ({"pattern": ("gau", "flash")}, {"chunk_size": 4}),
    "universal": ({"kind": "universal"}, {}),
}
DIFFERENTIAL = [x for x, (_, keys) in CASES.items() if "differential" in keys]


def make(name):
    model, attention = CASES[name]
    options = {"vocabulary": 10, "width": 16, "depth": 2, "heads": 4, "length": 16}
    options |= {"positions": "rope"} | model
    made = config.Model(attention=config.Attention(**attention), **options)
    decoder = Decoder(made, rngs=nnx.Rngs(0))
    for path, weight in nnx.iter_graph(decoder):
        if "lambda" in "".join(map(str, path)) and isinstance(weight, nnx.Param):
            weight[...] = weight[...] * 3  # far from λ_init
        if path[-1:] == ("ridge",):  # at first all are equal
            weight[...] = jnp.linspace(-1.0, 3.0, weight[...].size)
    return decoder


@pytest.fixture(scope="module", params=CASES)
def seen(request):
    model = make(request.param)
    return request.param, model, read(model, TOKENS)


def test_maps_times_values_are_what_the_layers_put_out(seen):
    _, model, layers = seen
    assert (
        len(layers)
        == len(attentions(model))
        == len(model.blocks) * (2 if seen[0] == "universal" else 1)
    )
    layer, block = attentions(model)[0], model.blocks[0]

    @jax.jit
    def run(tokens):
        x = jnp.take(model.embedding.embedding[...], tokens[None], axis=0)
        inner = block
        if seen[0] == "universal":
            x, inner = x + block.step_embedding[0][None, None], block.block
        norm = inner.norm if seen[0] == "gated" else inner.attention_norm
        operands = layer.operands(norm(x), jnp.arange(TIME)[None])
        return layer.mixer(operands)[0], inner(x)[0]

    mixed, hidden = run(TOKENS)
    found = np.einsum("nts,nsv->tnv", layers[0].map, layers[0].value)
    np.testing.assert_allclose(found, mixed, atol=2e-6)
    np.testing.assert_allclose(layers[0].hidden, hidden, atol=2e-6)


def test_a_differential_map_is_the_difference_of_its_branches(seen):
    name, _, layers = seen
    for layer in layers:
        assert (layer.lam is not None) == (name in DIFFERENTIAL)
        first, second = layer.branches[:, 0], layer.branches[:, -1]
        if layer.lam is None:
            assert layer.branches.shape[1] == 1
            np.testing.assert_array_equal(layer.map, first)
        else:
            lam = layer.lam.T[..., None]
            np.testing.assert_allclose(layer.map, first - lam * second, atol=2e-6)
            assert np.abs(first - second).max() > 1e-4
        if name == "grouped":  # heads 0 and 1, and 2 and 3, share a noise map
            np.testing.assert_array_equal(second[0::2], second[1::2])
            assert np.abs(second[0] - second[2]).max() > 1e-4
        assert not np.triu(layer.branches, 1).any()


def test_scores_are_products_of_the_queries_and_keys_that_are_given():
    layers = read(make("v1"), TOKENS)
    for layer in layers:
        size = layer.query.shape[-1]
        products = np.einsum("npth,npsh->npts", layer.query, layer.key) * size**-0.5
        found = np.where(np.tri(TIME) > 0, products, 0)
        np.testing.assert_allclose(layer.scores, found, atol=2e-6)


def test_softmax_of_the_scores_is_the_map_and_log_n_is_in_them():
    model = make("softmax")
    for layer in read(model, TOKENS):
        visible = np.tri(TIME, k=-1) > 0
        visible[0, 0] = True
        products = np.einsum("npth,npsh->npts", layer.query, layer.key) * 4**-0.5
        scaled = products * np.log(16) / np.log(64)
        np.testing.assert_allclose(
            layer.scores, np.where(visible, scaled, 0), atol=2e-6
        )
        powers = np.where(visible, np.exp(layer.scores.astype(np.float64)), 0)
        powers /= powers.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(layer.branches, powers, atol=2e-6)


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
@pytest.mark.parametrize("hidden", [{"window": 4}, {"window": 3, "mask_self": True}])
def test_visible_pairs_of_a_layer_are_those_with_a_weight(kind, hidden):
    """Softmax and linear attention weigh every key that they see. The options hide keys
    in the layer of softmax alone."""
    sizes = {"width": 16, "depth": 2, "heads": 4, "vocabulary": 10, "length": 16}
    options = config.Model(
        kind=kind,
        pattern=("softmax", "linear"),
        attention=config.Attention(**hidden),
        **sizes,
    )
    model = build(options, rngs=nnx.Rngs(0))
    visible = visible_by_layer(model, TIME)
    for layer, pairs in zip(read(model, TOKENS), visible, strict=True):
        np.testing.assert_array_equal((layer.map > 0).all(axis=0), pairs)


def test_the_uniform_map_is_that_of_the_window(monkeypatch):
    """Row t of a decoder with a window of 4 sees min(t + 1, 4) keys."""
    sizes = {"width": 16, "depth": 1, "heads": 4, "vocabulary": 10, "length": 16}
    options = config.Model(attention=config.Attention(window=4), **sizes)
    model = build(options, rngs=nnx.Rngs(0))
    monkeypatch.setattr(reading, "heldout_rows", lambda *_: [(TOKENS, TOKENS)])
    run = SimpleNamespace(config=config.Config(model=options), model=lambda: model)
    (found,) = attended.self_share(run, Options()).values["self_share"]
    wanted = np.mean([1 / min(t + 1, 4) for t in range(1, TIME)])
    assert found["uniform"] == pytest.approx(wanted)


def test_what_is_read_does_not_change_the_model():
    model = make("v1")
    before = jax.tree.leaves(nnx.state(model))
    blocks = list(model.blocks)
    read(model, TOKENS)
    assert list(model.blocks) == blocks
    for one, two in zip(before, jax.tree.leaves(nnx.state(model)), strict=True):
        np.testing.assert_array_equal(one, two)


def mean_over_rows(shares, answer, near):
    return nan_mean(attended.category_shares(shares, answer, near), axis=-2)


def test_mass_on_the_answer_the_context_and_elsewhere_by_hand():
    """Tokens a b a c, targets b a c a: rows 1 and 3 have answers, at 0 and at 0 and
    2."""
    tokens, targets = np.array([0, 1, 0, 2]), np.array([1, 0, 2, 0])
    answer = attended.answer_pairs(Window(tokens, targets, CAUSAL[:4, :4]))
    wanted = np.zeros((4, 4), bool)
    wanted[1, 0] = wanted[3, 0] = wanted[3, 2] = True
    np.testing.assert_array_equal(answer, wanted)
    weights = np.array(
        [[1, 0, 0, 0], [0.75, -0.25, 0, 0], [0, 0, 1, 0], [0.1, 0.2, 0.3, 0.4]]
    )
    near = attended.context_pairs(answer, CAUSAL[:4, :4], size=2)
    found = mean_over_rows(attended.shares(weights), answer, near)
    np.testing.assert_allclose(found, [(0.75 + 0.4) / 2, (0.25 + 0.4) / 2, 0.1])
    near = attended.context_pairs(answer, CAUSAL[:4, :4], size=1)
    even = mean_over_rows(attended.uniform_map(CAUSAL[:4, :4]), answer, near)
    np.testing.assert_allclose(even, [0.5, (0.5 + 0.25) / 2, 0.125])
    nothing = answer & False
    even = attended.uniform_map(CAUSAL[:4, :4])
    assert np.isnan(mean_over_rows(even, nothing, near)).all()


def test_mass_within_the_last_tokens_by_hand():
    """Rows 64 to 70 of a uniform map: w of n keys."""
    rows = np.arange(64, 71)
    wanted = [(w / rows).mean() for w in attended.WITHIN]
    even = attended.uniform_map(CAUSAL[:70, :70])
    found = nan_mean(attended.shares_within(even, CAUSAL[:70, :70]), axis=-1)
    np.testing.assert_allclose(found, wanted)
    found = attended.shares_within(np.eye(5), CAUSAL[:5, :5])  # only the last row
    np.testing.assert_array_equal(found, [[np.nan] * 4 + [1]] * 4)


def test_entropy_of_uniform_rows_is_ln_n_and_of_one_key_zero():
    found, counts = spread.entropies(attended.uniform_map(CAUSAL)), np.arange(1, 81)
    np.testing.assert_allclose(found, np.log(counts), atol=1e-12)
    assert spread.slope(counts, found) == pytest.approx(1)
    assert not spread.entropies(np.eye(40)).any()
    assert spread.slope(counts[:16], found[:16]) is None


def test_ranks_of_matrices_that_are_known():
    identity = ranks.ranks(np.ones(6), 6)
    assert [float(x) for x in identity] == pytest.approx([6, 6, 6, 6, 6])
    one = ranks.ranks(np.array([3.0, 0, 0, 0]), 4)
    assert [float(x) for x in one] == pytest.approx([1, 1, 1, 1, 1])
    two = ranks.ranks(np.array([[3.0, 1.0, 1e-9]]), 100)
    assert two.stable == pytest.approx(10 / 9)
    entropy = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    assert two.effective == pytest.approx(np.exp(entropy), rel=1e-6)
    assert (two.numerical, two.energy_90, two.energy_99) == (2, 1, 2)
    assert [float(x) for x in ranks.ranks(np.zeros(3), 3)] == [0] * 5


def test_singular_values_of_products_are_those_of_the_whole_matrix():
    query, key = np.random.default_rng(0).normal(size=(2, 3, 1, 20, 5))
    maps = np.tile(np.eye(20), (3, 1, 1, 1))
    layer = Layer(
        query, key, query[:, 0], None, None, maps, maps[:, 0], None, query[0, 0]
    )
    found = ranks.singular_values(layer)
    whole = np.linalg.svd(query @ np.swapaxes(key, -1, -2), compute_uv=False)
    np.testing.assert_allclose(found["QKᵀ"], whole[..., :5], rtol=1e-10)
    np.testing.assert_allclose(found["A"], np.ones((3, 20)))


def test_the_largest_are_counted_from_the_largest():
    found = magnitudes.largest(np.random.default_rng(0).permutation(50) + 1.0)
    assert found == {
        "top_1": 50,
        "top_2": 49,
        "top_3": 48,
        "top_10": 41,
        "top_100": None,
        "median": 25.5,
    }


def test_the_needle_of_the_first_question_is_the_answer_by_hand():
    """With 3 symbols the mark is 9 and the question 10: hay, mark 1 4, hay, mark 0 5,
    ask 0, ask 1."""
    options = config.Data(source="needle", symbols=3, items=2, asked=2)
    tokens = np.array([6, 9, 1, 4, 7, 9, 0, 5, 10, 0, 5, 10, 1])
    targets = np.where(np.arange(13) == 9, 5, np.where(np.arange(13) == 12, 4, -1))
    answer, around = attended.needle_pairs(options, tokens, targets)
    np.testing.assert_array_equal(np.argwhere(answer), [[9, 5], [9, 6], [9, 7]])
    wanted = [[9, place] for place in (0, 1, 2, 3, 4)]
    np.testing.assert_array_equal(np.argwhere(around), wanted)
    even = mean_over_rows(attended.uniform_map(CAUSAL[:13, :13]), answer, around)
    np.testing.assert_allclose(even, [0.3, 0.5, 0.2])


@pytest.mark.parametrize("differential", ["none", "v1"])
def test_noise_of_needles_is_read_depth_by_depth(differential):
    """Without queries maps are uniform, so shares are equal at every depth."""
    options = config.Data(source="needle", symbols=3, items=2, asked=1)
    chosen = config.Attention(differential=differential)
    model = config.Model(width=16, depth=1, heads=2, length=24, attention=chosen)
    model = replace(model, vocabulary=11)
    decoder = Decoder(model, rngs=nnx.Rngs(0))
    for layer in attentions(decoder):
        layer.query.kernel[...] *= 0
        layer.query.bias[...] *= 0
    run = SimpleNamespace(
        config=config.Config(data=options, model=model),
        decoder=lambda: decoder,
    )
    found = attended.noise(run, Options(batches=2)).values
    maps = ["A"] if differential == "none" else ["A", "A₁", "A₂"]
    assert [row["map"] for row in found["noise"]] == maps
    assert [row["depth"] for row in found["noise_by_depth"]] == [0, 0.25, 0.5, 0.75, 1]
    # the one question is the last of 24 tokens: 3 of its needle, 2 of its own
    for row in (*found["noise"], *found["noise_by_depth"]):
        assert row["answer"] == row["uniform"] == pytest.approx(3 / 24)
        assert row["context"] == pytest.approx(19 / 24)
        assert row["elsewhere"] == pytest.approx(2 / 24)


def test_sparsity_is_that_of_the_definition_row_by_row():
    rows = [[0.5, -0.5, 0, 0], [0, 1, 0, 0], [2, 2, -2, 2], [0, 0, 0, 0]]
    found = spread.sparsity(np.array([rows]), np.array([4, 4, 4, 4]))[:, 0]
    np.testing.assert_allclose(found[0], [0.5, 1, 0.25, np.nan])
    np.testing.assert_allclose(found[3], [2 - 2**0.5, 1, 0, np.nan])
    maps = np.tril(np.random.default_rng(0).normal(size=(3, 20, 20)))
    found = spread.sparsity(maps, np.arange(1, 21))
    for head, t in np.ndindex(3, 20):
        sizes = sorted(map(abs, maps[head, t, : t + 1]), reverse=True)
        shares = [sum(sizes[:k]) / sum(sizes) for k in (1, 4, 16)]
        np.testing.assert_allclose(found[:3, head, t], shares)
        root, length = (t + 1) ** 0.5, sum(x * x for x in sizes) ** 0.5
        if t == 0:
            assert np.isnan(found[3, head, t])
        else:
            wanted = (root - sum(sizes) / length) / (root - 1)
            assert found[3, head, t] == pytest.approx(wanted)
