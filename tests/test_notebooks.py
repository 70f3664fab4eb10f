"""Notebooks run, reproduce their stored outputs, and name no machine."""

import re
import sys

import jax
import jax.numpy as jnp
import nbformat
import numpy as np
import pytest
from runs import ROOT

sys.path.insert(0, str(ROOT / "notebooks"))
from execute import executed  # noqa: E402

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
QUICK = "mechanism"  # other notebooks take more than ten seconds
VARIES = {"checkpoint": ["generate(", "iterdir("]}  # cells whose text may differ
NUMBER = r"-?\d+(\.\d+)?(e[-+]?\d+)?"


def outputs(notebook, varies=()):
    """Return the kinds of outputs of every cell, and their text without numbers."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        compared = not any(part in cell.source for part in varies)
        for output in cell.outputs:
            kinds = sorted(output.get("data", {}))
            text = output.get("text", output.get("data", {}).get("text/plain", ""))
            kept = (
                re.sub(NUMBER, "#", text)
                if compared and "image/png" not in kinds
                else ""
            )
            found.append((cell.id, output.output_type, kinds, " ".join(kept.split())))
    return found


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            p,
            id=p.stem,
            marks=getattr(pytest.mark, "always" if p.stem == QUICK else "slow"),
        )
        for p in NOTEBOOKS
    ],
)
def test_a_notebook_gives_the_outputs_that_it_is_stored_with(path, monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    stored, varies = nbformat.read(path, as_version=4), VARIES.get(path.stem, ())
    assert outputs(executed(path), varies) == outputs(stored, varies)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_stored_notebook_is_whole_and_names_no_machine(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert any("image/png" in x.get("data", {}) for c in code for x in c.outputs)
    texts = [x.get("text", "") for c in code for x in c.outputs]
    texts += [x.get("data", {}).get("text/plain", "") for c in code for x in c.outputs]
    assert not any(x.output_type == "error" for c in code for x in c.outputs)
    for text in [*texts, str(notebook.metadata)]:
        assert not re.search(r"(^|[\s'\"(])/\w|[A-Z]:\\\\|0x[0-9a-f]{6}", text)


def test_the_softmax_off_by_one_has_the_gradient_of_its_definition():
    """The definition has one more score of 0, whose weight is dropped."""
    notebook = nbformat.read(ROOT / "notebooks" / "mechanism.ipynb", as_version=4)
    found: dict = {}
    exec(next(x.source for x in notebook.cells if x.cell_type == "code"), found)
    scores = np.random.default_rng(0).normal(size=(1, 2, 3, 5)).astype(np.float32)

    def definition(scores):
        more = jnp.pad(scores, [(0, 0)] * 3 + [(0, 1)])
        return jax.nn.softmax(more, axis=-1)[..., :-1]

    weights = [lambda x: found["off_by_one_weights"](x, None), definition]
    one, other = (jax.jacobian(x)(scores) for x in weights)
    np.testing.assert_allclose(one, other, atol=1e-6)
