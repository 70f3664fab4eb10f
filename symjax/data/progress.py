"""Progress of packing: a bar on a terminal, one line in a log file."""

from __future__ import annotations

import sys

from tqdm import tqdm

LARGE = 1 << 26  # the total from which a log file gets a line


def bar(total: int, what: str, unit: str = "B") -> tqdm:
    """Return a bar on stderr, which is removed when it is closed.

    If stderr is no terminal, there is no bar, but a line if the total is large.

    Args:
        total: the amount of work in units, by default bytes or characters.
        what: the description of the work.
    """
    if total >= LARGE and not sys.stderr.isatty():
        print(f"{what}: {total / 1e6:,.0f} M{unit}", file=sys.stderr, flush=True)
    return tqdm(
        total=total, desc=what, unit=unit, unit_scale=True, leave=False, disable=None
    )
