"""The rows of a JSON file: one object a line, a list, or objects one after another."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from symjax.data.sources.errors import DamagedFile


class Row(NamedTuple):
    """
    Attributes:
        place: where the row is in its file: "line 3", "item 3".
        values: of its keys.
        twice: keys that it has more than once.
    """

    place: str
    values: dict[str, Any]
    twice: frozenset[str]


class _ObjectWithRepeatedKeys(dict):
    """An object that has keys more than once; the last value of each counts."""

    twice: frozenset[str] = frozenset()


def _checked_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
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
    """Return the rows of a file, in order.

    A file is one object a line, as a rule. If its first line is no object alone, it is
    a list of objects, a list of texts (rows with the key "text"), or objects that take
    several lines each; such a file is read as a whole.

    Args:
        lines: of the file, with their ends.
        field: the key of the one object of the file under which the rows are.
    Raises:
        DamagedFile: the file is damaged, or holds something else than rows; the
            message has the line.
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
    """The values of lines, each with the line it begins in.

    From a line on in which a value does not end, all lines are read at once.
    """
    for line, text in enumerate(lines, number):
        try:
            found = [*_values(text, line)]
        except _JsonSyntaxError as error:
            if not error.goes_on:
                raise
            try:
                found = [*_values(text + "".join(lines), line)]
            except _JsonSyntaxError as other:
                raise (other if other.line > line else error) from None
        yield from found


class _JsonSyntaxError(DamagedFile):
    """Text that is no JSON, in a line of a file; it may go on in the next one."""

    line = 0
    goes_on = False


def _values(text: str, number: int) -> Iterator[tuple[int, Any]]:
    """Each value of a text that begins in a line, and the line it begins in.

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
    """A value of a text and where it ends; numbers may be of any size."""
    try:
        return _DECODER.raw_decode(text, begin)
    except json.JSONDecodeError:
        raise
    except ValueError:  # Python refuses to read an integer of more than 4,300 digits
        return _DECODER_OF_LARGE_NUMBERS.raw_decode(text, begin)


def _items(whole: Any) -> Iterator[Row]:
    """Rows of a list of objects or texts."""
    for number, value in enumerate(whole, 1):
        if isinstance(value, str):
            value = {"text": value}
        yield _row(f"item {number}", value)


def _row(place: str, value: Any) -> Row:
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise DamagedFile(f"{place} is no object, but {kind}")
    return Row(place, value, getattr(value, "twice", frozenset()))
