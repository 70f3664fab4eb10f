"""Rows and files that are not read: each kind is counted, and named in one line."""

from __future__ import annotations

import sys


class LeftOut:
    """Counts of what is left out of a data set, by kind, with the first example."""

    def __init__(self):
        self._kinds: dict[str, tuple[int, str]] = {}

    def add(self, kind: str, example: str) -> None:
        """Count one more of a kind, such as "rows without text"."""
        count, first = self._kinds.get(kind, (0, example))
        self._kinds[kind] = count + 1, first

    def add_unreadable(self, error: OSError) -> None:
        """Count a folder that `os.walk` cannot list."""
        self.add("folders that cannot be read", repr(error.filename))

    def say(self, where: str) -> None:
        """Print one line a kind on stderr, and forget the counts.

        Args:
            where: what they are left out of, for the lines: "data.name 'a'".
        """
        for kind, (count, first) in self._kinds.items():
            line = f"{where}: not read: {kind}: {count:,}, such as {first}"
            print(line, file=sys.stderr, flush=True)
        self._kinds = {}
