"""Train a model: python train.py --config configs/diff_sym.py:tiny (or --help)."""

import sys

from symjax.training import commandline
from symjax.training.loop import run
from symjax.training.plan import describe


def main(words: list[str]) -> None:
    command = commandline.parse(words)
    if command.help:
        print(commandline.help_text(command.config))
    elif command.dry_run:
        print(describe(command.config))
    else:
        run(command.config, command.workdir)


if __name__ == "__main__":
    commandline.leave(lambda: main(sys.argv[1:]))
