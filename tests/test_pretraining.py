"""The commands of docs/pretraining.md run in order, on small data."""

import json
import re
import shlex

import datasets
import pytest
from runs import ROOT, TEXT, call, compile_cache

import symjax

PAGE = (ROOT / "docs" / "pretraining.md").read_text(encoding="utf-8")
SMALL = {
    "model.width": 64,
    "model.depth": 1,
    "model.heads": 2,
    "model.feedforward": 96,
    "model.length": 32,
    "model.vocabulary": 384,
    "batch_size": 8,
    "steps": 3,
    "evaluate.batches": 2,
    "data.vocabulary": 300,
    "data.subset": "",
}


def commands():
    """Return (program, words) of every command line of the page, in order."""
    lines = PAGE.replace("\\\n", "")
    found = re.findall(
        r"^(?:JAX_PLATFORMS=cpu )?python (train|eval)\.py (.*)$", lines, re.M
    )
    return [(program, shlex.split(words)) for program, words in found]


def at_toy_size(words, folder):
    """Return the words of a command, followed by keys of a toy model.

    Meshes have as many devices as there are here. A target machine is left out, because
    its compiler may not be installed.
    """
    if "--target" in words:
        place = words.index("--target")
        words = words[:place] + words[place + 2 :]
    meshes = [
        word.partition("=")[0] for word in words if word.startswith("--config.mesh")
    ]
    changes = SMALL | {"data.name": folder}
    if "--dry_run" in words:  # on the standard library, by bytes
        changes = {x: y for x, y in SMALL.items() if not x.startswith("data.")}
    more = [f"--config.{name}={value}" for name, value in changes.items()]
    return [*words, *more, *(f"{mesh}=2" for mesh in meshes)]


@pytest.fixture
def stand_in(tmp_path):
    folder = tmp_path / "fineweb-edu"
    folder.mkdir()
    texts = [TEXT[i : i + 300] for i in range(0, len(TEXT), 300)]
    datasets.Dataset.from_dict({"text": texts}).to_parquet(folder / "train.parquet")
    return folder


@pytest.mark.slow
def test_the_whole_road_runs_at_toy_size(stand_in, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    said = []
    with compile_cache(tmp_path / "jax"):
        for program, words in commands():
            small = at_toy_size(words, stand_in) if program == "train" else words
            assert call(program, small) == 0, capsys.readouterr().err
            said.append(capsys.readouterr())
        for snippet in re.findall(r"```python\n(.*?)```", PAGE, re.S):
            exec(snippet, {})
    packed, dry, trained = said[:1], said[1:4], said[4:7]
    assert all(
        re.search(r"training tokens in .*, 300 token types", x.out) for x in packed
    )
    assert all("tokens of the run" in x.out for x in dry)
    assert all("new run in" in x.err for x in trained)
    assert json.loads((tmp_path / "found.json").read_text())["heldout"]["bits_per_byte"]
    found = symjax.load_pretrained(tmp_path / "fineweb-350m")
    assert found.tokenizer.vocabulary == 300 and found.config.data.source == "hub"
    settings = json.loads((tmp_path / "fineweb-350m" / "config.json").read_text())
    assert settings["model_type"] == "diffllama"
