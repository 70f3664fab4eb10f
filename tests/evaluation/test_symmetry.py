"""Symmetry and direction of W_q W_kᵀ against their definitions in float64."""

from types import SimpleNamespace

import numpy as np
import pytest
from flax import nnx

from symjax import config
from symjax.evaluation.measures import symmetry
from symjax.evaluation.results import Options
from symjax.models import Decoder
from symjax.models.build import attentions


def by_definition(matrix):
    """Return symmetry and direction of a matrix [D D]."""
    part, skew = (matrix + matrix.T) / 2, (matrix - matrix.T) / 2
    whole = np.linalg.norm(matrix) ** 2
    first = (np.linalg.norm(part) ** 2 - np.linalg.norm(skew) ** 2) / whole
    r, c = (
        sum(x for x in lengths if x > np.mean(lengths) + 2 * np.std(lengths))
        for lengths in (np.linalg.norm(matrix, axis=axis) for axis in (1, 0))
    )
    return first, (c - r) / (c + r) if c + r else 0


def made(depth=2, **chosen):
    options = {"vocabulary": 10, "width": 12, "heads": 2, "length": 16, "depth": depth}
    options |= {name: chosen.pop(name) for name in list(chosen) if name in MODEL}
    attention = config.Attention(**chosen)
    model = config.Model(**options, attention=attention)
    return Decoder(model, rngs=nnx.Rngs(0))


MODEL = ("kv_heads", "pattern", "kind")


def measured(model):
    return symmetry.symmetry(SimpleNamespace(model=lambda: model), Options())


def test_scores_of_matrices_that_are_known():
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 3, 17, 5))
    found = symmetry.scores_of(query, key)
    wanted = [by_definition(q @ k.T) for q, k in zip(query, key, strict=True)]
    np.testing.assert_allclose(found, np.transpose(wanted), atol=1e-12)
    large = np.where(np.arange(17) == 4, 9.0, 1.0)[:, None]  # of one row or column
    even = np.full((17, 1), 0.7)
    assert symmetry.scores_of(large, even)[1] == -1
    assert symmetry.scores_of(even, large)[1] == 1
    same = symmetry.scores_of(query, query)
    np.testing.assert_allclose(same, [[1] * 3, [0] * 3], atol=1e-12)
    one, two = rng.normal(size=(2, 9, 4))
    pair = np.concatenate([one, -two], axis=1), np.concatenate([two, one], axis=1)
    found = symmetry.scores_of(*pair)  # of one twoᵀ − two oneᵀ
    np.testing.assert_allclose(found, by_definition(pair[0] @ pair[1].T), atol=1e-12)
    assert found[0] == pytest.approx(-1)


@pytest.mark.parametrize(
    "chosen",
    [
        {"kv_heads": 1},
        {"symmetric": "pairwise"},
        {"differential": "v1"},
        {"differential": "v2", "kv_heads": 1},
        {"differential": "v1", "signals": 2},
        {"symmetric": "kv"},
    ],
    ids=["grouped", "pairwise", "v1", "v2", "shared noise", "kv"],
)
def test_the_matrix_of_a_layer_is_the_sum_of_those_of_its_heads(chosen):
    model = made(**chosen)
    for layer, row in zip(
        attentions(model), measured(model).values["symmetry"], strict=True
    ):
        size = layer.mixer.sizes.head_size
        query = np.split(
            np.float64(layer.query.kernel[...]), layer.mixer.sizes.queries, 1
        )
        if layer.symmetric == "pairwise":
            metric = np.float64(layer.metric[...])
            key = [w @ u.T for w, u in zip(query, metric, strict=True)]
        else:
            key = np.split(np.float64(layer.key.kernel[...]), layer.mixer.sizes.keys, 1)
            key = [key[i * len(key) // len(query)] for i in range(len(query))]
        if chosen.get("signals"):  # two signal maps, then the noise map of both
            query, key = ([x[0], x[2], x[1], x[2]] for x in (query, key))
        assert query[0].shape[1] == size
        forms = [q @ k.T for q, k in zip(query, key, strict=True)]
        found = row["symmetry"], row["direction"]
        np.testing.assert_allclose(found, by_definition(sum(forms)), atol=1e-6)
        heads = np.mean([by_definition(form) for form in forms], axis=0)
        found = row["symmetry_of_heads"], row["direction_of_heads"]
        np.testing.assert_allclose(found, heads, atol=1e-6)


def test_keys_that_are_queries_are_symmetric_and_gated_units_have_no_matrix():
    for symmetric in ("plain", "qkv"):
        for row in measured(made(symmetric=symmetric)).values["symmetry"]:
            assert row["symmetry"] == pytest.approx(1)
            assert row["symmetry_of_heads"] == pytest.approx(1)
            assert row["direction"] == pytest.approx(0, abs=1e-9)
    mixed = measured(made(pattern=("softmax", "gau")))
    assert [row["layer"] for row in mixed.values["symmetry"]] == [0]
    assert "queries are not linear in tokens: gau" in mixed.text[-1]
    alone = measured(made(pattern=("gau",)))
    assert alone.values == {"symmetry": []} and not alone.tables
    universal = measured(made(depth=3, kind="universal"))
    assert len(universal.values["symmetry"]) == 1
