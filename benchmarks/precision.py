"""What bfloat16 costs attention of linear time: errors by choice of the products.

    python benchmarks/precision.py [--only performer] [--length 256]

On the CPU, with normal inputs. Errors are ‖found − wanted‖ / ‖wanted‖, of the output,
and the largest of the gradients of a random sum of it:

inputs     float64 with inputs rounded to bfloat16, against inputs that are not: what
           the rounding of the inputs alone causes, whatever comes after
result     float64 with the result rounded to bfloat16, the least of any choice
float32    products of float32 (inputs rounded, as in all that follow)
shipped    bfloat16 inputs as they are taken: where products are of bfloat16 operands
           they are summed in float32, and exponents are exact
exponents  the same with the rows of the projection rounded to bfloat16 too: an error in
           an exponent is a factor in the feature

The last three are against float64 with the same rounded inputs, and round their result.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from symjax import attention

HEADS, SIZE, FEATURES, CHUNK = 1, 64, 256, 128
Arrays = list[np.ndarray]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="part of a name")
    parser.add_argument("--length", type=int, default=256)
    chosen = parser.parse_args(words)
    names = "inputs", "result", "float32", "shipped", "exponents"
    print(f"{'output, gradients':<28}" + "".join(f"{x:>20}" for x in names))
    for name, attend, arrays in cases(chosen.length):
        if chosen.only in name:
            row = [f"{a:.1e}, {b:.1e}" for a, b in errors(attend, arrays)]
            print(f"{name:<28}" + "".join(f"{x:>20}" for x in row), flush=True)
    return 0


def cases(length: int) -> Iterator[tuple[str, Callable, Arrays]]:
    """A name, a function of (projection, *arrays), and the arrays in float64."""
    rng = np.random.default_rng(0)
    shape = (1, length, HEADS, SIZE)
    query, key, value = (rng.normal(size=shape) for _ in range(3))
    gates = rng.normal(size=shape)
    unit = key / np.linalg.norm(key, axis=-1, keepdims=True)
    beta = 1 / (1 + np.exp(-gates[..., 0]))

    def plain(function: Callable, **options: Any) -> Callable:
        bound = partial(function, chunk_size=CHUNK, **options)
        return lambda projection, *arrays: bound(*arrays)

    for scale in (0.5, 1, 2, 4, 8):
        arrays = [scale * query, scale * key, value]
        yield f"performer, inputs × {scale:g}", performer, arrays
    for features in ("elu", "relu", "taylor"):
        form = plain(attention.linear_causal, features=features)
        yield f"linear, {features}", form, [query, key, value]
    yield "cosine", plain(attention.cosine_causal), [query, key, value]
    decay = np.asarray(attention.retention_log_decay(HEADS))
    form = plain(attention.decay_causal, log_decay=decay)
    yield "decay, constant", form, [query, key, value]
    fade = plain(gated)
    yield "decay, a gate a head", fade, [query, key, value, gates[..., 0]]
    yield "decay, a gate a channel", fade, [query, key, value, gates]
    yield "delta", plain(attention.delta_causal), [query, unit, value, beta]


def performer(projection: Any, query: Any, key: Any, value: Any) -> Any:
    given = query, key, value, projection
    return attention.performer_causal(*given, chunk_size=CHUNK)


def gated(query: Any, key: Any, value: Any, logits: Any, **options: Any) -> Any:
    log_decay = attention.gated_log_decay(logits)
    return attention.decay_causal(query, key, value, log_decay, **options)


def errors(attend: Callable, arrays: Arrays) -> Iterator[tuple[float, float]]:
    rows = attention.orthogonal_projection(jax.random.key(0), FEATURES, SIZE)
    rows = np.asarray(rows, np.float64)
    half = [np.asarray(x, jnp.bfloat16) for x in arrays]
    wide = [x.astype(np.float64) for x in half]
    single = [x.astype(np.float32) for x in half]
    original, wanted = graded(attend, rows, arrays), graded(attend, rows, wide)
    yield distance(wanted, original)
    yield distance(rounded(wanted), wanted)
    yield distance(rounded(graded(attend, rows.astype("f4"), single)), wanted)
    for projection in (rows, rows.astype(jnp.bfloat16)):
        found = graded(attend, projection.astype("f4"), half)
        yield distance(rounded(found), wanted)


def graded(attend: Callable, rows: np.ndarray, arrays: Arrays) -> Arrays:
    """The output, and the gradients of a random sum of it."""
    weigh = np.random.default_rng(1).normal(size=arrays[2].shape)
    weigh = weigh.astype(jnp.bfloat16).astype(arrays[2].dtype)

    @jax.jit
    def both(weigh, rows, *arrays):
        output, pull = jax.vjp(partial(attend, rows), *arrays)
        return output, *pull(weigh)

    with jax.enable_x64(arrays[0].dtype == np.float64):
        return [np.asarray(x) for x in both(weigh, rows, *arrays)]


def rounded(arrays: Arrays) -> Arrays:
    return [x.astype(jnp.bfloat16) for x in arrays]


def distance(found: Arrays, wanted: Arrays) -> tuple[float, float]:
    output, *gradients = (
        float(np.linalg.norm(np.float64(a) - np.float64(b)) / np.linalg.norm(b))
        for a, b in zip(found, wanted, strict=True)
    )
    return output, max(gradients)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
