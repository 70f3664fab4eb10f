"""Everything that can be asked of a checkpoint, by name."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from symjax import config
from symjax.evaluation import answers
from symjax.evaluation.analysis import lambdas
from symjax.evaluation.approximation import approximation
from symjax.evaluation.asked import Asked
from symjax.evaluation.attended import dilution, noise, self_share
from symjax.evaluation.dimension import dimension
from symjax.evaluation.finding import Finding
from symjax.evaluation.gradients import gradients
from symjax.evaluation.language import loss
from symjax.evaluation.lengths import length, position
from symjax.evaluation.maps import maps
from symjax.evaluation.order import order
from symjax.evaluation.outliers import outliers
from symjax.evaluation.ranks import rank
from symjax.evaluation.samples import sample
from symjax.evaluation.speed import speed
from symjax.evaluation.spread import entropy, support
from symjax.evaluation.trained import Trained


class Task(NamedTuple):
    measure: Callable[[Trained, Asked], Finding]
    meaning: str
    encoders: bool = True  # have an answer too: it needs no next token


TASKS = {
    "loss": Task(
        loss,
        "held-out loss, and that of training text with and without dropout",
    ),
    "lambda": Task(lambdas, "λ of every differential layer, now and by step"),
    "mqar": Task(
        answers.mqar, "recall by number of pairs (data.source=mqar)", encoders=False
    ),
    "needle": Task(
        answers.needle,
        "retrieval by depth, length and number of needles",
        encoders=False,
    ),
    "copy": Task(answers.copy, "copying by place (data.source=copy)", encoders=False),
    "listops": Task(
        answers.listops, "nested lists by depth (data.source=listops)", encoders=False
    ),
    "order": Task(
        order, "accuracy over the orders of in-context examples", encoders=False
    ),
    "sample": Task(sample, "what the model writes after a prompt", encoders=False),
    "length": Task(length, "loss at 1, 2, 4, 8 times the length, log-n off and on"),
    "position": Task(position, "held-out loss by place in the window"),
    "noise": Task(noise, "attention on the answer, on the context, and elsewhere"),
    "self_share": Task(self_share, "attention of a token on itself"),
    "dilution": Task(dilution, "attention on the last 1, 4, 16, 64 tokens"),
    "entropy": Task(entropy, "entropy of rows by the number of keys they see"),
    "support": Task(support, "keys with a weight, where maps are sparse"),
    "rank": Task(rank, "ranks of QKᵀ, of maps and of differential maps"),
    "outliers": Task(outliers, "the largest logits and hidden states"),
    "maps": Task(maps, "pictures of the maps of a sentence"),
    "approximation": Task(approximation, "errors of features against exact softmax"),
    "gradients": Task(gradients, "how strongly a weight answers to its score"),
    "speed": Task(speed, "reading, training and writing against softmax, by length"),
    "dimension": Task(dimension, "the 8 ln n rule for the size of heads"),
}
USUAL = "sample,loss,lambda"


def named(text: str) -> tuple[str, ...]:
    """The tasks of a list with commas; "all" among them is all there are.

    Raises:
        ValueError: one is unknown.
    """
    names = tuple(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
    for name in names or [text]:
        if name not in TASKS and name != "all":
            raise ValueError(
                f"--tasks {name!r} is unknown: choose from all, {', '.join(TASKS)}"
            )
    return tuple(TASKS) if "all" in names else names


def measure(name: str, trained: Trained, asked: Asked) -> Finding:
    """What a task finds; nothing of an encoder where the next token is asked."""
    task = TASKS[name]
    if not config.is_causal(trained.options.model) and not task.encoders:
        return Finding({}, [f"{name}: none, an encoder does not say what comes next"])
    return task.measure(trained, asked)


def about(trained: Trained) -> dict[str, Any]:
    """What is judged."""
    weights = sum(x.size for x in jax.tree.leaves(trained.params))
    return {"step": trained.step, "parameters": weights}
