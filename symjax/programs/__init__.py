"""The programs, each from its command line to its files.

    train        train.py, symjax-train           train, pack data, or a dry run
    evaluate     eval.py, symjax-eval             measure one checkpoint
    compare      python -m symjax.programs.compare   several runs in one table
    harness      python -m symjax.programs.harness   tasks of EleutherAI's lm_eval

`commandline` turns the words of train.py into a configuration, which begins with that
of a `configuration_file`. `comparison` has the parts of `compare`. Bad input ends every
program with one line on stderr and exit code 2 (`distributed/exit_codes.py`).
"""
