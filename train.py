"""Train a model: python train.py --config configs/diff_sym.py:tiny (or --help)."""

from symjax.starting import announce

if __name__ == "__main__":
    announce("train.py")

from symjax.programs.train import command, main

__all__ = ["main"]

if __name__ == "__main__":
    command()
