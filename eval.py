"""Evaluate a checkpoint: python eval.py --workdir runs/diff_sym-tiny (or --help)."""

from symjax.starting import announce

if __name__ == "__main__":
    announce("eval.py")

from symjax.programs.evaluate import command, main, parse

__all__ = ["main", "parse"]

if __name__ == "__main__":
    command()
