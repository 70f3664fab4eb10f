"""How well a language model predicts text: three numbers, never mixed up.

The loss on held-out text; on training text in evaluation mode, the same way; and on
training text in training mode, with dropout. The last two say how much was memorised.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from symjax.data.batches import Rows, batch, heldout_batches, heldout_count
from symjax.evaluation.asked import Asked
from symjax.evaluation.finding import Finding
from symjax.evaluation.trained import Trained
from symjax.training.measure import mean_loss


def loss(trained: Trained, asked: Asked) -> Finding:
    """The three losses, beside what tables of n-grams reach."""
    found = losses(trained, asked.batches)
    heldout, train = found["heldout"], found["train"]
    unit = "byte" if trained.options.data.tokenizer == "byte" else "character"
    weights = sum(x.size for x in jax.tree.leaves(trained.params))
    lines = [
        f"step {trained.step}, {weights:,} parameters",
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
    ]
    return Finding(found, lines)


def losses(trained: Trained, batches: int | None = None) -> dict[str, Any]:
    """Held-out and training losses, in nats a token.

    Args:
        batches: of held-out text; None is all of it. As many batches of training text
            are taken, the first that training saw.
    """
    rows, length = trained.options.batch_size, trained.options.model.length
    tokens = trained.corpus.heldout
    total = heldout_count(tokens, length, rows)
    count = min(batches or total, total)
    weights = (trained.program, trained.params, trained.constants, (rows, length))
    chosen = heldout_batches(tokens, length=length, batch_size=rows, count=count)
    heldout = mean_loss(*weights, chosen)
    nats_per_byte = heldout / trained.corpus.bytes_per_token
    return {
        "heldout": {
            "loss": heldout,
            "perplexity": math.exp(heldout) if heldout < 700 else math.inf,
            "bits_per_byte": nats_per_byte / math.log(2),
            "batches": count,
            "all_batches": total,
            "ngrams": dict(trained.corpus.ngrams),
        },
        "train": {
            "loss": mean_loss(*weights, _training(trained, count), jax.random.key(0)),
            "loss_eval_mode": mean_loss(*weights, _training(trained, count)),
        },
    }


def _training(trained: Trained, count: int) -> Iterator[Rows]:
    """The first batches of training text, every token with weight 1."""

    def rows(step: int, start: int, stop: int):
        inputs, targets = batch(
            trained.corpus.train,
            length=trained.options.model.length,
            batch_size=trained.options.batch_size,
            seed=trained.options.seed,
            step=step,
            start=start,
            stop=stop,
        )
        return inputs, targets, np.ones(inputs.shape, np.float32)

    return (functools.partial(rows, step) for step in range(count))
