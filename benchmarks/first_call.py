"""Processor time of the first call of each mechanism, and program sizes.

    python -m benchmarks.first_call [--only softmax,gla] [--rounds 3] [--lines]
    python -m benchmarks.first_call --target h200-1 --rounds 1

Each call is the gradient of the sum of squares of causal attention at [1, 1024, 8, 64]
in float32, with respect to query, key and value, and to gates where there are any. It
is compiled for the CPU, also on a machine with an accelerator. Differential attention
has four heads with two branches of 64 and values of 128. "decay" has a gate per token
and head, "retention" a constant per head, and "gla" a gate per token and channel.

--target compiles for one chip of a machine that need not be present, in bfloat16. The
compiler for TPUs is in the package jax[tpu], the compiler for GPUs in jax[cuda13].
Without a GPU no kernel is tuned, so a first call on a GPU takes longer than this.

trace, lower, compile   seconds of processor time, summed over threads and over the
                        assemblers that a compiler starts; medians of the rounds
ratio                   the sum of these three over that of
                        `jax.nn.dot_product_attention` in the same rounds
lines                   lines of StableHLO of the gradient

All calls run in one process after one call of the reference that is not counted, so
that imports of jax are not measured. With --rounds 1 the first call of a kind of kernel
also imports its module. The caches of jax are cleared before each call, and the
cache of compiled programs on disk is off. --lines prints the lines alone and compiles
nothing.
"""

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from benchmarks.arguments import positive
from symjax import attention
from symjax.estimate import targets

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


def retention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    log_decay = attention.retention_log_decay(HEADS)
    return attention.decay_causal(query, key, value, log_decay)


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
    "decay": Call(attention.decay_causal, (TOKENS, TOKENS, TOKENS, TOKENS[:3])),
    "retention": Call(retention),
}


def gradient(
    name: str, place: Sharding | None = None
) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """Return the jitted gradient of a call, and the shapes of its arguments.

    Args:
        place: where the arguments of a target are; None: on the CPU.
    """
    attend, shapes = CALLS[name]

    def loss(*arrays: jax.Array) -> jax.Array:
        return jnp.square(attend(*arrays)).sum()

    dtype = jnp.bfloat16 if place else jnp.float32
    arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape in shapes]
    return jax.jit(jax.grad(loss, tuple(range(len(shapes))))), arrays


def lines(name: str, place: Sharding | None = None) -> int:
    """Count the lines of StableHLO of the gradient."""
    graded, arrays = gradient(name, place)
    return graded.lower(*arrays).as_text().count("\n")


def cost(name: str, place: Sharding | None = None) -> Cost:
    """Measure the first call of the gradient."""
    graded, arrays = gradient(name, place)
    jax.clear_caches()
    began = processor_time()
    traced = graded.trace(*arrays)
    after_trace = processor_time()
    lowered = traced.lower()
    after_lower = processor_time()
    lowered.compile()
    after_compile = processor_time()
    return Cost(
        after_trace - began, after_lower - after_trace, after_compile - after_lower
    )


def processor_time() -> float:
    """Return the seconds of this process and of the processes that it waited for."""
    return sum(os.times()[:4])


def main(words: list[str]) -> None:
    chosen = parse(words)
    target, place = chosen.target, None
    print(f"jax {jax.__version__}, {target.name if target else jax.default_backend()}")
    if target:
        place = target.one_device()
    # The mesh selects the platform that attention is traced for.
    with jax.set_mesh(place.mesh) if place else nullcontext():
        if chosen.lines:
            for name in chosen.only:
                print(f"{name:14}{lines(name, place):>7,}", flush=True)
        else:
            measure(chosen.only, chosen.rounds, place)


def measure(only: list[str], rounds: int, place: Sharding | None) -> None:
    """Print the medians of each call and of the reference."""
    cost(REFERENCE, place)
    names = [REFERENCE, *(x for x in only if x != REFERENCE)]
    measured: dict[str, list[Cost]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            measured[name].append(cost(name, place))
    reference = median(sum(x) for x in measured[REFERENCE])
    columns = (*Cost._fields, "ratio", "lines")
    print(f"{'':14}" + "".join(f"{x:>9}" for x in columns))
    for name, costs in measured.items():
        parts = [median(x) for x in zip(*costs, strict=True)]
        ratio = median(sum(x) for x in costs) / reference
        cells = "".join(f"{x:>9.2f}" for x in (*parts, ratio))
        print(f"{name:14}{cells}{lines(name, place):>9,}")


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", type=names_of_calls, default=list(CALLS), help="names between commas"
    )
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--lines", action="store_true", help="only count lines")
    parser.add_argument("--target", help="v5e-4, h200-1 … (default: the CPU)")
    chosen = parser.parse_args(words)
    try:
        chosen.target = chosen.target and targets.find(chosen.target)
    except ValueError as error:
        parser.error(str(error))
    return chosen


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
