"""Processor time of the first call of each mechanism on a CPU, and program sizes.

    python -m benchmarks.first_call [--only softmax,gla] [--rounds 3] [--lines]

Each call is the gradient of the sum of squares of causal attention at [1, 1024, 8, 64]
in float32, with respect to query, key and value, and to gates where there are any.
Differential attention has four heads with two branches of 64 and values of 128.

trace, lower, compile   seconds of processor time, summed over threads; medians of the
                        rounds
ratio                   the sum of these three over that of
                        `jax.nn.dot_product_attention` in the same rounds
lines                   lines of StableHLO of the gradient

All calls run in one process after one call of the reference that is not counted, so
that imports are not measured. The caches of jax are cleared before each call, and the
cache of compiled programs on disk is off. --lines prints the lines alone and compiles
nothing.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import NamedTuple

import jax
import jax.numpy as jnp

from symjax import attention

BATCH, LENGTH, HEADS, SIZE, FEATURES = 1, 1024, 8, 64, 256
TOKENS = BATCH, LENGTH, HEADS, SIZE
PAIRS = BATCH, LENGTH, HEADS // 2, 2 * SIZE  # values of differential attention
REFERENCE = "jax.nn"


class Call(NamedTuple):
    """A mechanism, and the shapes of its arrays. Gradients are with respect to all."""

    attend: Callable
    shapes: tuple[tuple[int, ...], ...] = (TOKENS, TOKENS, TOKENS)


class Cost(NamedTuple):
    """Seconds of processor time of a first call."""

    trace: float
    lower: float
    compile: float


def performer_causal(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Call the Performer with a constant projection, so that none is drawn."""
    projection = jnp.ones((FEATURES, SIZE))
    return attention.performer_causal(query, key, value, projection)


def causal(attend: Callable, **options: float) -> Callable:
    return partial(attend, is_causal=True, **options)


CALLS = {
    REFERENCE: Call(causal(jax.nn.dot_product_attention)),
    "softmax": Call(causal(attention.softmax)),
    "differential": Call(
        causal(attention.differential, lam=0.5), (TOKENS, TOKENS, PAIRS)
    ),
    "cosine": Call(attention.cosine_causal),
    "performer": Call(performer_causal),
    "gla": Call(attention.decay_causal, (TOKENS,) * 4),
    "delta": Call(attention.delta_causal, (TOKENS, TOKENS, TOKENS, TOKENS[:3])),
    "sparsemax": Call(causal(attention.sparsemax)),
    "entmax15": Call(causal(attention.entmax15)),
    "linear": Call(attention.linear_causal),
    "retention": Call(attention.decay_causal, (TOKENS, TOKENS, TOKENS, TOKENS[:3])),
}


def gradient(name: str) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """Return the jitted gradient of a call, and the shapes of its arguments."""
    attend, shapes = CALLS[name]

    def loss(*arrays: jax.Array) -> jax.Array:
        return jnp.square(attend(*arrays)).sum()

    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(jax.grad(loss, tuple(range(len(shapes))))), arrays


def lines(name: str) -> int:
    """Count the lines of StableHLO of the gradient."""
    graded, arrays = gradient(name)
    return graded.lower(*arrays).as_text().count("\n")


def cost(name: str) -> Cost:
    """Measure the first call of the gradient."""
    graded, arrays = gradient(name)
    jax.clear_caches()
    began = time.process_time()
    traced = graded.trace(*arrays)
    after_trace = time.process_time()
    lowered = traced.lower()
    after_lower = time.process_time()
    lowered.compile()
    after_compile = time.process_time()
    return Cost(
        after_trace - began, after_lower - after_trace, after_compile - after_lower
    )


def main(words: list[str]) -> None:
    chosen = parse(words)
    print(f"jax {jax.__version__}, {jax.default_backend()}")
    if chosen.lines:
        for name in chosen.only:
            print(f"{name:14}{lines(name):>7,}", flush=True)
        return
    cost(REFERENCE)
    names = [REFERENCE, *(x for x in chosen.only if x != REFERENCE)]
    measured: dict[str, list[Cost]] = {name: [] for name in names}
    for _ in range(chosen.rounds):
        for name in names:
            measured[name].append(cost(name))
    reference = median(sum(x) for x in measured[REFERENCE])
    columns = (*Cost._fields, "ratio", "lines")
    print(f"{'':14}" + "".join(f"{x:>9}" for x in columns))
    for name, costs in measured.items():
        parts = [median(x) for x in zip(*costs, strict=True)]
        ratio = median(sum(x) for x in costs) / reference
        cells = "".join(f"{x:>9.2f}" for x in (*parts, ratio))
        print(f"{name:14}{cells}{lines(name):>9,}")


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", type=names_of_calls, default=list(CALLS), help="names between commas"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lines", action="store_true", help="only count lines")
    return parser.parse_args(words)


def names_of_calls(word: str) -> list[str]:
    """Return names between commas, all of them known."""
    names = word.split(",")
    if unknown := [x for x in names if x not in CALLS]:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown)}: choose from {', '.join(CALLS)}"
        )
    return names


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    main(sys.argv[1:])
