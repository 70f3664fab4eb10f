"""Counts of rows and files that are not read, printed as one line per kind."""

from __future__ import annotations

import sys


class LeftOut:
    """Counts of rows and files that are left out of a data set.

    Each kind has a count and its first example.
    """

    def __init__(self):
        self._kinds: dict[str, tuple[int, str]] = {}

    def add(self, kind: str, example: str) -> None:
        """Count one more row or file of a kind, such as "rows without text"."""
        count, first = self._kinds.get(kind, (0, example))
        self._kinds[kind] = count + 1, first

    def add_unreadable(self, error: OSError) -> None:
        """Count a folder that `os.walk` cannot list."""
        self.add("folders that cannot be read", repr(error.filename))

    def say(self, where: str) -> None:
        """Print one line per kind on stderr, and reset the counts.

        Args:
            where: the name of the data set in the lines, such as "data.name 'a'".
        """
        for kind, (count, first) in self._kinds.items():
            line = f"{where}: not read: {kind}: {count:,}, such as {first}"
            print(line, file=sys.stderr, flush=True)
        self._kinds = {}
