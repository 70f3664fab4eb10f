"""Processes of one run: their start, agreement, signals and exit codes."""
