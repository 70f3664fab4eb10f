"""What the README and the notebooks show runs, and says the truth."""

import ast
import json
import re
from pathlib import Path

import pytest
from flax import nnx

from symjax import validation
from symjax.models import build
from symjax.training.commandline import load

ROOT = Path(__file__).resolve().parents[1]


def test_the_notebook_runs_and_shows_what_it_says():
    cells = json.loads((ROOT / "notebooks/performer.ipynb").read_text())["cells"]
    names: dict = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    errors = names["errors"]
    assert errors[1024] < errors[256] < errors[128]
    assert errors[1024] < errors["mean"]
    assert names["moved"] < 2e-6
    assert names["difference"] < 1e-5


def test_the_snippet_of_the_readme_runs():
    snippets = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S
    )
    assert snippets
    for snippet in snippets:
        names: dict = {}
        exec(snippet, names)
        assert names["out"].shape == (1, 4096, 8, 64)


@pytest.mark.parametrize(
    "path",
    [path for path in sorted((ROOT / "configs").glob("*.py")) if path.stem != "base"],
    ids=lambda path: path.stem,
)
def test_every_configuration_names_its_command_and_builds_its_models(path):
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert f"python train.py --config configs/{path.name}\n" in text + "\n"
    for size, depth in (("tiny", 2), ("6l", 6)):
        tree = load(path, size).to_dict()
        tree["model"]["vocabulary"] = 65
        if tree["model"]["patch"]:
            tree["model"]["image"] = (8, 8, 1)
        options = validation.from_dict(tree).model
        built = nnx.eval_shape(lambda m=options: build(m, rngs=nnx.Rngs(0)))
        assert len(built.blocks) in (depth, 2 * depth, 1)  # gated, universal
