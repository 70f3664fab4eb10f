"""What the README and the notebooks show runs, and says the truth."""

import json
import re
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=str)
def test_every_configuration_builds_in_every_size(path):
    from flax import nnx

    from symjax import config
    from symjax.models import Decoder
    from symjax.training.commandline import load

    for size in ("3l", "6l", "8l", "tiny"):
        options = config.from_dict(load(path, size).to_dict())
        model = dict(config.to_dict(options)["model"], vocabulary=65)
        options = config.from_dict({"model": model})
        built = nnx.eval_shape(lambda m=options.model: Decoder(m, rngs=nnx.Rngs(0)))
        assert len(built.blocks) == (2 if size == "tiny" else int(size[0]))
    if path.stem != "base":
        assert f"--config configs/{path.name}" in path.read_text()
