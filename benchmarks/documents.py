"""Cost of separate documents: time of a training step beside joined documents.

    python -m benchmarks.documents      # gpt, diff_sym, performer, delta
    python -m benchmarks.documents gpt,gla --length 512

Prints, for each configuration at `:tiny`, the seconds of a step with joined and with
separate documents, and separate / joined. Times are medians of interleaved steps on all
devices of this machine.
"""

import argparse
import importlib
import statistics
import sys
import time
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # configs are not installed

from symjax import validation
from symjax.data.documents import SegmentedTokens
from symjax.training.sharding import make_mesh
from symjax.training.step import build_program

DOCUMENTS = 4  # per row


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    usual = "gpt,diff_sym,performer,delta"
    parser.add_argument(
        "names", nargs="?", default=usual, help="configurations, between commas"
    )
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--rounds", type=int, default=20)
    chosen = parser.parse_args(words)
    for name in chosen.names.split(","):
        joined, separate = seconds(name, chosen.length, chosen.rounds)
        ratio = separate / joined
        print(
            f"{name:<12} joined {joined:.4f} s, separate {separate:.4f} s: {ratio:.3f}"
        )


def seconds(name: str, length: int, rounds: int) -> list[float]:
    """Return the seconds of a step with joined and with separate documents."""
    tree = importlib.import_module(f"configs.{name}").get_config("tiny")
    tree.model.update(vocabulary=256, length=length)
    options = validation.from_dict(tree.to_dict())
    program = build_program(options, make_mesh(options.mesh))
    shape = options.batch_size, length
    tokens = np.random.default_rng(0).integers(0, 256, shape).astype(np.int32)
    ids = np.broadcast_to(np.arange(length) * DOCUMENTS // length, shape)
    times: tuple[list[float], list[float]] = [], []
    state, constants = program.initial(0)
    for turn in range(2 * rounds + 2):
        separate = turn % 2
        inputs = SegmentedTokens(tokens, ids.astype(np.int32)) if separate else tokens
        whole = (inputs, tokens)
        rows = program.place(
            shape, lambda i, j, x=whole: jax.tree.map(lambda y: y[i:j], x)
        )
        began = time.perf_counter()
        with jax.set_mesh(program.mesh):
            state, _ = program.train(state, constants, *rows, jax.random.key(0))
        jax.block_until_ready(state)
        if turn > 1:  # the first step of each kind compiles
            times[separate].append(time.perf_counter() - began)
    return [statistics.median(x) for x in times]


if __name__ == "__main__":
    main(sys.argv[1:])
