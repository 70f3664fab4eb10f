"""Numbers by layer that a run logs at every evaluation."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import TEXT, train

from symjax.data.documents import tokens_of
from symjax.evaluation.loading import load
from symjax.evaluation.measures.attended import shares
from symjax.evaluation.measures.reading import read
from symjax.evaluation.measures.spread import entropies
from symjax.training.optimizer import Stacks

pytestmark = pytest.mark.usefixtures("cache")
OFTEN = {
    "model__depth": 2,
    "evaluate__every": 1,
    "evaluate__sample": "false",
    "evaluate__batches": 1,
    "log__every": 1,
    "log__attention": "true",
    "model__pattern": "softmax,linear",
    "steps": 2,
}
NAMES = ("entropy", "largest_logit", "gradient_norm")
MESHES = {  # the others take as long again
    "data and tensor": {"mesh__data": 2, "mesh__tensor": 2},
    "one device": {},
    "fsdp and sequence": {"mesh__fsdp": 2, "mesh__sequence": 2},
}


def evaluations(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "heldout/loss" in row]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Return a folder of short documents, so that a row holds several."""
    folder = tmp_path_factory.mktemp("texts")
    for name in "abcdef":
        (folder / f"{name}.txt").write_text(TEXT.replace("fox", name)[:9000])
    return folder


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(mesh, marks=[pytest.mark.slow] if index else [], id=name)
        for index, (name, mesh) in enumerate(MESHES.items())
    ],
)
def test_entropy_and_largest_logit_are_those_of_the_maps(texts, tmp_path, mesh):
    assert train(texts, tmp_path / "run", **OFTEN, **mesh) == 0
    rows, run = evaluations(tmp_path / "run"), load(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    heldout = run.examples.heldout_batches((1, 32), 4)
    tokens = [tokens_of(batch(0, 1)[0])[0] for batch in heldout]
    found = [read(run.model(), row) for row in tokens]
    for n in (0, 1):
        maps = np.stack([layers[n].map for layers in found])
        wanted = entropies(shares(maps)).mean()
        assert rows[-1][f"entropy/{n}"] == pytest.approx(wanted, rel=1e-4)
    scores = [layers[0].scores for layers in found]
    largest = max(np.abs(x).max() for x in scores if x is not None)
    assert rows[-1]["largest_logit/0"] == pytest.approx(largest, rel=1e-4)
    assert "largest_logit/1" not in rows[-1]  # linear attention has no scores
    for row in rows:
        squares = sum(row[f"gradient_norm/{n}"] ** 2 for n in (0, 1))
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        [total] = [
            line["gradient_norm"]
            for line in map(json.loads, lines)
            if line["step"] == row["step"] and "gradient_norm" in line
        ]
        assert 0.1 * total < squares**0.5 < total  # embeddings have the rest


@pytest.mark.slow
def test_the_key_turns_all_off_but_lambda(text, tmp_path):
    off = OFTEN | {"log__attention": "false"}
    assert train(text, tmp_path / "off", **off) == 0
    [*_, row] = evaluations(tmp_path / "off")
    assert not [x for x in row if x.startswith(NAMES)] and "lambda/1" in row


@pytest.mark.parametrize("period", [0, 1, 2, 3])
def test_norms_of_layers_are_those_of_their_weights(period):
    keys = jax.random.split(jax.random.key(0), 6)
    blocks = {
        depth: {"kernel": jax.random.normal(key, (3, 5)), "gain": jnp.float32(depth)}
        for depth, key in enumerate(keys)
    }
    stacks = Stacks(6, period)
    found = stacks.norms(stacks.stack({"blocks": blocks, "head": jnp.ones(7)}))
    wanted = [
        np.sqrt((np.float64(x["kernel"]) ** 2).sum() + depth**2)
        for depth, x in blocks.items()
    ]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
