"""How well a model predicts what it is asked for: three numbers, never mixed up.

The loss on held-out text; on training text in evaluation mode, the same way; and on
training text in training mode, with dropout. The last two say how much was memorised.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from symjax.data.batches import Rows, Shape
from symjax.evaluation.asked import Asked
from symjax.evaluation.finding import Finding, Table
from symjax.evaluation.trained import Trained
from symjax.training.measure import Means, means


def loss(trained: Trained, asked: Asked) -> Finding:
    """The three losses, beside what needs no model: tables of n-grams, or chance."""
    found = losses(trained, asked.batches)
    heldout, train = found["heldout"], found["train"]
    unit = trained.corpus.unit
    weights = sum(x.size for x in jax.tree.leaves(trained.params))
    lines = [
        f"step {trained.step}, {weights:,} parameters",
        "",
        f"held-out loss                    {heldout['loss']:.4f} nats/{unit}",
        f"held-out perplexity              {heldout['perplexity']:.3f}",
    ]
    if "accuracy" in heldout:
        lines.append(f"held-out accuracy                {heldout['accuracy']:.4f}")
    if "bits_per_byte" in heldout:
        bits = heldout["bits_per_byte"]
        lines.append(f"held-out bits per byte           {bits:.4f}")
    part = heldout["batches"] < heldout["all_batches"]
    if part:
        lines.append(
            f"  on {heldout['batches']} of {heldout['all_batches']} batches; "
            "the lines below on all"
        )
    for name, value in trained.corpus.references.items():
        beaten = ": beaten" if heldout["loss"] < value else ": not beaten"
        verdict = "" if part else beaten
        label = name if name == "chance" else f"{name} table"
        lines.append(f"  {label:<31}{value:.4f} nats/{unit}{verdict}")
    lines += [
        f"training text, training mode     {train['loss']:.4f} nats/{unit}",
        f"training text, evaluation mode   {train['loss_eval_mode']:.4f} nats/{unit}",
    ]
    return Finding(found, lines, (_table(heldout, train),))


def _table(heldout: dict[str, Any], train: dict[str, float]) -> Table:
    """The numbers of the text once more, for CSV."""
    parts = ("loss", "perplexity", "bits_per_byte", "accuracy")
    known = [name for name in parts if name in heldout]
    rest = (None,) * (len(known) - 1)
    rows = [
        ("held-out", *(heldout[name] for name in known)),
        ("training text, training mode", train["loss"], *rest),
        ("training text, evaluation mode", train["loss_eval_mode"], *rest),
    ]
    return Table("loss", ("of", *known), rows, printed=False)


def losses(trained: Trained, batches: int | None = None) -> dict[str, Any]:
    """Held-out and training losses, in nats a token, an answer or a label; and how
    many of the answers, labels or hidden tokens that are held out are right.

    Args:
        batches: of held-out text; None is all of it. As many batches of training text
            are taken, the first that training saw.
    """
    corpus = trained.corpus
    shape = trained.options.batch_size, trained.options.model.length
    total = corpus.heldout_count(shape)
    count = min(batches or total, total)
    weights = (trained.program, trained.params, trained.constants, shape)

    def over(name: str, rows: Iterator[Rows], key: jax.Array | None = None) -> Means:
        bar = tqdm(rows, name, count, leave=False, disable=None)
        return means(*weights, bar, key)

    value, accuracy = over("held-out", corpus.heldout_batches(shape, count))
    heldout: dict[str, Any] = {
        "loss": value,
        "perplexity": math.exp(value) if value < 700 else math.inf,
        "batches": count,
        "all_batches": total,
    }
    if corpus.text is not None:
        heldout["bits_per_byte"] = value / corpus.text.bytes_per_token / math.log(2)
        heldout["ngrams"] = dict(corpus.references)
    else:
        heldout["references"] = dict(corpus.references)
        heldout["accuracy"] = accuracy
    key = jax.random.key(0)
    return {
        "heldout": heldout,
        "train": {
            "loss": over("training mode", _training(trained, shape, count), key).loss,
            "loss_eval_mode": over(
                "evaluation mode", _training(trained, shape, count)
            ).loss,
        },
    }


def _training(trained: Trained, shape: Shape, count: int) -> Iterator[Rows]:
    """The first training batches, every target with weight 1."""

    def rows(step: int, start: int, stop: int):
        batch = trained.corpus.batch(shape, seed=trained.options.seed, step=step)
        inputs, targets, *_ = batch(start, stop)
        return inputs, targets, (targets >= 0).astype(np.float32)

    return (functools.partial(rows, step) for step in range(count))
