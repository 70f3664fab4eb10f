"""The report names its run, and the figure of λ has every evaluation."""

import json
import platform
import re

import jax
import numpy as np
import pytest
from runs import TEXT, train

import symjax
from symjax.data.documents import tokens_of
from symjax.evaluation import report
from symjax.evaluation.loading import load
from symjax.evaluation.measures import weights
from symjax.evaluation.measures.reading import read
from symjax.evaluation.measures.weights import lambdas
from symjax.evaluation.overview import overview
from symjax.evaluation.results import Options
from symjax.models.lambdas import lambda_table
from symjax.training.context import sessions

pytestmark = pytest.mark.usefixtures("cache")
OFTEN = {
    "model__depth": 2,
    "checkpoint__keep": 1,
    "evaluate__every": 1,
    "evaluate__sample": "false",
    "evaluate__batches": 1,
    "seed": 5,
}


@pytest.fixture(scope="module")
def workdir(text, cache, tmp_path_factory):
    """Return a run of three steps that was continued for two at another rate."""
    found = tmp_path_factory.mktemp("runs") / "run"
    assert train(text, found, steps=3, **OFTEN) == 0
    more = OFTEN | {"optimizer__learning_rate": 0.001}
    allow = "--allow", "optimizer.learning_rate"
    assert train(text, found, *allow, steps=5, **more) == 0
    return found


def test_the_report_has_seed_versions_date_and_what_was_allowed_to_change(workdir):
    [table] = overview(load(workdir))["run"].tables
    rows = dict(table.rows)
    assert rows["seed"] == "5"
    assert re.match(r"20\d\d-\d\d-\d\d \d\d:\d\d UTC, symjax ", rows["from step 0"])
    versions = {"symjax": symjax.__version__, "jax": jax.__version__}
    versions["python"] = platform.python_version()
    for name, version in versions.items():
        assert f"{name} {version}" in rows["from step 0"]
    assert "flax 0." in rows["from step 0"] and "from step 3" not in rows
    assert rows["changed from step 3"] == "optimizer.learning_rate: 0.004 → 0.001"
    page = report.to_html("title", overview(load(workdir)))
    assert "0.004 → 0.001" in page and "<h2>run</h2>" in page


def test_a_checkpoint_of_before_says_that_it_has_no_date(workdir):
    [table] = overview(load(workdir)._replace(sessions=()))["run"].tables
    assert table.rows[1] == ("date, versions", "not in checkpoints of older versions")


def test_another_version_is_one_more_session():
    first = sessions(None, 0)
    assert first[0]["step"] == 0 and len(first) == 1
    assert sessions({"sessions": first}, 7) == first
    older = [first[0] | {"jax": "0.1"}]
    found = sessions({"sessions": older}, 7)
    assert found[0] == older[0] and found[1]["jax"] == jax.__version__
    assert found[1]["step"] == 7


def test_lambda_of_every_layer_is_logged_and_drawn_at_every_evaluation(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    rows = [x for x in map(json.loads, lines) if "heldout/loss" in x]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    run = load(workdir)
    now = [row["lambda"] for row in lambda_table(run.model())]
    assert [rows[-1][f"lambda/{n}"] for n in (0, 1)] == pytest.approx(now, rel=1e-12)
    [figure] = lambdas(run, Options()).figures
    for n in (0, 1):
        steps, values = figure.series[f"layer {n}"]
        assert steps == [1, 2, 3, 4, 5]
        assert values == pytest.approx([row[f"lambda/{n}"] for row in rows])


def test_the_mean_of_weights_and_older_runs_have_the_lambda_of_checkpoints(
    workdir, monkeypatch
):
    """Logged values belong to other weights. With one checkpoint there is no curve."""
    run = load(workdir)
    assert weights._logged(run._replace(ema=True), [0, 1]) == {}
    assert [*weights._logged(run, [0, 1])] == [1, 2, 3, 4, 5]
    monkeypatch.setattr("symjax.evaluation.measures.weights.rows_of", lambda _: [])
    assert not lambdas(run, Options()).figures


def test_the_mean_lambda_of_tokens_is_logged_and_drawn(cache, tmp_path):
    """Differential V2, on two devices, with several documents per row."""
    chosen = OFTEN | {"model__attention__differential": "v2", "mesh__data": 2}
    chosen |= {"model__attention__symmetric": "none", "data__documents": "separate"}
    (tmp_path / "texts").mkdir()
    for name in "abcdef":
        (tmp_path / "texts" / f"{name}.txt").write_text(TEXT.replace("fox", name))
    assert train(tmp_path / "texts", tmp_path / "run", steps=2, **chosen) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [x for x in map(json.loads, lines) if "heldout/loss" in x]
    run = load(tmp_path / "run")
    [batch] = run.examples.heldout_batches((8, 32), 1)
    tokens = tokens_of(batch(0, 8)[0])
    found = [read(run.model(), row) for row in tokens]
    for n in (0, 1):
        wanted = np.mean([layers[n].lam for layers in found])
        assert rows[-1][f"lambda/{n}"] == pytest.approx(wanted, rel=1e-5)
    finding = lambdas(run, Options(batches=1))
    [figure] = finding.figures
    assert figure.series["layer 0"][0] == [1, 2]
    assert figure.series["layer 1"][1] == [row["lambda/1"] for row in rows]
    assert [table.name for table in finding.tables] == ["lambda", "lambda_by_step"]
