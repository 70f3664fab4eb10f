"""What every mechanism can do, read off its signature: `print(table())`."""

import inspect
from typing import NamedTuple, get_args

from symjax.attention.flash import flash, flash_causal, flash_state, flash_step
from symjax.attention.gau import gau
from symjax.attention.mechanisms import BIDIRECTIONAL, MECHANISMS, Mechanism
from symjax.attention.spectral import matrix_function

# Those that are whole blocks are no choices of a layer.
ROWS = MECHANISMS | {
    "gau": Mechanism(gau),
    "flash": Mechanism(
        *(flash, None, flash_causal, flash_step, flash_state),
        *("T (G (H + V) + M V)", "G (H + M + V) + M V"),
    ),
    **BIDIRECTIONAL,
}


class Capabilities(NamedTuple):
    """What the functions of a mechanism take; what they do not take, they refuse.

    mask: "pairs" is one for each query and key, "keys" one for each key.
    grouped: a key head may serve several query heads.
    lengths: there may be more or fewer keys than queries.
    """

    causal: bool
    bidirectional: bool
    mask: str
    bias: bool
    grouped: bool
    lengths: bool
    segments: bool
    steps: bool


def capabilities(mechanism: Mechanism) -> Capabilities:
    """Read off the signatures: the arguments, and the letters of their shapes."""
    arguments = inspect.signature(mechanism.attend).parameters
    names = set(arguments)
    return Capabilities(
        causal=mechanism.causal is not None or "is_causal" in names,
        bidirectional=mechanism.attend is not mechanism.causal,
        mask="pairs" if "#T" in _shape(arguments["mask"]) else "keys",
        bias="bias" in names,
        grouped="key" in names,
        lengths="key" in names and "S" in _shape(arguments["key"]),
        segments=mechanism.attend is not matrix_function,  # which refuses them
        steps=mechanism.step is not None,
    )


def table() -> str:
    """The capability matrix, a row a mechanism, as text.

    Symmetric keys and differential maps go over any of these, with the capabilities
    of the one they go over; symmetric keys are not grouped.
    """
    rows: list[tuple[str, ...]] = [
        ("mechanism", *Capabilities._fields, "time a head", "memory to decode")
    ]
    for name, mechanism in ROWS.items():
        cells = [_cell(cell) for cell in capabilities(mechanism)]
        rows.append((name, *cells, mechanism.time, mechanism.memory))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _cell(value: bool | str) -> str:
    return value if isinstance(value, str) else ("yes" if value else "-")


def _shape(argument: inspect.Parameter) -> list[str]:
    """The letters of the shape that an argument is annotated with."""
    kinds = get_args(argument.annotation) or (argument.annotation,)
    return next(x.dim_str for x in kinds if hasattr(x, "dim_str")).split()
