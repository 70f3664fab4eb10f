"""The first line of a program, which appears before the imports that take seconds.

This module does not import jax. `symjax-train`, `symjax-eval`, `train.py`, `eval.py`,
compare and harness print the line first, and then import their program.
"""

import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

# Environment variables in which launchers give the number of a process. On a TPU pod it
# is the number of the machine.
RANKS = (
    *("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"),
    *("TPU_WORKER_ID", "CLOUD_TPU_TASK_ID"),
)


def train() -> NoReturn:
    """Run the program symjax-train."""
    announce("symjax-train")
    from symjax.programs.train import command

    command()


def evaluate() -> NoReturn:
    """Run the program symjax-eval."""
    announce("symjax-eval")
    from symjax.programs.evaluate import command

    command()


def announce(program: str, imported: str = "jax") -> None:
    """Print on stderr that a program starts, in the first process of a run only."""
    if is_first(sys.argv[1:], os.environ):
        line = f"{program} starts: importing {imported}, which takes a while"
        print(line, file=sys.stderr, flush=True)


def is_first(words: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether flags or a launcher give this process number 0, or no number.

    The answer is a guess, by which one process prints the first line. Once jax is
    imported, `distributed.launch` decides which process is the first.
    """
    ranks = [environment.get(name) for name in RANKS]
    for word, following in itertools.pairwise([*words, ""]):
        flag, equals, value = word.partition("=")
        if flag == "--process":
            ranks = [value if equals else following]
    return next(filter(None, ranks), "0") == "0"
