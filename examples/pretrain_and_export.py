"""Pretrain on source code and export a folder that transformers loads, offline.

    pip install -e '.[exchange,tokenizers]' && python examples/pretrain_and_export.py

1. learns a vocabulary of 4,096 subwords from Python's own standard library;
2. trains a differential and symmetric decoder on it, with separate documents;
3. exports the decoder as a DiffLlama;
4. loads the export with symjax and, if it is installed, with transformers, and compares
   the logits with those of the trained model.

Arguments are those of train.py: --config.steps=300 is a short run, for instance. The
same command again resumes the run.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np

import symjax
from symjax.distributed.exit_codes import run_and_exit
from symjax.programs import commandline
from symjax.training.loop import run

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "def main("
CONFIG = [
    *("--config", f"{ROOT}/configs/diff_sym.py:tiny"),
    *("--workdir", "runs/pretrain_and_export"),
    "--config.data.tokenizer=bpe",
    "--config.data.vocabulary=4096",
    "--config.data.documents=separate",
    # A DiffLlama has these and RoPE, which `:tiny` has already.
    "--config.model.norm=rmsnorm",
    "--config.model.activation=swiglu",
    "--config.model.bias=false",
]


def main(words: list[str]) -> None:
    """Train, export, load and compare.

    Raises:
        ValueError: an argument is wrong, or logits differ.
    """
    command = commandline.parse([*CONFIG, *words])
    run(command.config, command.workdir)
    trained, folder = symjax.load(command.workdir), command.workdir / "exported"
    kind = symjax.save_pretrained(trained, folder, format="transformers")
    print(f"{kind} in {folder}: {', '.join(sorted(x.name for x in folder.iterdir()))}")
    tokens = trained.encode(PROMPT)
    wanted = np.asarray(trained.logits(tokens))
    compare("symjax", wanted, symjax.load_pretrained(folder).logits(tokens))
    if importlib.util.find_spec("transformers") and importlib.util.find_spec("torch"):
        ids, logits = by_transformers(folder)
        if ids != tokens.tolist():
            raise ValueError(f"transformers makes {ids} of {PROMPT!r}, symjax {tokens}")
        compare("transformers", wanted, logits)
    else:
        print("transformers and torch are not installed: not compared")
    print(PROMPT + trained.generate(PROMPT, 40))


def by_transformers(folder: Path) -> tuple[list[int], np.ndarray]:
    """Return token ids [T] of the prompt, and the logits [T V] of transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        return ids[0].tolist(), model.eval()(ids).logits[0].float().numpy()


def compare(who: str, wanted: np.ndarray, found: np.ndarray) -> None:
    """Print the largest difference of logits, relative to the largest logit.

    Raises:
        ValueError: it is above 1e-5.
    """
    largest = np.abs(wanted).max()
    difference = np.abs(np.asarray(found) - wanted).max() / largest
    print(f"{who}: the same logits within {difference:.1e} of the largest")
    if not difference <= 1e-5:
        raise ValueError(f"the logits of {who} differ by {difference:.1e}")


if __name__ == "__main__":
    run_and_exit(lambda: main(sys.argv[1:]))
