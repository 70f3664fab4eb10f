"""Train a model: python train.py --config configs/diff_sym.py:tiny (or --help)."""

import sys

from symjax.training.plan import describe

from symjax.training import commandline
from symjax.training.loop import run


def main(words: list[str]) -> None:
    command = commandline.parse(words)
    if command.dry_run:
        print(describe(command.config))
    else:
        run(command.config, command.workdir)


if __name__ == "__main__":
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(commandline.help_text())
    else:
        commandline.leave(lambda: main(sys.argv[1:]))
