"""`TASKS`: the evaluation tasks by name, with the runs that each applies to.

The package docstring of symjax/evaluation says how to add a task.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from symjax import config
from symjax.checkpoints.checksum import checksum_of
from symjax.data.given import is_given
from symjax.data.rearranged import ARRANGEMENTS
from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.measures import answers
from symjax.evaluation.measures.approximation import approximation
from symjax.evaluation.measures.attended import dilution, noise, self_share
from symjax.evaluation.measures.language import loss, sample
from symjax.evaluation.measures.lengths import length, position
from symjax.evaluation.measures.magnitudes import gradients, outliers
from symjax.evaluation.measures.majority import sets
from symjax.evaluation.measures.maps import maps
from symjax.evaluation.measures.order import order
from symjax.evaluation.measures.ranks import rank
from symjax.evaluation.measures.spectrum import spectrum
from symjax.evaluation.measures.speed import speed
from symjax.evaluation.measures.spread import entropy, support
from symjax.evaluation.measures.symmetry import symmetry
from symjax.evaluation.measures.weights import dimension, lambdas
from symjax.evaluation.results import Options, Result, not_applicable


class Task(NamedTuple):
    """An evaluation task.

    Attributes:
        measure: computes the result.
        meaning: one line for `eval.py --list`.
        sources: values of data.source for which the task is defined; () means any.
        encoders: whether the task is defined for encoders, too.
        windows: whether the task reads the held-out windows whose length --window sets.
    """

    measure: Callable[[LoadedRun, Options], Result]
    meaning: str
    sources: tuple[str, ...] = ()
    encoders: bool = True
    windows: bool = False


TASKS = {
    "loss": Task(
        loss,
        "loss on held-out text, and on training text with and without dropout",
    ),
    "lambda": Task(lambdas, "λ of every differential layer, now and by step"),
    "mqar": Task(
        answers.mqar,
        "recall by the number of pairs (data.source=mqar)",
        ("mqar",),
        encoders=False,
    ),
    "needle": Task(
        answers.needle,
        "retrieval by depth, length and number of needles (data.source=needle)",
        ("needle",),
        encoders=False,
    ),
    **{
        name: Task(
            answers.rearranged,
            f"accuracy by position in the answer (data.source={name})",
            (name,),
            encoders=False,
        )
        for name in ARRANGEMENTS
    },
    "sets": Task(
        sets,
        "accuracy of a majority by the number of samples (data.source=sets)",
        ("sets",),
        encoders=False,
    ),
    "listops": Task(
        answers.listops,
        "accuracy by the depth of nested lists (data.source=listops)",
        ("listops",),
        encoders=False,
    ),
    "order": Task(
        order,
        "accuracy by the order of the in-context examples",
        ("mqar", "needle"),
        encoders=False,
    ),
    "sample": Task(sample, "the model's continuation of a prompt", encoders=False),
    "length": Task(
        length, "loss at 1, 2, 4, 8 times the training length, log-n scaling off and on"
    ),
    "position": Task(position, "held-out loss by position in the window"),
    "noise": Task(
        noise,
        "shares of attention on the answer, on the context and elsewhere",
        windows=True,
    ),
    "self_share": Task(
        self_share, "share of attention of a token on itself", windows=True
    ),
    "dilution": Task(
        dilution, "share of attention on the last 1, 4, 16, 64 tokens", windows=True
    ),
    "entropy": Task(
        entropy,
        "entropy of attention rows by position, in encoders by the number of tokens",
        windows=True,
    ),
    "support": Task(
        support,
        "keys with a nonzero weight in sparse layers, sparsity of all maps",
        windows=True,
    ),
    "rank": Task(
        rank, "ranks of QKᵀ, of attention maps and of differential maps", windows=True
    ),
    "spectrum": Task(
        spectrum,
        "singular values, similarity of tokens by depth, and Markov chains",
        windows=True,
    ),
    "outliers": Task(
        outliers, "largest attention scores and hidden states", windows=True
    ),
    "maps": Task(maps, "pictures of the attention maps of one sentence"),
    "approximation": Task(
        approximation,
        "errors of feature maps against exact softmax attention",
        windows=True,
    ),
    "gradients": Task(
        gradients,
        "size of ∂weight/∂score, cosine of the gradients through two branches",
        windows=True,
    ),
    "speed": Task(
        speed, "speed of prefill, training and decoding against softmax, by length"
    ),
    "symmetry": Task(symmetry, "symmetry and direction of W_q W_kᵀ, by layer"),
    "dimension": Task(dimension, "head sizes against the rule 8 ln n"),
}
DEFAULT_TASKS = "sample,loss,lambda"


def parse_names(text: str) -> tuple[str, ...]:
    """Return the task names of a comma-separated list; "all" stands for every task.

    Raises:
        ValueError: a name is unknown, or there is none.
    """
    names = tuple(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
    for name in names or [text]:
        if name not in TASKS and name != "all":
            raise ValueError(
                f"--tasks {name!r} is unknown: choose from all, {', '.join(TASKS)}"
            )
    return tuple(TASKS) if "all" in names else names


def measure(name: str, run: LoadedRun, options: Options) -> Result:
    """Run a task; if it does not apply to the run, return a result that says so."""
    task = TASKS[name]
    if not config.is_causal(run.config.model) and not task.encoders:
        return Result({}, [f"{name}: none, an encoder predicts no next token"])
    if task.sources and run.config.data.source not in task.sources:
        sources = " or ".join(task.sources)
        reason = f"the model was not trained on data.source={sources}"
        return not_applicable(name, reason)
    return task.measure(run, options)


def describe_checkpoint(run: LoadedRun) -> dict[str, Any]:
    """Return what identifies the evaluated weights and text, for the JSON.

    `text` is the hash of the text of --text, if there is one. `ema` is True if the
    weights are the averages of --ema, and left out otherwise.
    """
    description = {"step": run.step, "parameters": run.parameters()}
    description |= {"weights": checksum_of(run.params)}
    if is_given(run.examples):
        description |= {"text": run.examples.fingerprint["sha256"]}
    return description | ({"ema": True} if run.ema else {})
