"""What packing shows of itself: a bar on a terminal, a line in a file."""

from __future__ import annotations

import sys

from tqdm import tqdm

LARGE = 1 << 26  # bytes or characters, from which a line says what is done


def bar(total: int, what: str, unit: str = "B") -> tqdm:
    """A bar on stderr that leaves nothing behind.

    Args:
        total: in units; bytes or characters unless said.
    """
    if total >= LARGE and not sys.stderr.isatty():
        print(f"{what}: {total / 1e6:,.0f} M{unit}", file=sys.stderr, flush=True)
    return tqdm(
        total=total, desc=what, unit=unit, unit_scale=True, leave=False, disable=None
    )
