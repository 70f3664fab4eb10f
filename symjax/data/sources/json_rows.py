"""Rows of a JSON file: one object per line, a list, or objects one after another."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from symjax.data.sources.errors import DamagedFile


class Row(NamedTuple):
    """A row of a JSON file.

    Attributes:
        place: the place of the row in its file, such as "line 3" or "item 3".
        values: the values by key.
        twice: keys that the row has more than once.
    """

    place: str
    values: dict[str, Any]
    twice: frozenset[str]


class _ObjectWithRepeatedKeys(dict):
    """An object with keys that occur more than once; the last value of each counts."""

    twice: frozenset[str] = frozenset()


def _checked_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object from its pairs, and note repeated keys."""
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    names = [name for name, _ in pairs]
    found = _ObjectWithRepeatedKeys(found)
    found.twice = frozenset(name for name in names if names.count(name) > 1)
    return found


_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder(object_pairs_hook=_checked_object)
_DECODER_OF_LARGE_NUMBERS = json.JSONDecoder(
    object_pairs_hook=_checked_object, parse_int=float
)


def read_rows(lines: Iterable[str], field: str | None = None) -> Iterator[Row]:
    """Yield the rows of a file, in order.

    A file usually has one object per line, and is read line by line. It may also be a
    list of objects, a list of texts (rows with the key "text"), or objects of several
    lines each. Such files are read whole.

    Args:
        lines: the lines of the file, with their ends.
        field: the file is one object, and the rows are under this key.
    Raises:
        DamagedFile: the file is no JSON (the message has the line), a row is no object,
            or there is no list under `field`.
    """
    if field is not None:
        whole = next(_values("".join(lines), 1), (1, None))[1]
        if not isinstance(whole, dict) or not isinstance(whole.get(field), list):
            raise DamagedFile(f"it has no list under the key {field!r}")
        yield from _items(whole[field])
        return
    rest = iter(lines)
    number, first = next(((n, x) for n, x in enumerate(rest, 1) if x.strip()), (0, ""))
    if not number:
        return
    if first.lstrip().startswith("["):
        text = "\n" * (number - 1) + first + "".join(rest)
        for _, whole in _values(text, 1):
            yield from _items(whole)
        return
    for line, value in _objects(itertools.chain([first], rest), number):
        yield _row(f"line {line}", value)


def _objects(lines: Iterator[str], number: int) -> Iterator[tuple[int, Any]]:
    """Yield the values of lines, each with the line in which it begins.

    If a value does not end in its line, all remaining lines are read at once.
    """
    for line, text in enumerate(lines, number):
        try:
            values = [*_values(text, line)]
        except _JsonSyntaxError as error:
            if not error.goes_on:
                raise
            try:
                values = [*_values(text + "".join(lines), line)]
            except _JsonSyntaxError as other:
                raise (other if other.line > line else error) from None
        yield from values


class _JsonSyntaxError(DamagedFile):
    """An error about text that is no JSON.

    Attributes:
        line: the number of the line.
        goes_on: whether the value may continue in the next line.
    """

    line = 0
    goes_on = False


def _values(text: str, number: int) -> Iterator[tuple[int, Any]]:
    """Yield the values of a text, each with the line in which it begins.

    Args:
        number: the line in which the text begins.
    Raises:
        DamagedFile: the text is no JSON; the message has the line.
    """
    line, end = number, 0
    while True:
        begin = _SPACE.match(text, end).end()  # pyright: ignore[reportOptionalMemberAccess]
        if begin == len(text):
            return
        line += text.count("\n", end, begin)
        try:
            value, end = _decode_at(text, begin)
        except json.JSONDecodeError as error:
            place = min(error.pos, len(text.rstrip()))
            at = number + text.count("\n", 0, place)
            column = place - text.rfind("\n", 0, place)
            why = error.msg.removesuffix(" at").removesuffix(" starting")
            damaged = _JsonSyntaxError(f"line {at}, column {column}: {why}")
            damaged.line, damaged.goes_on = at, place < error.pos or place == len(text)
            raise damaged from None
        except RecursionError as error:
            raise DamagedFile(f"line {line}: {error}") from None
        yield line, value
        line += text.count("\n", begin, end)


def _decode_at(text: str, begin: int) -> tuple[Any, int]:
    """Return a value and the place after it; numbers may have any number of digits."""
    try:
        return _DECODER.raw_decode(text, begin)
    except json.JSONDecodeError:
        raise
    except ValueError:  # Python refuses to read an integer of more than 4,300 digits
        return _DECODER_OF_LARGE_NUMBERS.raw_decode(text, begin)


def _items(whole: Any) -> Iterator[Row]:
    """Yield the rows of a list of objects or texts."""
    for number, value in enumerate(whole, 1):
        if isinstance(value, str):
            value = {"text": value}
        yield _row(f"item {number}", value)


def _row(place: str, value: Any) -> Row:
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise DamagedFile(f"{place} is no object, but {kind}")
    return Row(place, value, getattr(value, "twice", frozenset()))
