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


def text_file(word: str) -> Path:
    """Return the path of a file that exists and is not empty."""
    path = existing(word)
    if not path.is_file() or not path.stat().st_size:
        raise ArgumentTypeError(f"{word} must be a file with text")
    return path


def folder(word: str) -> Path:
    """Return the path of a folder, which is made if it does not exist."""
    path = Path(word)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentTypeError(
            f"{word} cannot be a folder: {error.strerror}"
        ) from None
    return path


def wheels(word: str) -> list[Path]:
    """Return the wheels of a folder."""
    found = sorted(existing(word).glob("*.whl"))
    if not found:
        raise ArgumentTypeError(f"{word} is no folder with files *.whl")
    for path in found:
        if path.name.count("-") < 4:
            raise ArgumentTypeError(f"{path} is not named as a wheel is")
    return found


def existing(word: str) -> Path:
    """Return the path of a file or folder that exists."""
    path = Path(word)
    if not path.exists():
        raise ArgumentTypeError(f"{word}: there is no such file or folder")
    return path
