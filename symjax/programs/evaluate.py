"""The program of eval.py, and of symjax-eval from any directory.

`evaluate` loads a checkpoint and runs tasks. `TASKS` in symjax/evaluation/tasks.py has
the function of each task.
"""

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
    "Losses are in nats per token, answer or label. Evaluating a checkpoint again "
    "writes the same JSON, byte for byte."
)
LONGEST = 2**20  # largest value of --lengths


def command() -> NoReturn:
    """Run the program with the words of the command line, and exit with its code."""
    run_and_exit(lambda: main(sys.argv[1:]))


def main(words: list[str]) -> None:
    """List the tasks, or evaluate a checkpoint."""
    if "--list" in words:
        print("\n".join(f"{n:<14}{t.meaning}" for n, t in tasks.TASKS.items()))
    else:
        evaluate(parse(words))


def parse(words: list[str]) -> argparse.Namespace:
    """Return the flags, checked. Raises: ValueError: in one line, naming the flag."""
    chosen = _parser().parse_args(words)
    _check_ranges(chosen)
    chosen.rope_scaling = _rope_kinds(chosen.rope_scaling)
    chosen.lengths = _lengths(chosen.lengths)
    chosen.workdir = resolve(chosen.workdir)
    for name in ("json", "out", "report"):
        if (value := getattr(chosen, name)) is not None:
            setattr(chosen, name, resolve_url(value))
    chosen.names = tasks.parse_names(chosen.tasks)
    for flag, is_set, *users in (
        ("--rope_scaling", chosen.rope_scaling, "length"),
        ("--lengths", chosen.lengths, "speed"),
        ("--prompt", chosen.prompt is not None, "sample", "maps"),
    ):
        if is_set and not {*users} & {*chosen.names}:
            raise ValueError(
                f"{flag} is for the task {' or '.join(users)}, which --tasks "
                f"{chosen.tasks} leaves out"
            )
    windowed = [name for name, task in tasks.TASKS.items() if task.windows]
    if chosen.window is not None and not {*windowed} & {*chosen.names}:
        raise ValueError(
            f"--window is for {', '.join(windowed)}, which --tasks {chosen.tasks} "
            "leaves out"
        )
    return chosen


def _parser() -> Parser:
    parser = Parser(prog="eval.py", description=ABOUT, epilog=NOTE)
    add = parser.add_argument
    add("--workdir", required=True, help="the run to evaluate")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--step",
        type=int,
        help="the checkpoint of this step; by default the newest undamaged one",
    )
    which.add_argument(
        "--best",
        action="store_true",
        help="the kept checkpoint with the least held-out loss; with "
        "checkpoint.best=true it is the best of the whole run",
    )
    add("--ema", action="store_true", help="the averaged weights of optimizer.ema")
    add("--tasks", default=tasks.DEFAULT_TASKS, help="names, or all (%(default)s)")
    add_imports(parser)
    add("--list", action="store_true", help="print the tasks and what they measure")
    add("--json", help="also write the numbers to this file")
    add("--out", help="also write tables (CSV) and figures (PNG) into this folder")
    add("--report", help="also write all results into this HTML page")
    add(
        "--batches",
        type=int,
        help="largest number of held-out batches; by default all for the task loss, "
        "and a few for other tasks",
    )
    add("--text", type=Path, help="evaluate this file instead of the held-out text")
    add(
        "--window",
        type=int,
        help="for tasks of attention maps: tokens of each held-out window; by default "
        "as in training, and for text at most 512",
    )
    add("--verify", action="store_true", help="first compare all data with its hashes")
    add(
        "--prompt",
        help="text to continue, and to draw maps of; held-out text by default",
    )
    add("--tokens", type=int, default=200, help="tokens to generate (%(default)s)")
    add("--temperature", type=float, default=0.8, help="0: greedy (%(default)s)")
    add("--seed", type=int, default=0, help="seed of random numbers (%(default)s)")
    add(
        "--rope_scaling",
        default="",
        help="for the task length: kinds of RoPE scaling to try in windows longer than "
        "those of training, such as linear,dynamic,yarn",
    )
    add(
        "--lengths",
        default="",
        help="for the task speed: tokens of a row, such as 512,2048,8192,16384; "
        "128,256,512,1024,2048 by default",
    )
    return parser


def _check_ranges(chosen: argparse.Namespace) -> None:
    """Refuse numbers outside their range. Raises: ValueError: naming the flag."""
    for name in ("batches", "tokens", "window"):
        if (value := getattr(chosen, name)) is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    if not 0 <= chosen.temperature < float("inf"):
        raise ValueError(f"--temperature must be 0 or more, got {chosen.temperature}")
    if not 0 <= chosen.seed < 2**31:
        raise ValueError(f"--seed must be in [0, 2147483648), got {chosen.seed}")


def _rope_kinds(text: str) -> tuple[str, ...]:
    """Return the kinds of RoPE scaling, each once; () for an empty text.

    Raises:
        ValueError: a kind is unknown, or the text has only commas.
    """
    kinds = list(filter(None, map(str.strip, text.split(","))))
    for kind in kinds or [text] * bool(text):
        if kind not in SCALED:
            raise ValueError(
                f"--rope_scaling {kind!r} is unknown: choose from {', '.join(SCALED)}"
            )
    return tuple(dict.fromkeys(kinds))


def _lengths(text: str) -> tuple[int, ...]:
    """Return the lengths, each once, in ascending order; () for an empty text.

    Raises:
        ValueError: a length is not a number from 1 to 2²⁰, or the text has only commas.
    """
    words = list(filter(None, map(str.strip, text.split(","))))
    for word in words or [text] * bool(text):
        if not (word.isascii() and word.isdigit() and 1 <= int(word) <= LONGEST):
            raise ValueError(f"--lengths must be from 1 to {LONGEST}, got {word!r}")
    return tuple(sorted(set(map(int, words))))


def evaluate(chosen: argparse.Namespace) -> None:
    """Load a checkpoint, run and print one task after another, and write the files."""
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
    about, results, one_line = tasks.describe_checkpoint(run), {}, False
    for name in chosen.names:
        with announce_if_slow(f"{name}: compiling and measuring"):
            results[name] = tasks.measure(name, run, options)
        text, one_line_before = report.to_text(results[name]), one_line
        one_line = "\n" not in text  # a task that does not apply
        print(text if one_line and one_line_before else f"\n{text}", flush=True)
        if chosen.json is not None:  # after each task, in case a later one fails
            text = report.to_json(about, results)
            report.write(text.encode(), chosen.json, "--json")
    if chosen.out is not None:
        report.write_folder(results, chosen.out)
    if chosen.report is not None:
        title = f"{chosen.workdir.name}, step {run.step}"
        page = report.to_html(title, overview(run) | results)
        report.write(page.encode(), chosen.report, "--report")
