"""Tasks of EleutherAI's evaluation harness (lm_eval) on a symjax model.

python -m symjax.programs.harness --workdir runs/gpt --tasks lambada_openai,piqa
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from symjax.starting import announce

if __name__ == "__main__":
    announce("harness", "jax and lm_eval")

from symjax.distributed.exit_codes import run_and_exit
from symjax.evaluation import report
from symjax.evaluation.results import Result, announce_if_slow
from symjax.exchange import Loaded, load, load_pretrained
from symjax.models.huggingface.folders import is_folder
from symjax.optional import needed
from symjax.programs.commandline import Parser, add_imports
from symjax.storage import resolve, resolve_url
from symjax.training.compile import use_compile_cache

NOTE = (
    "Tasks of lm_eval load their data from the Hugging Face hub; tasks of --include "
    "load what their files say."
)


def main(words: list[str]) -> None:
    """Load a model, run the tasks, print their table and write the JSON."""
    chosen = parse(words)
    needed("lm_eval", "the harness needs lm_eval: pip install lm_eval")
    if chosen.json is not None:
        report.check_file(chosen.json, "--json")
    use_compile_cache()
    which = {"step": chosen.step, "best": chosen.best, "ema": chosen.ema}
    if not is_folder(chosen.workdir):
        model = load(chosen.workdir, **which, imports=chosen.imports)
    elif flags := [f"--{name}" for name, x in which.items() if x not in (None, False)]:
        raise ValueError(
            f"{flags[0]} is for runs: {chosen.workdir} is a folder of save_pretrained"
        )
    else:
        model = load_pretrained(chosen.workdir, imports=chosen.imports)
    scores = evaluate(model, chosen)
    from lm_eval.utils import make_table

    print(make_table(scores))
    if chosen.json is not None:
        about = {"step": model.step} | ({"ema": True} if model.ema else {})
        results = {"harness": Result({"harness": scores["results"]}, [])}
        text = report.to_json(about, results)
        report.write(text.encode(), chosen.json, "--json")


def parse(words: list[str]) -> argparse.Namespace:
    """Return the flags, checked. Raises: ValueError: in one line, naming the flag."""
    parser = Parser(
        prog="python -m symjax.programs.harness", description=__doc__, epilog=NOTE
    )
    add = parser.add_argument
    add("--workdir", required=True, help="a run, or a folder of save_pretrained")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="a checkpoint; the newest by default")
    which.add_argument(
        "--best",
        action="store_true",
        help="the kept checkpoint with the least held-out loss",
    )
    add("--ema", action="store_true", help="the averaged weights of optimizer.ema")
    add_imports(parser)
    add("--tasks", required=True, help="names, separated by commas")
    add("--include", type=Path, help="a folder of your own tasks (YAML)")
    add("--limit", type=int, help="the most examples of a task; all by default")
    add("--shots", type=int, help="examples in each prompt; by default the task's own")
    add("--json", help="also write the numbers to this file")
    chosen = parser.parse_args(words)
    chosen.workdir = resolve(chosen.workdir)
    if chosen.json is not None:
        chosen.json = resolve_url(chosen.json)
    chosen.names = [x for x in map(str.strip, chosen.tasks.split(",")) if x]
    if not chosen.names:
        raise ValueError(f"--tasks {chosen.tasks!r} names no task")
    for name, least in (("limit", 1), ("shots", 0)):
        if (value := getattr(chosen, name)) is not None and value < least:
            raise ValueError(f"--{name} must be at least {least}, got {value}")
    if chosen.include is not None and not chosen.include.is_dir():
        raise ValueError(f"--include {chosen.include} is no folder")
    return chosen


def evaluate(model: Loaded, chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the results of lm_eval's `simple_evaluate`, unchanged.

    Raises:
        ValueError: a task is unknown, or the model does not write text.
    """
    from lm_eval.evaluator import simple_evaluate

    from symjax.evaluation.harness_model import HarnessModel

    wrapped, tasks = HarnessModel(model), _tasks(chosen.names, chosen.include)
    with announce_if_slow(f"{', '.join(chosen.names)}: compiling and measuring"):
        results = simple_evaluate(
            wrapped,
            tasks=chosen.names,
            num_fewshot=chosen.shots,
            limit=chosen.limit,
            task_manager=tasks,
            log_samples=False,
            torch_random_seed=None,  # pyright: ignore[reportArgumentType]
        )
    return dict(results or {})


def _tasks(names: list[str], include: Path | None) -> Any:
    """Return lm_eval's task manager, which has all tasks of `names`.

    It has the tasks in the folder `include`. If one of the names is not among them, or
    there is no folder, it has the tasks of lm_eval too.

    Raises:
        ValueError: a name is unknown.
    """
    from lm_eval.tasks import TaskManager

    for defaults in (True,) if include is None else (False, True):
        folder = None if include is None else str(include)
        manager = TaskManager(include_path=folder, include_defaults=defaults)
        unknown = [x for x in names if x not in manager.all_tasks]
        if not unknown:
            return manager
    raise ValueError(f"--tasks {unknown[0]!r} is unknown to lm_eval and --include")


if __name__ == "__main__":
    run_and_exit(lambda: main(sys.argv[1:]))
