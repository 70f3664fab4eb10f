"""Rows of cells as aligned lines of text."""

from collections.abc import Callable, Sequence


def aligned(
    rows: Sequence[Sequence[str]],
    justify: Callable[[str, int], str] = str.ljust,
    least: int = 0,
) -> list[str]:
    """Return one line per row, with columns two spaces apart.

    Args:
        justify: str.ljust or str.rjust.
        least: least width of every column except the first.
    """
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    widths = [first, *(max(least, width) for width in others)]
    return ["  ".join(map(justify, row, widths)).rstrip() for row in rows]
