"""Spectra of maps, similarity of tokens and Markov chains against their definitions."""

from types import SimpleNamespace

import numpy as np
import pytest
from flax import nnx

from symjax import config
from symjax.evaluation import tasks
from symjax.evaluation.measures import chains, spectrum
from symjax.evaluation.measures.reading import read
from symjax.evaluation.report import to_csv, to_text
from symjax.evaluation.results import Options, Result, Table
from symjax.models.build import build

LENGTH = 13
TOKENS = np.random.default_rng(0).integers(0, 10, (3, LENGTH))


def normalised(weights):
    return weights / weights.sum(axis=-1, keepdims=True)


def test_a_softmax_of_symmetric_scores_is_reversible():
    query = np.random.default_rng(0).normal(size=(3, 23, 5))
    weights = np.exp(query @ np.swapaxes(query, 1, 2))
    maps = normalised(weights)
    shares = chains.stationary(maps)
    wanted = weights.sum(axis=-1) / weights.sum(axis=(-2, -1))[:, None]
    np.testing.assert_allclose(shares, wanted, rtol=1e-12)
    assert chains.balance_error(maps, shares).max() < 1e-12


def test_the_stationary_distribution_is_the_left_eigenvector():
    maps = normalised(np.random.default_rng(1).exponential(size=(2, 9, 9)) ** 3)
    shares = chains.stationary(maps)
    for matrix, found in zip(maps, shares, strict=True):
        values, vectors = np.linalg.eig(matrix.T)
        vector = vectors[:, np.argmax(values.real)].real
        np.testing.assert_allclose(found, vector / vector.sum(), rtol=1e-9)
        flows = np.array(
            [[found[i] * matrix[i, j] for j in range(9)] for i in range(9)]
        )
        error = np.sqrt(((flows - flows.T) ** 2).sum() / (flows**2).sum())
        assert chains.balance_error(matrix, found) == pytest.approx(error)
        assert error > 0.1
    cycle = np.roll(np.eye(5), 1, axis=1)
    assert chains.balance_error(cycle, chains.stationary(cycle)) == pytest.approx(
        2**0.5
    )
    apart = np.kron(np.eye(2), np.full((2, 2), 0.5))  # two pairs that never meet
    assert np.isnan(chains.stationary(apart)).any()


def test_tokens_are_alike_by_the_cosines_of_all_pairs():
    hidden = np.random.default_rng(2).normal(size=(7, 4)) + 0.5
    unit = [x / np.linalg.norm(x) for x in hidden]
    cosines = [a @ b for i, a in enumerate(unit) for j, b in enumerate(unit) if i != j]
    cosine, rank = spectrum.likeness(hidden)
    assert cosine == pytest.approx(np.mean(cosines))
    values = np.linalg.eigvalsh(hidden.T @ hidden)
    assert rank == pytest.approx(values.sum() / values.max())
    np.testing.assert_allclose(spectrum.likeness(np.ones((6, 3))), [1, 1])
    np.testing.assert_allclose(spectrum.likeness(np.eye(6)), [0, 6], atol=1e-12)


def test_one_token_has_neither_a_second_singular_value_nor_a_cosine():
    assert spectrum._largest([3.0]) == {"first": 3.0, "second": None, "ratio": None}
    assert np.isnan(spectrum.likeness(np.ones((1, 4)))[0])
    row = ("layer 0", float("nan"), None, 2.5)
    table = Table("cosines", ("of", "cosine", "σ₁/σ₂", "rank"), [row])
    printed = to_text(Result({}, [], (table,)))
    assert printed.split()[-4:] == ["0", "-", "-", "2.5000"]
    assert to_csv(table).splitlines()[1] == "layer 0,,,2.5"


def measured(kind, attention=None, **changes):
    """Return the task's result and the model of a small run."""
    options = {"kind": kind, "vocabulary": 10, "width": 16, "depth": 2, "heads": 2}
    options |= {"length": LENGTH, "positions": "rope", **changes}
    model = config.Model(attention=config.Attention(**attention or {}), **options)
    made = build(model, rngs=nnx.Rngs(0))
    for layer in made.blocks:  # far from uniform maps
        layer.attention.query.kernel[...] = 3 * layer.attention.query.kernel[...]

    def heldout_batches(shape, count=None):
        for row in TOKENS[:count]:
            batch = row[None], row[None], np.ones((1, LENGTH), np.float32)
            yield lambda start, stop, batch=batch: batch

    run = SimpleNamespace(
        examples=SimpleNamespace(
            heldout_batches=heldout_batches, separate=False, fixed_length=True
        ),
        config=config.Config(model=model),
        model=lambda: made,
    )
    return tasks.measure("spectrum", run, Options()), made


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_only_symmetric_models_are_reversible(kind):
    errors = {}
    for symmetric in ("none", "plain"):
        finding, _ = measured(kind, {"symmetric": symmetric})
        rows = finding.values["spectrum"]["chains"]
        assert [row["layer"] for row in rows] == [0, 1]
        assert all(1 <= row["tokens"] <= LENGTH for row in rows)
        assert all(1 / LENGTH <= row["largest"] <= 1 for row in rows)
        errors[symmetric] = [row["balance_error"] for row in rows]
    assert max(errors["plain"]) < 1e-5 < 0.05 < min(errors["none"])


def test_singular_values_are_those_of_the_maps_of_the_model():
    finding, model = measured("decoder", {"differential": "v1"})
    rows = finding.values["spectrum"]["matrices"]
    names = ["QKᵀ", "A₁, A₂", "A₁ − λA₂", "A₁ − U, A₂ − U"]
    assert [row["matrix"] for row in rows] == names * 2
    uniform = np.tril(1 / np.arange(1, LENGTH + 1)[:, None] + np.zeros(LENGTH))
    values = []
    for tokens in TOKENS:
        layer = read(model, tokens)[0]
        branches = np.float64(layer.branches)
        values.append([mean_values(x) for x in (layer.map, branches - uniform)])
    for row, found in zip(rows[2:4], np.mean(values, axis=0), strict=True):
        assert row["first"] == pytest.approx(found[0])
        assert row["second"] == pytest.approx(found[1])
        assert row["ratio"] == pytest.approx(found[0] / found[1])
    first, second = finding.figures
    assert list(first.series) == list(first.bands) == names and first.log_y
    assert first.series["A₁ − λA₂"][1][0] == 1 == first.bands["A₁ − λA₂"][0][0]
    shares = [row["second"] / row["first"] for row in rows if row["matrix"] == names[2]]
    low, high = (bound[1] for bound in first.bands["A₁ − λA₂"])
    assert (low, high) == pytest.approx((min(shares), max(shares)))
    assert second.name == "spectrum_similarity"


def mean_values(matrices):
    matrices = np.float64(matrices).reshape(-1, LENGTH, LENGTH)
    return np.linalg.svd(matrices, compute_uv=False).mean(axis=0)


def test_what_has_no_chain_is_said():
    finding, _ = measured("decoder", {"mechanism": "linear"})
    assert finding.values["spectrum"]["chains"] == []
    assert "the maps are causal and no layer has softmax" in finding.text[-1]
    assert len(finding.tables) == 2
    finding, _ = measured("encoder", {"mechanism": "matrix_function"})
    assert "weights are below 0 or rows do not sum to 1" in finding.text[-1]
    finding, _ = measured("encoder", {"mechanism": "cosine", "symmetric": "plain"})
    assert finding.values["spectrum"]["chains"][0]["balance_error"] < 1e-5
    mixed, _ = measured("decoder", pattern=("softmax", "linear"))
    assert [row["layer"] for row in mixed.values["spectrum"]["chains"]] == [0]


def test_layers_of_different_sizes_share_a_figure():
    """A gated layer has larger heads than the other layers of model.pattern."""
    curves = {(0, "QKᵀ"): [4.0, 2.0, 1.0], (1, "QKᵀ"): [8.0, 2.0]}
    figure = spectrum._spectra_figure(curves)
    assert figure.series == {"QKᵀ": ([1.0, 2.0], [1.0, 0.375])}
    assert figure.bands == {"QKᵀ": ([1.0, 0.25], [1.0, 0.5])}
