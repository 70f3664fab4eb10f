"""Answer the questions of docs/results.md: train models, compare them, draw figures.

    python -m benchmarks.answers symmetry --text tinyshakespeare.txt --seeds 0,1,2
    python -m benchmarks.answers linear/mqar --together 2 --out runs/answers

A question has one or more parts, and a part is one task with a list of models. Runs are
workdirs of train.py, OUT/TASK/MODEL-seedN. Questions share them, and complete runs are
not trained again, so the same command continues after an interruption. All models of
one seed are trained before those of the next. The comparison of a part is written to
OUT/QUESTION-TASK, as `symjax.programs.compare` writes it; differences are to the first
model.

--text is the text of the tasks `text`, `deep`, `convert` and `recover`. Other words
--config.KEY=VALUE apply to every run, for instance --config.steps=300 for a trial
(models with a transfer need more than its 200 steps). Give a trial another --out, since
other keys are refused in the folder of a run.
"""

import argparse
import itertools
import sys
from pathlib import Path
from typing import NamedTuple

from benchmarks.arguments import existing, numbers, positive
from benchmarks.trainings import ROOT, train_together
from symjax.distributed.exit_codes import run_and_exit
from symjax.programs import compare
from symjax.programs.commandline import parse
from symjax.programs.comparison.runs import check_run

# Model → keys that it changes in a task. Keys without one of these beginnings are keys
# of model.attention. init_from=MODEL starts from the weights of this model, trained on
# the task `text` with the same seed. Tables of docs/results.md have the names of models
# beside a description, and figures have them alone.
BEGINNINGS = "model.", "optimizer.", "transfer.", "init_from="
MODELS = {
    "softmax": "",
    # Keys, queries and values that share projections, and repairs of K = Q.
    "symmetric": "symmetric=plain",
    "pairwise": "symmetric=pairwise",
    "mask_self": "symmetric=plain mask_self=true",
    "key_norm": "symmetric=plain key_norm=unit",
    "position_term": "symmetric=plain position_term=16",
    "symmetric_fox": "symmetric=plain forget=fox",
    "symmetric_gate": "symmetric=plain output_gate=sigmoid",
    "differential_symmetric": "symmetric=plain differential=v1",
    "grouped_symmetric": "symmetric=plain differential=v1 signals=4",
    "kv": "symmetric=kv",
    "qkv": "symmetric=qkv",
    # The difference, and its controls.
    "differential": "differential=v1",
    "differential_v2": "differential=v2",
    "differential_wide": "differential=v1 model.head_size=32",  # branches of 32
    "grouped": "differential=v1 signals=4",
    "no_head_norm": "differential=v1 head_norm=false",
    "lambda_0.5": "differential=v1 lambda_initial=0.5",
    "lambda_0.8": "differential=v1 lambda_initial=0.8",
    "gate": "output_gate=sigmoid",
    "sink": "sink=true",
    "softpick": "mechanism=softpick",
    "fox": "forget=fox",
    # Functions of QQᵀ and the cosine.
    "cosine": "mechanism=cosine",
    "cosine_symmetric": "mechanism=cosine symmetric=plain",
    "exp": "mechanism=matrix_function function=exp",
    "expm1": "mechanism=matrix_function function=expm1",
    "resolvent": "mechanism=matrix_function function=resolvent",
    "exp_rows": "mechanism=matrix_function function=exp normalise=rows",
    "exp_l2": "mechanism=matrix_function function=exp normalise=l2",
    "ones_plus": "mechanism=matrix_function function=ones_plus",
    "mesa": "mechanism=mesa",
    # Linear time.
    "linear": "mechanism=linear",
    # A norm per head instead of the denominator, as in TransNormer.
    "linear_norm": "mechanism=decay decay=none",
    "linear_differential": "mechanism=linear differential=v1",
    "linear_convolution": "mechanism=linear short_convolution=4",
    "performer": "mechanism=performer feature_count=64",
    "decay": "mechanism=decay decay=retention",
    "gated": "mechanism=decay decay=gated",
    "delta": "mechanism=delta",
    "delta_convolution": "mechanism=delta short_convolution=4",
    "linear_1_softmax_1": "model.pattern=linear,softmax",
    "linear_3_softmax_1": "model.pattern=linear,linear,linear,softmax",
    "linear_7_softmax_1": "model.pattern=" + "linear," * 7 + "softmax",
    # Laws of length.
    "log_n": "length_base=512",
    "without_self": "mask_self=true",
    "log_n_without_self": "mask_self=true length_base=512",
    "learned_log_n": "length_base=512 length_scale=learned",
    "distance": "length_scale=distance",
    "entmax": "mechanism=entmax15",
    "adaptive_entmax": "mechanism=entmax15 length_scale=adaptive",
    # Keys smaller than values.
    "keys_4": "key_size=4",
    "keys_8": "key_size=8",
    "keys_16": "key_size=16",
    # Sizes of a model.
    "softmax_64": "model.width=64",
    "softmax_96": "model.width=96",
    "softmax_192": "model.width=192",
    "differential_64": "model.width=64 differential=v1",
    "differential_96": "model.width=96 differential=v1",
    "differential_192": "model.width=192 differential=v1",
    # Rates of the study.
    "rate_constant": "optimizer.learning_rate=3e-4 optimizer.final=1",
    "rate_falls": "optimizer.learning_rate=3e-4 optimizer.final=0.1",
    # Conversion of trained models.
    "more_softmax": "init_from=softmax",
    "to_performer": "init_from=softmax mechanism=performer feature_count=64",
    "to_t2r": "init_from=softmax mechanism=linear features=t2r",
    "to_hedgehog": "init_from=softmax mechanism=linear features=hedgehog",
    "to_hedgehog_by_maps": "init_from=softmax mechanism=linear features=hedgehog "
    "transfer.match=maps transfer.steps=200",
    "to_hedgehog_by_outputs": "init_from=softmax mechanism=linear features=hedgehog "
    "transfer.match=outputs transfer.steps=200",
    "to_softmax": "init_from=performer",
}


class Task(NamedTuple):
    """Data, sizes and steps that all models of a comparison share.

    Attributes:
        config: configuration file of configs/, with a preset.
        keys: changes of it, as KEY=VALUE.
    """

    config: str
    keys: str


TEXT = "data.source=text data.tokenizer=char model.length=128 batch_size=8"
TASKS = {
    "text": Task("gpt.py:tiny", f"{TEXT} model.depth=3 steps=600"),
    "deep": Task("gpt.py:tiny", f"{TEXT} model.depth=8 model.width=64 steps=600"),
    "convert": Task(
        "gpt.py:tiny",
        f"{TEXT} model.depth=3 steps=600 optimizer.learning_rate=1e-3 "
        "evaluate.every=100",
    ),
    # The same for longer.
    "recover": Task(
        "gpt.py:tiny",
        f"{TEXT} model.depth=3 steps=3000 optimizer.learning_rate=1e-3 "
        "evaluate.every=500",
    ),
    "mqar": Task("mqar.py", "steps=1000"),
    "deep_mqar": Task("mqar.py", "model.depth=8 steps=1000"),
    "needle": Task("needle.py", "steps=2000"),
    "sort": Task("sort.py", "steps=1000"),
    "reverse": Task("reverse.py", "steps=1000"),
    "copy": Task("copy.py", "steps=600"),
    "swap": Task("swap.py", "steps=1000"),
    "sets": Task("sets.py", "steps=500"),
    "digits": Task("digits.py", "steps=800"),
}


class Part(NamedTuple):
    """A table: models of one task, and tasks of eval.py that give further columns."""

    models: str
    measures: str = ""


REPAIRS = (
    "softmax symmetric pairwise mask_self key_norm position_term symmetric_fox "
    "symmetric_gate differential_symmetric"
)
MIXTURES = "softmax linear linear_1_softmax_1 linear_3_softmax_1 linear_7_softmax_1"
LAWS = "softmax log_n learned_log_n distance fox entmax adaptive_entmax"
QUESTIONS = {
    "symmetry": {
        "text": Part(f"{REPAIRS} grouped_symmetric kv qkv", "symmetry,self_share"),
        "mqar": Part(f"{REPAIRS} differential", "mqar,order"),
        "sort": Part("softmax symmetric position_term symmetric_fox kv qkv"),
        "reverse": Part("softmax symmetric position_term symmetric_fox kv qkv"),
        "copy": Part("softmax symmetric position_term symmetric_fox kv qkv", "copy"),
        "swap": Part("softmax symmetric position_term symmetric_fox kv qkv", "swap"),
        "needle": Part(REPAIRS),
        "digits": Part(f"{REPAIRS} grouped_symmetric kv qkv"),
    },
    "difference": {
        "text": Part(
            "softmax differential differential_v2 grouped gate sink softpick symmetric "
            "differential_symmetric",
            "spectrum,rank,noise,outliers,entropy,self_share,support,gradients",
        ),
        "needle": Part(
            "softmax differential differential_wide differential_v2 gate",
            "needle,noise",
        ),
    },
    "norm": {
        "text": Part("differential no_head_norm lambda_0.5 lambda_0.8", "lambda"),
    },
    "functions": {
        "text": Part(
            "softmax symmetric cosine_symmetric linear exp expm1 resolvent exp_rows "
            "exp_l2 ones_plus mesa delta",
            "entropy",
        ),
        "mqar": Part("softmax symmetric resolvent mesa delta linear", "mqar"),
    },
    "linear": {
        "text": Part(
            "softmax linear linear_norm linear_differential linear_convolution "
            "performer decay gated delta delta_convolution mesa",
            "dilution,gradients",
        ),
        "mqar": Part(
            "softmax linear linear_norm linear_convolution performer decay gated delta "
            "delta_convolution mesa linear_1_softmax_1",
            "mqar",
        ),
        "deep": Part(MIXTURES),
        "deep_mqar": Part(MIXTURES, "mqar"),
    },
    "estimate": {
        "convert": Part(
            "more_softmax to_performer to_t2r to_hedgehog to_hedgehog_by_maps "
            "to_hedgehog_by_outputs to_softmax performer"
        ),
        "recover": Part("more_softmax to_performer to_hedgehog_by_maps to_softmax"),
    },
    "length": {
        "text": Part(LAWS, "entropy,length"),
        "sets": Part(f"{LAWS} without_self log_n_without_self", "sets"),
        "needle": Part(LAWS),
    },
    "keys": {
        "text": Part("softmax keys_16 keys_8 keys_4"),
        "mqar": Part("softmax keys_16 keys_8 keys_4", "mqar"),
    },
    "size": {
        "text": Part(
            "softmax softmax_64 softmax_96 softmax_192 differential differential_64 "
            "differential_96 differential_192"
        ),
    },
    "rate": {"text": Part("rate_constant rate_falls")},
}


def main(words: list[str]) -> None:
    """Train and compare the runs of a question."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.answers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("question", help=f"{', '.join(QUESTIONS)}, or one part as QUESTION/TASK")
    add("--seeds", type=numbers, default="0", help="with commas (%(default)s)")
    add("--together", type=positive, default=1, help="runs at a time (%(default)s)")
    add("--out", type=Path, default=Path("runs/answers"), help="(%(default)s)")
    add("--text", type=existing, help="the text of tasks that read one")
    add("--models", help="only these models, with commas")
    chosen, rest = parser.parse_known_args(words)
    question, _, only = chosen.question.partition("/")
    if question not in QUESTIONS or (only and only not in QUESTIONS[question]):
        parser.error(f"{chosen.question} is unknown: see --help")
    if wrong := [x for x in rest if not x.startswith("--config.")]:
        parser.error(f"{wrong[0]} is unknown: see --help")
    for task, part in QUESTIONS[question].items():
        if only in ("", task):
            answer(f"{question}-{task}", task, part, chosen, rest)


def answer(
    name: str, task: str, part: Part, chosen: argparse.Namespace, rest: list[str]
) -> None:
    """Train the runs of a part, and write their comparison."""
    models = chosen.models.split(",") if chosen.models else part.models.split()
    if unknown := sorted(set(models) - set(MODELS)):
        raise ValueError(f"model {unknown[0]!r} is unknown: {', '.join(MODELS)}")
    started = [key for model in models for key in MODELS[model].split()]
    started = [x.partition("=")[2] for x in started if x.startswith("init_from=")]
    if chosen.text is None and (started or TEXT in TASKS[task].keys):
        raise ValueError(f"the task `{'text' if started else task}` needs --text FILE")
    seeds = chosen.seeds.split(",")

    def train(task: str, models: list[str]) -> None:
        runs = {
            chosen.out / task / f"{model}-seed{seed}": [
                *words_of(task, model, chosen.text, chosen.out, seed),
                *rest,
            ]
            for seed, model in itertools.product(seeds, models)
        }
        for workdir, words in runs.items():  # complete runs, too
            check_run(parse([*words, "--workdir", str(workdir)]))
        train_together(runs, chosen.together)

    if started:
        train("text", list(dict.fromkeys(started)))
    train(task, models)
    # The rows have the order of the models.
    workdirs = [
        str(chosen.out / task / f"{model}-seed{seed}")
        for model, seed in itertools.product(models, seeds)
    ]
    given = ["--workdirs", ",".join(workdirs), "--out", str(chosen.out / name)]
    if part.measures:
        given += ["--tasks", part.measures]
    compare.main(given)


def words_of(
    task: str, model: str, text: Path | None, out: Path, seed: str
) -> list[str]:
    """Return the words of train.py for a model on a task, but --workdir."""
    keys = TASKS[task].keys.split()
    for key in keys_of(model):
        name, _, value = key.partition("=")
        if name == "init_from":
            key = f"{name}={out}/text/{value}-seed{seed}"
        keys.append(key)
    if TEXT in TASKS[task].keys:
        keys.append(f"data.path={text}")
    file = ROOT / "configs" / TASKS[task].config
    return ["--config", str(file), *(f"--config.{x}" for x in [*keys, f"seed={seed}"])]


def keys_of(model: str) -> list[str]:
    """Return the keys of a model of `MODELS`, as KEY=VALUE with whole names."""
    return [
        key if key.startswith(BEGINNINGS) else f"model.attention.{key}"
        for key in MODELS[model].split()
    ]


if __name__ == "__main__":
    run_and_exit(lambda: main(sys.argv[1:]))
