"""Train a model: python train.py --config configs/diff_sym.py:tiny (or --help)."""

import sys

from symjax.data.folder import MANIFEST, verify
from symjax.training import commandline, launch, processes
from symjax.training.exit_codes import run_and_exit
from symjax.training.loop import run
from symjax.training.plan import describe


def main(words: list[str]) -> None:
    place = commandline.place(words)
    launch.join(place)
    processes.all_succeed(lambda: launch.check_count(place))
    command = processes.all_succeed(lambda: commandline.parse(words))
    if command.help:
        print(commandline.help_text(command.config))
    elif command.dry_run:
        print(describe(command.config, command.target))
    else:
        if command.verify and (command.workdir / "data" / MANIFEST).exists():
            processes.all_succeed(lambda: verify(command.workdir / "data"))
        run(command.config, command.workdir)


if __name__ == "__main__":
    run_and_exit(lambda: main(sys.argv[1:]))
