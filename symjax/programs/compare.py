"""Several configurations over several seeds, with equal data and budget, in one table.

python -m symjax.programs.compare --configs configs/gpt.py:tiny,configs/sym.py:tiny \\
    --seeds 0,1,2 [--config.KEY=VALUE ...] [--out runs/compare] [--batches N]
python -m symjax.programs.compare --configs configs/digits.py \\
    --vary model.attention.mechanism=softmax,linear,matrix_function
python -m symjax.programs.compare --configs configs/gpt.py:tiny,configs/diff.py:tiny \\
    --seeds 0,1,2 --match parameters --tune optimizer.learning_rate=2e-3,4e-3,8e-3 \\
    --tasks entropy,rank

python -m symjax.programs.compare --workdirs runs/gpt,runs/diff_sym

--configs trains one run for each configuration and seed, as a workdir of train.py below
--out. --vary makes a configuration of each value of a key. Given twice, it makes one
of each pair of values. Complete runs are not trained again, so the same command
continues after an interruption. All configurations of a seed are trained before those
of the next seed, and each run is measured and printed when it is complete. At the end
compare.md, compare.csv, compare.json and the figure heldout.png are written to --out.
Three more tables are written if they have rows: differences.csv with its figure,
tasks.csv and lambda.csv.

--workdirs compares existing runs and trains nothing. Runs of the same step that differ
only in their seed make one row. The end -seedN of their init_from may differ too: seed
0 may begin with FOLDER-seed0, and seed 1 with FOLDER-seed1.

Differences from the first configuration, or from --baseline, are paired by seed: the
table has their mean and the 95 % interval of Student's t, which needs two seeds.

--tasks runs tasks of eval.py on every run. A few headline numbers of each task become
columns, as means and standard deviations over seeds. All tables, figures and numbers of
the tasks are in the folder tasks/ of --out.

--match gives every configuration the baseline's number of parameters, or its FLOPs per
token, within 2 %. It changes only model.feedforward.

--tune trains every value of a key with the first seed of each configuration. The value
with the least loss on a quarter of the held-out rows is used with all seeds. Held-out
losses of the comparison are measured on the other rows.

Table and curves use the same held-out batches: --batches if it is given, otherwise
--config.evaluate.batches if it is given, otherwise all. Exit codes are those of
train.py.
"""

import argparse
import itertools
import re
import statistics
import sys

from symjax.starting import announce

if __name__ == "__main__":
    announce("compare")

from symjax import figures
from symjax.distributed.exit_codes import run_and_exit
from symjax.evaluation import report, tasks
from symjax.evaluation.results import announce_if_slow
from symjax.imports import using
from symjax.programs.commandline import Command, Parser, add_imports
from symjax.programs.comparison.matched import KEY, MEASURES, match_plan
from symjax.programs.comparison.measured import (
    Evaluated,
    check_batches,
    check_documents,
    evaluate,
)
from symjax.programs.comparison.runs import (
    Plan,
    Workdir,
    check_run,
    group_runs,
    plan_runs,
    split_list,
    train_missing,
)
from symjax.programs.comparison.tables import Fairness, compare
from symjax.programs.comparison.tuned import tune
from symjax.storage import check_writable, resolve, resolve_url


def main(words: list[str]) -> None:
    """Parse the words of the command line and run the comparison."""
    chosen, rest = _parser().parse_known_args(words)
    if chosen.batches is not None and chosen.batches < 1:
        raise ValueError(f"--batches must be at least 1, got {chosen.batches}")
    chosen.names = tasks.parse_names(chosen.tasks) if chosen.tasks else ()
    chosen.out = resolve_url(chosen.out)
    with using(chosen.imports):
        run(chosen, rest)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m symjax.programs.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--configs", help="FILE[:preset], separated by commas")
    which.add_argument("--workdirs", help="existing runs, separated by commas")
    add("--vary", action="append", default=[], help="KEY=VALUE,VALUE: a key's values")
    add_imports(parser)
    add("--seeds", help="whole numbers, separated by commas (0)")
    add("--out", default="runs/compare", help="folder of the results (%(default)s)")
    add("--batches", type=int, help="held-out batches; all by default")
    add(
        "--tasks", help="tasks of eval.py, separated by commas, or all; none by default"
    )
    add("--baseline", help="configuration to compare with; the first by default")
    add("--match", choices=MEASURES, help="equal size or cost, by model.feedforward")
    add(
        "--tune",
        action="append",
        default=[],
        help="KEY=VALUE,VALUE: each configuration uses its best value of a key",
    )
    return parser


def run(chosen: argparse.Namespace, rest: list[str]) -> None:
    """Train the runs that are not complete, evaluate all and write the comparison.

    Args:
        rest: the words --config.KEY=VALUE.
    """
    plan: Plan = {}
    existing: dict[str, list[Workdir]] = {}
    if chosen.workdirs is not None:
        check_nothing_to_train(chosen, rest)
        existing = group_runs(
            [*map(resolve, split_list("--workdirs", chosen.workdirs, str))]
        )
    else:
        plan = plan_runs(chosen, rest)
        check_matched_keys(chosen)
    names = list(plan or existing)
    baseline = chosen.baseline or names[0]
    if baseline not in names:
        raise ValueError(
            f"--baseline {baseline!r} is unknown: choose from {', '.join(names)}"
        )
    figures.check_figures()
    check_writable(chosen.out, f"--out {chosen.out}")
    fairness = Fairness(baseline)
    if plan:
        commands, fairness = prepare(plan, chosen, fairness)
        evaluated = train_and_measure(commands, chosen)
    else:
        evaluated = {name: [] for name in names}
        for name, workdirs in existing.items():
            for workdir in workdirs:
                measure(name, workdir, evaluated, len(workdirs), chosen)
    write(evaluated, fairness, chosen.out)


def prepare(
    plan: Plan, chosen: argparse.Namespace, fairness: Fairness
) -> tuple[dict[str, list[Command]], Fairness]:
    """Apply --match and --tune, and return the runs by configuration.

    --tune trains the first seed of every configuration with each value.
    """
    if chosen.match:
        plan, matches = match_plan(plan, fairness.baseline, chosen.match)
        fairness = fairness._replace(matches=matches)
        for found in matches:
            print(f"--match: {found}", flush=True)
    for values in plan.values():
        for command in itertools.chain(*values.values()):
            check_run(command)
    if not chosen.tune:
        return {name: values[""] for name, values in plan.items()}, fairness
    runs, choices = tune(plan, chosen.batches, lambda line: print(line, flush=True))
    return runs, fairness._replace(choices=choices)


def train_and_measure(
    runs: dict[str, list[Command]], chosen: argparse.Namespace
) -> dict[str, list[Evaluated]]:
    """Train the runs that are not complete; measure and print each run after training.

    All configurations of a seed come before those of the next seed, so that a machine
    that becomes slower or faster changes the speed of all configurations alike.
    """
    evaluated: dict[str, list[Evaluated]] = {name: [] for name in runs}
    for commands in zip(*runs.values(), strict=True):
        for name, command in zip(runs, commands, strict=True):
            train_missing(command)
            measure(name, command.workdir, evaluated, len(runs[name]), chosen)
    return evaluated


def measure(
    name: str,
    workdir: Workdir,
    evaluated: dict[str, list[Evaluated]],
    count: int,
    chosen: argparse.Namespace,
) -> None:
    """Measure a run, append it to `evaluated`, and print its configuration's mean loss.

    The results of --tasks are written to a folder in --out.

    Args:
        count: number of runs of the configuration.
    """
    folder = chosen.out / "tasks" / re.sub(r"[^\w.=+-]+", "-", name)
    with announce_if_slow(f"{workdir}: compiling and measuring"):
        found = evaluate(
            workdir, chosen.batches, chosen.names, folder, part=bool(chosen.tune)
        )
    evaluated[name].append(found)
    losses = [run.losses["heldout"]["loss"] for run in evaluated[name]]
    spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
    print(
        f"{name}: held-out loss {statistics.mean(losses):.4f}{spread} "
        f"nats/{found.unit}, {len(losses)} of {count} seeds",
        flush=True,
    )


def write(
    evaluated: dict[str, list[Evaluated]], fairness: Fairness, out: Workdir
) -> None:
    """Print the comparison, and write its files into a folder.

    Raises:
        ValueError: the runs have different targets or different held-out batches, or a
            file cannot be written.
    """
    check_documents(evaluated)
    check_batches(evaluated)
    comparison = compare(evaluated, fairness)
    print(report.to_text(comparison))
    lines = "\n".join(f"- {line}" for line in comparison.text)
    text = "\n\n".join([lines, *map(report.to_markdown, comparison.tables)])
    report.write(f"{text}\n".encode(), out / "compare.md", "--out")
    values = report.to_json({}, {"compare": comparison})
    report.write(values.encode(), out / "compare.json", "--out")
    report.write_folder({"compare": comparison}, out)


def check_nothing_to_train(chosen: argparse.Namespace, rest: list[str]) -> None:
    """Refuse flags of training together with --workdirs. Raises: ValueError."""
    flags = {
        "--vary": chosen.vary,
        "--seeds": chosen.seeds,
        "--match": chosen.match,
        "--tune": chosen.tune,
    }
    used = [name for name, value in flags.items() if value]
    if used or rest:
        raise ValueError(
            f"{(used + rest)[0]} is for runs to train: --workdirs compares runs that "
            "exist"
        )


def check_matched_keys(chosen: argparse.Namespace) -> None:
    """Refuse --vary and --tune of the key that --match sets. Raises: ValueError."""
    keys = [x.partition("=")[0] for x in (*chosen.vary, *chosen.tune)]
    if chosen.match and KEY in keys:
        raise ValueError(f"--match sets {KEY}: leave it out of --vary and --tune")


if __name__ == "__main__":
    run_and_exit(lambda: main(sys.argv[1:]))
