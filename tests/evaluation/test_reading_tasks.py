"""Tasks that look inside a model, on a small trained model and on known numbers."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from runs import compile_cache, train, write_text

from symjax import config
from symjax.evaluation import tasks
from symjax.evaluation.headlines import headlines
from symjax.evaluation.loading import load
from symjax.evaluation.measures import approximation, lengths, magnitudes
from symjax.evaluation.measures.reading import Layer
from symjax.evaluation.measures.weights import lambda_table
from symjax.evaluation.results import Options

KEYS = {
    "model__depth": 2,
    "model__attention__length_base": 64,
    "steps": 20,
    "checkpoint__every": 10,
}
ONE = Options(batches=1)
INSIDE = ("noise", "self_share", "dilution", "entropy", "support", "rank", "outliers")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    with compile_cache(tmp_path_factory.getbasetemp() / "jax"):
        place = tmp_path_factory.mktemp("reading")
        assert train(write_text(place), place / "run", **KEYS) == 0
        yield load(place / "run")


def measure(trained, name):
    return tasks.TASKS[name].measure(trained, ONE)


def test_every_task_gives_plain_numbers_for_json_the_same_each_time(trained):
    for name in (*INSIDE, "maps", "gradients", "dimension", "position"):
        found = measure(trained, name)
        text = json.dumps(found.values, allow_nan=False)
        assert text == json.dumps(measure(trained, name).values)
        assert found.text or found.tables
        assert name in found.values or name == "maps"
        numbers = [x for x in headlines(name, found).values() if x is not None]
        assert np.isfinite(numbers).all() and (numbers or name in ("maps", "support"))


def test_windows_may_be_longer_than_those_of_training(trained):
    options = Options(batches=1, window=96)
    (row, *_) = tasks.TASKS["entropy"].measure(trained, options).values["entropy"]
    assert list(row["entropy"]) == ["1", "2", "4", "8", "16", "32", "64"]
    too_long = Options(window=trained.examples.longest + 1)
    with pytest.raises(ValueError, match=r"^--window \d+ tokens: the held-out"):
        tasks.TASKS["noise"].measure(trained, too_long)


def test_lambda_is_drawn_over_the_steps_that_are_kept(trained):
    finding = measure(trained, "lambda")
    last, table = finding.tables
    assert [row[0] for row in table.rows] == [10, 20]
    assert table.rows[-1][1:] == tuple(row[-1] for row in last.rows)
    assert table.rows[0][1:] != table.rows[1][1:]
    (figure,) = finding.figures
    assert list(figure.series) == ["layer 0", "layer 1"]
    first = load(trained.workdir, 10)
    assert measure(first, "lambda").tables[0].rows[1][-1] == table.rows[0][2]


def test_shares_of_every_map_sum_to_one(trained):
    rows = measure(trained, "noise").values["noise"]
    assert [(row["layer"], row["map"]) for row in rows] == [
        (layer, name) for layer in (0, 1) for name in ("A", "A₁", "A₂")
    ]
    for row in rows:
        assert row["answer"] + row["context"] + row["elsewhere"] == pytest.approx(1)
        assert 0 < row["uniform"] < 1


def test_the_whole_window_is_within_64_of_32_tokens(trained):
    for row in measure(trained, "dilution").values["dilution"]:
        shares = list(row["within"].values())
        assert shares == sorted(shares) and shares[-1] == pytest.approx(1)


def test_ranks_stay_below_the_size_of_heads(trained):
    size = trained.model().blocks[0].attention.mixer.sizes.head_size
    rows = measure(trained, "rank").values["rank"]
    assert {row["matrix"] for row in rows} == {"QQᵀ", "A₁, A₂", "A₁ − λA₂"}
    for row in rows:
        limit = size if row["matrix"] == "QQᵀ" else 32
        assert 1 <= row["stable"] <= row["numerical"] <= limit
        assert 1 <= row["effective"] <= limit and row["energy_90"] <= row["energy_99"]


def test_branches_and_their_difference_are_drawn_side_by_side(trained):
    figures = measure(trained, "maps").figures
    assert [figure.name for figure in figures] == ["map_0", "map_1"]
    table = {row["layer"]: row["lambda"] for row in lambda_table(trained.model())}
    for layer, figure in enumerate(figures):
        assert figure.title.startswith(f"Layer {layer}: differential softmax attention")
        first, second, difference = (grid.values for grid in figure.grids)
        np.testing.assert_allclose(difference, first - table[layer] * second, atol=1e-5)
        np.testing.assert_allclose(np.nansum(first, axis=1), 1, atol=1e-5)
        for place, row in enumerate(figure.grids[2].values):
            known = ~np.isnan(row)
            assert sum(known) == place + 1 and all(known[: place + 1])


def test_curves_over_places_are_drawn_smooth_through_what_was_measured(trained):
    (position,) = measure(trained, "position").figures
    (noise,) = measure(trained, "noise").figures
    assert list(noise.series) == ["A", "A₁", "A₂", "uniform"]
    for figure in (position, noise):
        for label, (x, y) in figure.series.items():
            places, measured = figure.points[label]
            assert places == x
            assert np.abs(np.diff(y)).sum() < np.abs(np.diff(measured)).sum()
            assert min(measured) <= min(y) and max(y) <= max(measured)


def test_places_of_the_window_are_those_of_the_loss(trained):
    """Their mean is the held-out loss of the same windows, computed by other code."""
    places = lengths.by_position(trained, trained.model(), 32, 2)
    found = tasks.TASKS["loss"].measure(trained, Options(batches=2)).values
    assert places.mean()[0] == pytest.approx(found["heldout"]["loss"], rel=1e-5)
    rows = lengths.position(trained, Options(batches=2)).values["position"]
    assert [(row["from"], row["to"]) for row in rows] == [
        (1, 1),
        (2, 2),
        (3, 4),
        (5, 8),
        (9, 16),
        (17, 32),
    ]
    total = sum(row["loss"] * (row["to"] - row["from"] + 1) for row in rows) / 32
    assert total == pytest.approx(found["heldout"]["loss"], rel=1e-4)


def test_longer_windows_and_log_n_off_and_on(trained, monkeypatch):
    monkeypatch.setattr(lengths, "FACTORS", (1, 2))
    found = measure(trained, "length").values["length"]
    assert list(found) == ["32", "64"]
    for row in found.values():
        assert list(row) == ["off", "evaluation", "trained"]
    same = lengths.by_position(trained, trained.model(), 64, 1, 2)
    assert found["64"]["trained"]["loss"] == pytest.approx(same.mean()[0])
    assert found["64"]["trained"]["last"] == pytest.approx(same.mean(32)[0])
    assert found["64"]["off"]["loss"] != found["64"]["trained"]["loss"]


def test_longer_windows_are_read_with_scaled_rope(trained, monkeypatch):
    """Evaluation scales RoPE by the factor of the window.

    A window as long as in training is not scaled.
    """
    monkeypatch.setattr(lengths, "FACTORS", (1, 2))
    options = ONE._replace(rope_scaling=("dynamic", "yarn"))
    finding = lengths.length(trained, options)
    found = finding.values["length"]
    assert list(found["32"]) == ["off", "evaluation", "trained"]
    assert list(found["64"])[3:] == ["rope dynamic", "rope yarn"]
    scaled = config.RopeScaling(kind="yarn", factor=2.0, original_length=32)
    model = dataclasses.replace(trained.config.model, rope_scaling=scaled)
    made = lengths.merged(model, trained.params, trained.constants)
    same = lengths.by_position(trained, made, 64, 1, 2)
    assert found["64"]["rope yarn"]["loss"] == pytest.approx(same.mean()[0])
    losses = [found["64"][x]["loss"] for x in ("trained", "rope dynamic", "rope yarn")]
    assert len(set(losses)) == 3
    changed = dataclasses.replace(trained.config, model=model)
    finding = lengths.length(trained._replace(config=changed), options)
    assert "RoPE is not scaled again: model.rope_scaling.kind is 'yarn'" in finding.text


def test_learned_positions_have_no_longer_windows(trained):
    model = trained.config.model
    assert model.positions == "rope"
    learned = dataclasses.replace(model, positions="learned")
    changed = dataclasses.replace(trained.config, model=learned)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lengths, "merged", lambda *_: trained.model())
        finding = lengths.length(trained._replace(config=changed), ONE)
    assert list(finding.values["length"]) == ["32"]
    assert "learned positions" in finding.text[0]


def test_log_n_hurts_an_average_as_much_as_its_formula_says():
    base = 32
    for row in lengths.averages([512, 1024], base, seed=0):
        growth = np.log(row["n"]) / np.log(base)
        for name, factor in (("off", 1), ("on", growth)):
            variance = (lengths.SPREAD * factor) ** 2
            expected = np.sqrt(np.exp(variance) - 1)
            assert row[f"average_{name}"] == pytest.approx(expected, rel=0.15)
        assert row["average_on"] > 1.5 * row["average_off"]
        assert row["majority_on"] > row["majority_off"] > 0


def estimated_map(kind, query, key, rows, statistics, visible):
    """Return the map [N T T] of random features by their formulas, in float64."""
    query, key = (x / x.shape[-1] ** 0.25 for x in (query, key))
    offset = 0
    if statistics is not None:
        a, b = (np.float64(x) for x in statistics)
        rows, offset = rows @ b, (rows**2) @ a
    projected = query @ rows.T + offset, key @ rows.T + offset
    lengths = [(x**2).sum(axis=-1, keepdims=True) / 2 for x in (query, key)]
    if kind == "hyperbolic":
        projected = [np.concatenate([x, -x], axis=-1) for x in projected]
    if kind == "trigonometric":
        waves = [np.concatenate([np.cos(x), np.sin(x)], axis=-1) for x in projected]
        features = [x * np.exp(y) for x, y in zip(waves, lengths, strict=True)]
    else:
        features = [np.exp(x - y) for x, y in zip(projected, lengths, strict=True)]
    products = np.where(visible, features[0] @ np.swapaxes(features[1], -1, -2), 0)
    return products / products.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("kind", approximation.KINDS)
@pytest.mark.parametrize("causal", [True, False])
def test_errors_of_features_are_those_of_their_definition(kind, causal):
    rng = np.random.default_rng(0)
    query, key, value = rng.normal(size=(3, 2, 9, 4)) * 0.7
    uniform = np.full((9, 9), 1 / 9)
    heads = approximation.Heads(query, key, value, np.tile(uniform, (2, 1, 1)), uniform)
    statistics = approximation.statistics_of(kind, heads)
    projections = rng.normal(size=(3, 8, 4))
    visible = oracles.seen(1, 9, 9, causal=causal)[0, 0]
    wanted = np.stack(
        [
            estimated_map(kind, query, key, rows, statistics, visible)
            for rows in projections
        ]
    )
    given = kind, query, key, projections, statistics
    found = np.asarray(approximation.random_maps(*given, causal=causal))
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    differences = wanted - heads.exact
    by_hand = [
        [
            np.mean([np.linalg.norm(x) for x in of_heads]) / np.linalg.norm(uniform)
            for of_heads in differences
        ],
        [
            np.mean(
                [
                    np.linalg.norm(x @ v) / np.linalg.norm(uniform @ v)
                    for x, v in zip(of_heads, value, strict=True)
                ]
            )
            for of_heads in differences
        ],
    ]
    options = kind, projections, statistics
    errors = approximation.random_errors(heads, *options, causal=causal)
    np.testing.assert_allclose(errors, by_hand, rtol=1e-3)
    exact = approximation.exact_map(query, key, causal=causal)
    scores = np.einsum("nth,nsh->nts", query, key) / 2
    by_hand = oracles.softmax_weights(scores, visible)
    np.testing.assert_allclose(exact, by_hand, atol=1e-12)
    assert not approximation.errors(exact, exact, value).any()
    np.testing.assert_allclose(approximation.errors(3 * exact, exact, value), 2)


def test_all_features_are_compared_with_standard_errors(trained, monkeypatch):
    monkeypatch.setattr(approximation, "FEATURES", (4, 8))
    monkeypatch.setattr(approximation, "DRAWS", 5)
    monkeypatch.setattr(approximation, "KINDS", ("trigonometric", "favor#"))
    drawn = {}
    measured = approximation.random_errors

    def remember(heads, kind, projections, *rest, **more):
        found = measured(heads, kind, projections, *rest, **more)
        drawn.setdefault((kind, projections.shape[1]), []).append(found)
        return found

    monkeypatch.setattr(approximation, "random_errors", remember)
    finding = measure(trained, "approximation")
    rows = finding.values["approximation"]["random"]
    assert [(row["features"], row["count"], row["rows"]) for row in rows] == [
        (kind, count, rows)
        for kind in ("trigonometric", "favor#")
        for count in (4, 8)
        for rows in ("orthogonal", "independent")
    ]
    for i, row in enumerate(rows):
        layers = drawn[row["features"], row["count"]][2 * (i % 2) :][:2]
        means = np.mean(layers, axis=0)  # over layers, of each draw
        assert means.shape == (2, 5)
        for name, values in zip(("map", "output"), means, strict=True):
            assert row[name] == pytest.approx(np.mean(values))
            error = np.sqrt(np.var(values) * 5 / 4 / 5)
            assert row[f"{name}_se"] == pytest.approx(error)
    for figure, which in zip(
        finding.figures, ("orthogonal", "independent"), strict=True
    ):
        errors = [x["output"] for x in rows if x["rows"] == which][2:]
        np.testing.assert_allclose(figure.series["favor#"][1], errors)
        np.testing.assert_allclose(np.mean(figure.bands["favor#"], axis=0), errors)


def test_slopes_are_the_derivatives_of_weights():
    rng = np.random.default_rng(0)
    positive = np.tril(rng.uniform(0.01, 2, (1, 1, 6, 6)))
    linear = positive / positive.sum(axis=-1, keepdims=True)
    powers = np.tril(np.exp(positive))
    soft = powers / powers.sum(axis=-1, keepdims=True)

    def layer(weights, products):
        empty = np.zeros((1, 1, 6, 1))
        rest = (weights, weights[:, 0], None, empty)
        return Layer(empty, empty, empty[:, 0], None, products, *rest)

    def diagonal(weights, scores):
        return np.diagonal(jax.jacobian(weights)(jnp.asarray(scores)))

    row = positive[0, 0, -1]
    found = magnitudes.derivatives(layer(linear, positive))[0, 0, -1]
    np.testing.assert_allclose(found, diagonal(lambda z: z / z.sum(), row), rtol=1e-5)
    found = magnitudes.derivatives(layer(soft, None))[0, 0, -1]
    np.testing.assert_allclose(found, diagonal(jax.nn.softmax, row), rtol=1e-5)
    # features near zero have unbounded slopes
    tiny = magnitudes.derivatives(layer(linear, 1e-4 * positive))
    assert tiny.max() > 1e3 and magnitudes.derivatives(layer(soft, None)).max() <= 0.25
