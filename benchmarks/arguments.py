"""Arguments of these scripts: a wrong one is said before anything runs."""

from argparse import ArgumentTypeError
from pathlib import Path


def positive(word: str) -> int:
    if not word.isdecimal() or int(word) == 0:
        raise ArgumentTypeError(f"{word!r} is no positive number")
    return int(word)


def output(word: str) -> Path:
    """A file that can be made."""
    path = Path(word)
    if path.is_dir():
        raise ArgumentTypeError(f"{word} is a folder")
    if not path.parent.is_dir():
        raise ArgumentTypeError(f"{word}: there is no folder {path.parent}")
    return path
