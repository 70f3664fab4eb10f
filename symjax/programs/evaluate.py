"""The program that evaluates: eval.py, and symjax-eval from any directory."""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from symjax import figures
from symjax.attention.rope_scaling import SCALED
from symjax.data.sources.texts import read_pieces
from symjax.data.store.folder import verify
from symjax.distributed.exit_codes import run_and_exit
from symjax.evaluation import report, tasks
from symjax.evaluation.loading import load
from symjax.evaluation.overview import overview
from symjax.evaluation.results import Options, announce_if_slow
from symjax.imports import using
from symjax.programs.commandline import Parser, add_imports
from symjax.storage import check_writable, local_folder, resolve, resolve_url

ABOUT = "Evaluate a checkpoint: python eval.py --workdir runs/diff_sym-tiny"
NOTE = (
    "Losses are nats a token, an answer or a label; the JSON of a checkpoint is the "
    "same bytes each time."
)


def command() -> NoReturn:
    """What eval.py and symjax-eval do."""
    run_and_exit(lambda: main(sys.argv[1:]))


def main(words: list[str]) -> None:
    if "--list" in words:
        print("\n".join(f"{n:<14}{t.meaning}" for n, t in tasks.TASKS.items()))
    else:
        evaluate(parse(words))


def parse(words: list[str]) -> argparse.Namespace:
    """Raises: ValueError: a word is unknown or a value out of its range; one line."""
    parser = Parser(prog="eval.py", description=ABOUT, epilog=NOTE)
    add = parser.add_argument
    add("--workdir", required=True, help="the run to evaluate")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--step", type=int, help="a checkpoint; the newest whole one by default"
    )
    which.add_argument(
        "--best",
        action="store_true",
        help="of those that are kept, the checkpoint of the least held-out loss; "
        "checkpoint.best=true keeps that of the whole run",
    )
    add(
        "--ema", action="store_true", help="the mean of weights that optimizer.ema kept"
    )
    add("--tasks", default=tasks.DEFAULT_TASKS, help="names, or all (%(default)s)")
    add_imports(parser)
    add("--list", action="store_true", help="the tasks and what they measure")
    add("--json", help="also write the numbers to this file")
    add("--out", help="also write tables (CSV) and figures (PNG) there")
    add("--report", help="also write one HTML page with all of it")
    add("--batches", type=int, help="held-out batches to measure; all by default")
    add("--text", type=Path, help="evaluate this file instead of the held-out text")
    add("--verify", action="store_true", help="first compare all data with its hashes")
    add("--prompt", help="text to continue; held-out text by default")
    add("--tokens", type=int, default=200, help="tokens to generate (%(default)s)")
    add("--temperature", type=float, default=0.8, help="0: greedy (%(default)s)")
    add("--seed", type=int, default=0, help="of the sample (%(default)s)")
    add(
        "--rope_scaling",
        default="",
        help="of the task length: kinds of RoPE scaling by which windows longer than "
        "those of training are read, too, such as linear,dynamic,yarn",
    )
    chosen = parser.parse_args(words)
    for name in ("batches", "tokens"):
        if (value := getattr(chosen, name)) is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    if not 0 <= chosen.temperature < float("inf"):
        raise ValueError(f"--temperature must be 0 or more, got {chosen.temperature}")
    if not 0 <= chosen.seed < 2**31:
        raise ValueError(f"--seed must be in [0, 2147483648), got {chosen.seed}")
    kinds = tuple(filter(None, map(str.strip, chosen.rope_scaling.split(","))))
    if unknown := [kind for kind in kinds if kind not in SCALED]:
        raise ValueError(
            f"--rope_scaling {unknown[0]!r} is unknown: choose from {', '.join(SCALED)}"
        )
    chosen.rope_scaling = kinds
    chosen.workdir = resolve(chosen.workdir)
    for name in ("json", "out", "report"):
        if (value := getattr(chosen, name)) is not None:
            setattr(chosen, name, resolve_url(value))
    chosen.names = tasks.parse_names(chosen.tasks)
    if kinds and "length" not in chosen.names:
        raise ValueError(
            "--rope_scaling is for the task length, which --tasks "
            f"{chosen.tasks} leaves out"
        )
    if chosen.prompt is not None and "sample" not in chosen.names:
        raise ValueError(
            f"--prompt is for the task sample, which --tasks {chosen.tasks} leaves out"
        )
    return chosen


def evaluate(chosen: argparse.Namespace) -> None:
    """Load once, measure and print task after task, then write what was asked for."""
    for flag in ("json", "report"):
        if (path := getattr(chosen, flag)) is not None:
            report.check_file(path, f"--{flag}")
    if chosen.out is not None or chosen.report is not None:
        figures.check_figures()
    if chosen.out is not None:
        check_writable(chosen.out, f"--out {chosen.out}")
    text = None if chosen.text is None else "".join(read_pieces(chosen.text, "--text"))
    which = {"best": chosen.best, "ema": chosen.ema}
    with using(chosen.imports):
        run = load(chosen.workdir, chosen.step, **which, text=text)
    if chosen.verify:
        verify(run.config.data, local_folder(chosen.workdir) / "data")
    options = Options(*(getattr(chosen, name) for name in Options._fields))
    about, results, brief = tasks.describe_checkpoint(run), {}, False
    for name in chosen.names:
        with announce_if_slow(f"{name}: compiling and measuring"):
            results[name] = tasks.measure(name, run, options)
        text, before = report.to_text(results[name]), brief
        brief = "\n" not in text  # tasks that do not apply: no empty lines between them
        print(text if brief and before else f"\n{text}", flush=True)
        if chosen.json is not None:  # after each task, so that nothing measured is lost
            text = report.to_json(about, results)
            report.write(text.encode(), chosen.json, "--json")
    if chosen.out is not None:
        report.write_folder(results, chosen.out)
    if chosen.report is not None:
        title = f"{chosen.workdir.name}, step {run.step}"
        page = report.to_html(title, overview(run) | results)
        report.write(page.encode(), chosen.report, "--report")
