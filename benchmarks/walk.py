"""Files, lines and depth of calls that one call of symjax enters.

    python -m benchmarks.walk [--paths] [--json FILE]

The numbers say how much code a reader follows from a call to its result:

files   files of symjax in which a function is entered
lines   lines of these files, docstrings included
deep    the largest number of functions of symjax on the stack at one time. Functions of
        jax between them do not count, nor do comprehensions and generators.

Each call is the first of its shape, so it traces everything. The arrays fit into one
block (B2 T8 N4 H8), attention is causal, and there is no mask. The call of the
Performer draws its projection. The layer is the attention layer of configs/diff_sym.py
(symmetric keys, two branches), already built.

--paths also prints the files, and the deepest path.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import symjax
from symjax import attention, config, layers

ROOT = Path(symjax.__file__).resolve().parent
PARTS = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")


class Walk(NamedTuple):
    """Code that a call enters."""

    files: list[str]
    lines: int
    path: list[str]  # the deepest stack, from the call on


def walk(call: Callable[[], Any]) -> Walk:
    """Return the code that a call enters, with the caches of jax cleared before it."""
    files: set[str] = set()
    deepest: list[str] = []

    def entered(frame: FrameType, event: str, _: Any) -> None:
        nonlocal deepest
        if event == "call" and _is_counted(frame.f_code):
            files.add(frame.f_code.co_filename)
            path, above = [], frame
            while above is not None:
                if _is_counted(above.f_code):
                    path.append(above.f_code.co_qualname)
                above = above.f_back
            if len(path) > len(deepest):
                deepest = path[::-1]

    jax.clear_caches()
    before = sys.getprofile()
    sys.setprofile(entered)
    try:
        call()
    finally:
        sys.setprofile(before)
    return Walk(sorted(files), sum(map(lines_of, files)), deepest)


def _is_counted(code: CodeType) -> bool:
    inside = code.co_filename.startswith(f"{ROOT}/")
    return inside and code.co_name not in PARTS


def lines_of(path: str | Path) -> int:
    return len(Path(path).read_text(encoding="utf-8").splitlines())


def calls() -> dict[str, Callable[[], Any]]:
    """Return the calls by name, without those whose function does not exist."""
    batch, length, heads, size, width = 2, 8, 4, 8, 32
    key = jax.random.key(0)
    q, k, v = jax.random.normal(key, (3, batch, length, heads, size))
    model = config.Model(
        width=width,
        heads=heads,
        length=length,
        vocabulary=16,
        attention=config.Attention(symmetric="plain", differential="v1"),
    )
    layer = layers.Attention(model, 0, rngs=nnx.Rngs(0))
    x = jnp.ones((batch, length, width))
    found = {
        "softmax": lambda: attention.softmax(q, k, v, is_causal=True),
        "differential": lambda: attention.differential(
            q, k, v[:, :, ::2], 0.5, is_causal=True
        ),
        "performer_causal": lambda: attention.performer_causal(
            q, k, v, attention.orthogonal_projection(key, 16, size)
        ),
        "layer": lambda: layer(x),
    }
    if delta := getattr(attention, "delta_causal", None):
        beta = jnp.full((batch, length, heads), 0.5)
        found["delta_causal"] = lambda: delta(q, k, v, beta)
    return found


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--paths", action="store_true", help="files and deepest path")
    parser.add_argument("--json", type=Path, help="also write the counts there")
    chosen = parser.parse_args(words)
    walks = {name: walk(call) for name, call in calls().items()}
    print(f"{'call':18}{'files':>6}{'lines':>7}{'deep':>6}")
    for name, (files, lines, path) in walks.items():
        print(f"{name:18}{len(files):>6}{lines:>7,}{len(path):>6}")
        if chosen.paths:
            print(f"    {', '.join(str(Path(x).relative_to(ROOT)) for x in files)}")
            print(f"    {' > '.join(path)}")
    if "delta_causal" not in walks:
        print("delta_causal      does not exist")
    whole = sorted(ROOT.rglob("*.py"))
    total = sum(map(lines_of, whole))
    print(f"{'all of symjax':18}{len(whole):>6}{total:>7,}")
    if chosen.json is not None:
        counts = {
            name: {"files": len(files), "lines": lines, "deep": len(path)}
            for name, (files, lines, path) in walks.items()
        }
        counts["symjax"] = {"files": len(whole), "lines": total}
        chosen.json.write_text(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
