"""Processes of one run: their start, agreement, signals and exit codes.

launch.py      connection of the processes: flags, torchrun or a launcher
processes.py   agreement among them
signals.py     SIGINT and SIGTERM: save the last step before the end
exit_codes.py  exit code and message of each kind of error
"""
