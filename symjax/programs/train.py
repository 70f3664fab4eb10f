"""The program that trains: train.py, and symjax-train from any directory."""

import contextlib
import sys
from typing import NoReturn

from symjax import imports
from symjax.data.store.folder import verify
from symjax.distributed import launch, processes
from symjax.distributed.exit_codes import run_and_exit
from symjax.estimate.plan import describe
from symjax.programs import commandline
from symjax.training.loop import run
from symjax.training.preflight import data_folder, pack


def command() -> NoReturn:
    """What train.py and symjax-train do."""
    run_and_exit(lambda: main(sys.argv[1:]))


def main(words: list[str]) -> None:
    place = commandline.place(words)
    launch.join(place)
    processes.all_succeed(lambda: launch.check_count(place))
    given = imports.using(commandline.imported(words))
    with contextlib.ExitStack() as stack:
        processes.all_succeed(lambda: stack.enter_context(given))
        run_command(words)


def run_command(words: list[str]) -> None:
    """Do what the words ask for: print, pack or train."""
    command = processes.all_succeed(lambda: commandline.parse(words))
    if command.help is not None:
        print(commandline.help_text(command.config, command.help))
    elif command.dry_run:
        print(describe(command.config, command.target))
    elif command.pack:
        print(pack(command.config, command.workdir, command.allow))
    else:
        if command.verify:
            data, workdir = command.config.data, command.workdir
            processes.all_succeed(lambda: verify(data, data_folder(workdir)))
        run(command.config, command.workdir, command.allow)
