"""Code and commands in the README and on the pages run, and give what is shown."""

import ast
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from runs import train, write_text

import eval as evaluate
from symjax import config, validation
from symjax.attention import TABLES
from symjax.layers import Attention
from symjax.models import build
from symjax.programs import compare
from symjax.programs.commandline import parse
from symjax.programs.configuration_file import load_config

ROOT = Path(__file__).resolve().parents[1]
MECHANISM = ROOT / "docs/mechanism.md"  # its commands use files that a reader adds
PAGES = {*(ROOT / "docs").rglob("*.md")}
DOCUMENTS = [ROOT / "README.md", *sorted(PAGES - {MECHANISM})]
COMMAND = r"python (train\.py|eval\.py|-m symjax\.programs\.compare) ([^`#&;\n]*)"
ADDED = {"mechanism": ("sigmoid", "fading", "softcap"), "features": ("softplus",)}
ADDED |= {"decay": ("half_lives", "sigmoid")}
STANDS_FOR = {"M": "softmax", "$i": "0", "$I": "0"}


def documented():
    """Return (program, arguments) of every command line in the documents."""
    found = {}
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8").replace("\\\n", "")
        for program, arguments in re.findall(COMMAND, text):
            found[f"{program} {arguments}"] = program, arguments
    return [pair for pair in found.values() if "…" not in pair[1]]


def snippets(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.S)


@pytest.mark.always
def test_the_snippets_of_the_readme_run(tmp_path, monkeypatch):
    """Snippets of functions run as they are; those that load a run get a small run.

    The same for the first pages, which load the same run.
    """
    functions, loaded = snippets(ROOT / "README.md")
    (home,) = snippets(ROOT / "docs/index.md")
    used, flax = snippets(ROOT / "docs/getting-started.md")
    (numbers,) = snippets(ROOT / "docs/training.md")
    monkeypatch.chdir(tmp_path)
    assert train(write_text(tmp_path), tmp_path / "runs" / "diff_sym-tiny") == 0
    names: dict = {}
    exec(functions, names)
    assert names["out"].shape == (1, 4096, 8, 64)
    exec(loaded, names)
    assert names["model"].loss("def main(): pass").bits_per_byte > 0
    for snippet in (home, used, flax, numbers):
        exec(snippet, names)
    assert names["out"].shape == (1, 1, 8, 64)
    assert names["mixed"].shape == (2, 16, 32)
    assert "train/loss" in names["numbers"].columns


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180


@pytest.fixture
def page(monkeypatch):
    """Return the names that the code of the page on mechanisms defines."""
    for kind, names in ADDED.items():  # removed after the test
        for name in names:
            monkeypatch.setitem(TABLES[kind][0], name, None)
    names: dict = {}
    exec(
        "".join(re.findall(r"```python\n(.*?)```", MECHANISM.read_text(), re.S)), names
    )
    return names


def test_the_score_mechanism_of_the_page_is_one(page):
    assert page["mixed"].shape == (2, 16, 32)
    query, key, value = np.random.default_rng(0).normal(size=(3, 2, 7, 3, 5))
    scores = np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(5)
    seen = np.arange(1, 8)[:, None]
    weights = np.tril(1 / (1 + np.exp(np.log(seen) - scores)))
    wanted = np.einsum("bnts,bsnv->btnv", weights, value)
    arrays = (np.asarray(x, np.float32) for x in (query, key, value))
    found = page["sigmoid"](*arrays, is_causal=True)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)


def test_the_recurrence_of_the_page_is_one(page):
    """With hidden tokens and segments, and in a layer that decodes."""
    query, key, value = np.random.default_rng(0).normal(size=(3, 2, 9, 3, 5))
    mask = np.ones((2, 1, 1, 9), bool)
    mask[0, ..., [2, 5]] = False
    segments = np.array([[0] * 9, [0] * 3 + [1] * 6])
    age = np.cumsum(mask, axis=3)
    between = age.swapaxes(2, 3) - age
    scores = np.einsum("btnh,bsnh->bnts", *(np.maximum(x, 0) for x in (query, key)))
    seen = np.tril(mask & (segments[:, None, :, None] == segments[:, None, None]))
    weights = seen * scores * 0.5 ** (between / 64)
    total = weights.sum(axis=-1, keepdims=True)
    wanted = np.einsum("bnts,bsnv->btnv", weights / np.where(total, total, 1), value)
    arrays = [np.asarray(x, np.float32) for x in (query, key, value)]
    options = {"segment_ids": segments, "chunk_size": 4}
    found = page["fading_causal"](*arrays, mask, **options)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)
    model = config.Model(
        width=12, heads=3, attention=config.Attention(mechanism="fading", chunk_size=4)
    )
    layer = Attention(model, 0, rngs=nnx.Rngs(0))
    x = np.asarray(query.reshape(2, 9, 15)[..., :12], np.float32)
    output, cache = [], layer.init_cache(2, 9)
    for part in (slice(0, 8), slice(8, 9)):
        position = np.full(2, part.start)
        new, cache = layer.decode(x[:, part], cache, position)
        output.append(new)
    np.testing.assert_allclose(np.concatenate(output, axis=1), layer(x), atol=2e-6)


def test_options_feature_maps_and_decays_of_the_page_are_taken(page):
    x = np.random.default_rng(0).normal(size=(1, 6, 12)).astype(np.float32)
    for chosen in (
        {"mechanism": "softcap", "options": {"cap": 2.0}},
        {"mechanism": "linear", "features": "softplus"},
        {"mechanism": "decay", "decay": "half_lives"},
        {"mechanism": "delta", "decay": "sigmoid"},
    ):
        model = config.Model(width=12, heads=3, attention=config.Attention(**chosen))
        assert Attention(model, 0, rngs=nnx.Rngs(0))(x).shape == (1, 6, 12)


@pytest.mark.parametrize(
    "path",
    [path for path in sorted((ROOT / "configs").glob("*.py")) if path.stem != "base"],
    ids=lambda path: path.stem,
)
def test_every_configuration_names_its_command_and_builds_its_models(path):
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert f"python train.py --config configs/{path.name}\n" in text + "\n"
    for size, depth in (("tiny", 2), ("6l", 6)):
        tree = load_config(path, size).to_dict()
        tree["model"]["vocabulary"] = 65
        if tree["model"]["patch"]:
            tree["model"]["image"] = (8, 8, 1)
        options = validation.from_dict(tree).model
        built = nnx.eval_shape(lambda m=options: build(m, rngs=nnx.Rngs(0)))
        assert len(built.blocks) in (depth, 2 * depth, 1)  # gated, universal


class Parsed(Exception):
    """Raised when words are parsed and nothing has run yet."""


def stop(*_):
    raise Parsed


def test_there_are_commands_in_the_documents():
    compare = "-m symjax.programs.compare"
    assert {program for program, _ in documented()} == {"train.py", "eval.py", compare}
    assert len(documented()) > 30


@pytest.mark.parametrize(("program", "arguments"), documented())
def test_every_documented_command_line_parses(
    program, arguments, monkeypatch, tmp_path
):
    monkeypatch.chdir(ROOT)
    if arguments.count('"') == 1:  # part of the words of another command
        arguments = arguments.replace('"', "")
    words = shlex.split(arguments)
    words = [re.sub(r"(?<==)M$|^\$[iI]$", lambda m: STANDS_FOR[m[0]], x) for x in words]
    if program == "train.py":
        assert parse(words)
    elif program == "eval.py":
        if "--list" not in words:
            assert evaluate.parse(words).names
    else:
        monkeypatch.setattr(compare.figures, "check_figures", stop)
        with pytest.raises(Parsed):
            compare.main([*words, "--out", str(tmp_path)])
