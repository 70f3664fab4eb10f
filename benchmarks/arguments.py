"""Types of command-line arguments. They refuse wrong values before anything runs."""

from argparse import ArgumentTypeError
from pathlib import Path


def positive(word: str) -> int:
    """Return a positive whole number."""
    if not word.isdecimal() or int(word) == 0:
        raise ArgumentTypeError(f"{word!r} is no positive number")
    return int(word)


def numbers(word: str) -> str:
    """Return a list of whole numbers between commas, without spaces."""
    parts = [x.strip() for x in word.split(",")]
    if not all(x.isdecimal() for x in parts):
        raise ArgumentTypeError(f"{word!r} must be whole numbers between commas")
    return ",".join(parts)


def output(word: str) -> Path:
    """Return the path of a file that can be written: its folder exists."""
    path = Path(word)
    if path.is_dir():
        raise ArgumentTypeError(f"{word} is a folder")
    if not path.parent.is_dir():
        raise ArgumentTypeError(f"{word}: there is no folder {path.parent}")
    return path


def existing(word: str) -> Path:
    """Return the path of a file or folder that exists."""
    path = Path(word)
    if not path.exists():
        raise ArgumentTypeError(f"{word}: there is no such file or folder")
    return path
