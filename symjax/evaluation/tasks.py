"""The evaluation tasks, by name."""

from collections.abc import Callable
from typing import Any, NamedTuple

from symjax import config
from symjax.checkpoints.checksum import checksum_of
from symjax.data.given import is_given
from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.measures import answers
from symjax.evaluation.measures.approximation import approximation
from symjax.evaluation.measures.attended import dilution, noise, self_share
from symjax.evaluation.measures.language import loss, sample
from symjax.evaluation.measures.lengths import length, position
from symjax.evaluation.measures.magnitudes import gradients, outliers
from symjax.evaluation.measures.maps import maps
from symjax.evaluation.measures.order import order
from symjax.evaluation.measures.ranks import rank
from symjax.evaluation.measures.speed import speed
from symjax.evaluation.measures.spread import entropy, support
from symjax.evaluation.measures.weights import dimension, lambdas
from symjax.evaluation.results import Options, Result, none


class Task(NamedTuple):
    """
    Attributes:
        sources: values of data.source that it is about; (): any.
        encoders: it is defined for them too.
    """

    measure: Callable[[LoadedRun, Options], Result]
    meaning: str
    sources: tuple[str, ...] = ()
    encoders: bool = True


TASKS = {
    "loss": Task(
        loss,
        "held-out loss, and that of training text with and without dropout",
    ),
    "lambda": Task(lambdas, "λ of every differential layer, now and by step"),
    "mqar": Task(
        answers.mqar,
        "recall by number of pairs (data.source=mqar)",
        ("mqar",),
        encoders=False,
    ),
    "needle": Task(
        answers.needle,
        "retrieval by depth, length and number of needles",
        ("needle",),
        encoders=False,
    ),
    "copy": Task(
        answers.copy, "copying by place (data.source=copy)", ("copy",), encoders=False
    ),
    "listops": Task(
        answers.listops,
        "nested lists by depth (data.source=listops)",
        ("listops",),
        encoders=False,
    ),
    "order": Task(
        order,
        "accuracy over the orders of in-context examples",
        ("mqar", "needle"),
        encoders=False,
    ),
    "sample": Task(sample, "a prompt continued by the model", encoders=False),
    "length": Task(length, "loss at 1, 2, 4, 8 times the length, log-n off and on"),
    "position": Task(position, "held-out loss by place in the window"),
    "noise": Task(noise, "attention on the answer, on the context, and elsewhere"),
    "self_share": Task(self_share, "attention of a token on itself"),
    "dilution": Task(dilution, "attention on the last 1, 4, 16, 64 tokens"),
    "entropy": Task(entropy, "entropy of rows by the number of keys they see"),
    "support": Task(support, "keys with a weight, where maps are sparse"),
    "rank": Task(rank, "ranks of QKᵀ, of maps and of differential maps"),
    "outliers": Task(outliers, "the largest attention scores and hidden states"),
    "maps": Task(maps, "pictures of the maps of a sentence"),
    "approximation": Task(approximation, "errors of features against exact softmax"),
    "gradients": Task(gradients, "the size of ∂weight/∂score"),
    "speed": Task(speed, "prefill, training and decoding against softmax, by length"),
    "dimension": Task(dimension, "the 8 ln n rule for the size of heads"),
}
USUAL = "sample,loss,lambda"


def named(text: str) -> tuple[str, ...]:
    """The tasks of a list with commas; "all" among them means all tasks.

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


def measure(name: str, run: LoadedRun, options: Options) -> Result:
    """The result of a task, which says so where the task does not apply to the run."""
    task = TASKS[name]
    if not config.is_causal(run.config.model) and not task.encoders:
        return Result({}, [f"{name}: none, an encoder predicts no next token"])
    if task.sources and run.config.data.source not in task.sources:
        sources = " or ".join(task.sources)
        return none(name, f"the model was not trained on data.source={sources}")
    return task.measure(run, options)


def about(run: LoadedRun) -> dict[str, Any]:
    """The checkpoint that is evaluated, whether by the mean of its weights, and the
    hash of a text that stands in place of the held-out one."""
    found = {"step": run.step, "parameters": run.parameters()}
    found |= {"weights": checksum_of(run.params)}
    if is_given(run.examples):
        found |= {"text": run.examples.fingerprint["sha256"]}
    return found | ({"ema": True} if run.ema else {})
