"""One checkpoint, judged: everything measured as one nested dict, and as text."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from symjax.evaluation.analysis import lambda_table
from symjax.evaluation.language import losses
from symjax.evaluation.trained import Trained
from symjax.models.generate import generate

PROMPT = 16  # tokens of held-out text where no prompt is given


def judge(trained: Trained, batches: int | None = None) -> dict[str, Any]:
    """The numbers of a checkpoint; the same for the same checkpoint, every time."""
    return {
        "step": trained.step,
        "parameters": sum(x.size for x in jax.tree.leaves(trained.params)),
        **losses(trained, batches),
        "lambda": lambda_table(trained.model()),
    }


def sample(
    trained: Trained,
    prompt: str | None = None,
    *,
    count: int = 200,
    temperature: float = 0.8,
    seed: int = 0,
) -> tuple[str, str]:
    """(prompt, what the model writes after it); at most as far as it has positions.

    Args:
        prompt: the first words of the held-out text by default.
        count: tokens to write.
    Raises:
        ValueError: the prompt is empty, too long, or has unknown characters.
    """
    tokenizer = trained.corpus.tokenizer
    if prompt is None:
        ids = trained.corpus.heldout[:PROMPT]
    else:
        ids = tokenizer.encode(prompt)
    if not len(ids):
        raise ValueError("--prompt is empty: give text to go on from")
    model = trained.model()
    if model.learned_positions:
        count = min(count, model.length - len(ids))
        if count < 1:
            raise ValueError(
                f"a prompt of {len(ids)} tokens fills the model's {model.length} "
                "learned positions"
            )
    tokens = generate(
        model,
        jnp.asarray(ids, jnp.int32)[None],
        count,
        jax.random.key(seed),
        temperature=temperature,
    )
    return tokenizer.decode(ids), tokenizer.decode(tokens[0])


def to_text(found: dict[str, Any], unit: str) -> str:
    """The numbers of `judge` as a page for people."""
    heldout, train = found["heldout"], found["train"]
    lines = [
        f"step {found['step']}, {found['parameters']:,} parameters",
        "",
        f"held-out loss                    {heldout['loss']:.4f} nats/{unit}",
        f"held-out perplexity              {heldout['perplexity']:.3f}",
        f"held-out bits per byte           {heldout['bits_per_byte']:.4f}",
    ]
    part = heldout["batches"] < heldout["all_batches"]
    if part:
        lines.append(
            f"  on {heldout['batches']} of {heldout['all_batches']} batches; "
            "the tables on all of the text"
        )
    for name, value in heldout["ngrams"].items():
        beaten = ": beaten" if heldout["loss"] < value else ": not beaten"
        verdict = "" if part else beaten
        lines.append(f"  {name + ' table':<31}{value:.4f} nats/{unit}{verdict}")
    lines += [
        f"training text, training mode     {train['loss']:.4f} nats/{unit}",
        f"training text, evaluation mode   {train['loss_eval_mode']:.4f} nats/{unit}",
        "",
    ]
    if not found["lambda"]:
        return "\n".join([*lines, "λ: none, the attention is not differential"])
    lines.append("layer      λ₁      λ₂  λ_init       λ")
    for row in found["lambda"]:
        numbers = (row[k] for k in ("lambda_1", "lambda_2", "lambda_initial", "lambda"))
        lines.append(f"{row['layer']:5d}" + "".join(f"{x:8.4f}" for x in numbers))
    return "\n".join(lines)


def check_json(path: Path) -> None:
    """Raises: ValueError: there cannot be such a file; asked before the long work."""
    if path.is_dir():
        raise ValueError(f"--json {path} is a folder: name a file")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--json {path} cannot be written: no folder {path.parent}")


def write_json(found: dict[str, Any], path: Path) -> None:
    """Write a whole file or none.

    Raises:
        ValueError: the file cannot be written.
    """
    folder = path.absolute().parent
    try:
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            whole = Path(unfinished, path.name)
            whole.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            os.replace(whole, path)
    except OSError as error:
        raise ValueError(f"--json {path} cannot be written: {error.strerror}") from None
