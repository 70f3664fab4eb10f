"""The program of train.py, and of symjax-train from any directory."""

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
    """Run the program with the words of the command line, and exit with its code."""
    run_and_exit(lambda: main(sys.argv[1:]))


def main(words: list[str]) -> None:
    """Connect the processes, run the code of --import, and then the command."""
    place = commandline.parse_launch(words)
    launch.join(place)
    processes.all_succeed(lambda: launch.check_count(place))
    imported = imports.using(commandline.parse_imports(words))
    with contextlib.ExitStack() as stack:
        processes.all_succeed(lambda: stack.enter_context(imported))
        run_command(words)


def run_command(words: list[str]) -> None:
    """Print the help or a dry run, pack the data, or train."""
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
