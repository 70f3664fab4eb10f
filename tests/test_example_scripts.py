"""The scripts of examples/ run to their end at toy size."""

import importlib.util
import json

import numpy as np
import pytest
from runs import ROOT, SMALL, write_text

import symjax
from symjax.distributed.exit_codes import run_and_exit


def run_example(name, words):
    """Run a script of examples/ in this process, and return the exit code."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(SystemExit) as end:
        run_and_exit(lambda: module.main(words))
    return end.value.code


@pytest.mark.slow
def test_what_is_trained_is_exported_and_loaded_with_the_same_logits(tmp_path, capsys):
    changes = SMALL | {"data.path": write_text(tmp_path), "data.vocabulary": 300}
    words = [f"--config.{name}={value}" for name, value in changes.items()]
    assert run_example("pretrain_and_export", [*words, "--workdir", f"{tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert "diffllama in" in said and "symjax: the same logits within" in said
    if importlib.util.find_spec("transformers"):
        assert "\ntransformers: the same logits within" in said
    folder = tmp_path / "exported"
    trained, found = symjax.load(tmp_path), symjax.load_pretrained(folder)
    assert trained.config.data.documents == "separate"
    assert found.tokenizer == trained.tokenizer and found.tokenizer.vocabulary == 300
    settings = json.loads((folder / "config.json").read_text())
    assert settings["eos_token_id"] == found.tokenizer.document_end == 0
    (folder / "symjax.json").unlink()  # as transformers would write it
    alone = symjax.load_pretrained(folder)
    assert alone.tokenizer == trained.tokenizer
    wanted = np.asarray(trained.logits("3 sheep"))
    np.testing.assert_allclose(alone.logits("3 sheep"), wanted, rtol=1e-5, atol=1e-5)
