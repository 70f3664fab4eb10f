"""Errors of causal linear-time attention that multiplies bfloat16 or TF32 operands.

    python benchmarks/precision.py [--length 256]

It runs on the CPU, with interpreted kernels, on normally distributed inputs of head
size 64. An error is ‖found − wanted‖ / ‖wanted‖ against float64 of unrounded inputs.
Each cell has two errors, each with its ratio to the column `least`: the error of the
output, and that of the gradient with the largest ratio. Gradients are those of a random
weighted sum of the output. First the Performer, with columns

least    float64 on inputs rounded to bfloat16, with a rounded result: the lower bound
         for any choice of products
float32  products of float32 operands, on the rounded inputs
kernel   the TPU kernel: products of bfloat16 operands, summed in float32, with the
         projection split into two bfloat16 parts
tf32     chunks on a GPU, whose tensor cores round operands to 11 bits
rows     the kernel with a projection that is only rounded to bfloat16

Then cosine attention, and the delta rule with unit keys and β between 0 and 1, whose
sums cancel:

six      chunks on a GPU: sums that cancel take six products of bfloat16 parts, all
         other products are TF32
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from symjax import attention
from symjax.attention import random_features
from symjax.attention.core import products
from symjax.attention.core.devices import lowered_for
from symjax.attention.core.feature_maps import FeatureParameters
from symjax.attention.core.operands import Tokens
from symjax.attention.kernels.tpu.recurrent import TpuFeatures
from symjax.attention.random_features import RANDOM_FEATURES
from symjax.attention.recurrent.engine import InXla
from symjax.attention.recurrent.normalised import Normalised

HEADS, SIZE, FEATURES = 2, 64, 256
SCALES = 0.5, 1, 2, 4, 8
Arrays = list[np.ndarray]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=256)
    length = parser.parse_args(words).length
    rows = attention.orthogonal_projection(jax.random.key(0), FEATURES, SIZE)
    rows = np.asarray(rows, np.float64)
    names = "least", "float32", "kernel", "tf32", "rows"
    print(f"{'output, gradients':<18}" + "".join(f"{x:>36}" for x in names))
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(1, length, HEADS, SIZE)) for _ in range(4)]
    for scale in SCALES:
        scaled = [scale * arrays[0], scale * arrays[1], arrays[2]]
        show(f"inputs × {scale:<9g}", errors(rows, scaled, arrays[3]))
    print(f"\n{'output, gradients':<18}{'least':>36}{'float32':>36}{'six':>36}")
    arrays[1] /= np.linalg.norm(arrays[1], axis=-1, keepdims=True)
    for name, attend in (("cosine", cosine), ("delta", delta)):
        show(f"{name:<18}", cancelling(attend, arrays[:3], arrays[3]))
    return 0


def show(name: str, found: dict) -> None:
    cells = [cell(x, found["least"]) for x in found.values()]
    print(name + "".join(f"{x:>36}" for x in cells), flush=True)


def cell(error: list[float], least: list[float]) -> str:
    """Return the errors of the output and of the gradient with the largest ratio."""
    ratios = [a / b for a, b in zip(error, least, strict=True)]
    worst = max(range(1, 4), key=lambda i: ratios[i])
    parts = [f"{error[i]:.1e} ({ratios[i]:.2f})" for i in (0, worst)]
    return ", ".join(parts)


def errors(rows: np.ndarray, arrays: Arrays, weigh: np.ndarray) -> dict:
    half, wide, single = roundings(*arrays, weigh)
    wanted = graded(scan, rows, arrays, weigh)
    coarse = rows.astype(jnp.bfloat16)
    found = {
        "least": graded(scan, rows, wide[:3], wide[3]),
        "float32": graded(scan, rows.astype("f4"), single[:3], single[3]),
        "kernel": graded(kernel, rows.astype("f4"), half[:3], half[3]),
        "tf32": graded(as_on_a_gpu(scan), rows.astype("f4"), half[:3], half[3]),
        "rows": graded(kernel, coarse.astype("f4"), half[:3], half[3]),
    }
    return distances(found, wanted)


def cancelling(attend: Callable, arrays: Arrays, weigh: np.ndarray) -> dict:
    half, wide, single = roundings(*arrays, weigh)
    found = {
        "least": graded(attend, None, wide[:3], wide[3]),
        "float32": graded(attend, None, single[:3], single[3]),
        "six": graded(as_on_a_gpu(attend), None, half[:3], half[3]),
    }
    return distances(found, graded(attend, None, arrays, weigh))


def roundings(*arrays: np.ndarray) -> tuple[Arrays, Arrays, Arrays]:
    """Return the arrays rounded to bfloat16: in bfloat16, in float64 and in float32."""
    half = [np.asarray(x, jnp.bfloat16) for x in arrays]
    wide, single = ([x.astype(kind) for x in half] for kind in ("f8", "f4"))
    return half, wide, single


def distances(found: dict, wanted: Arrays) -> dict:
    return {
        name: [
            distance(a.astype(jnp.bfloat16), b) for a, b in zip(x, wanted, strict=True)
        ]
        for name, x in found.items()
    }


def cosine(rows: None, *arrays: Any) -> Any:
    return attention.cosine_causal(*arrays)


def delta(rows: None, query: Any, key: Any, value: Any) -> Any:
    beta = np.random.default_rng(1).uniform(size=query.shape[:3]).astype("f4")
    return attention.delta_causal(query, key, value, beta)


def scan(rows: Any, *arrays: Any) -> Any:
    query, key, value = arrays
    return attention.performer_causal(query, key, value, rows, chunk_size=128)


def as_on_a_gpu(attend: Callable) -> Callable:
    """Round the operands of all products as the tensor cores of a GPU do.

    The chunks are those of accelerators, because chunks on a CPU take float32 products
    of 16-bit arrays. The platform is in the key of jax's caches, so no column takes the
    program of another one.
    """

    def called(rows: Any, *arrays: Any) -> Any:
        with (
            lowered_for("cuda"),
            mock.patch.object(products, "in_three_passes", partial(product, 1)),
            mock.patch.object(products, "in_six_passes", partial(product, 6)),
            mock.patch.object(random_features, "in_six_passes", partial(product, 6)),
            mock.patch.object(jax.lax, "custom_linear_solve", linear_solve),
        ):
            return attend(rows, *arrays)

    return called


def linear_solve(
    times: Callable, right: jax.Array, solve: Callable, _: Callable
) -> jax.Array:
    """Solve times(x) = right, with the gradient of `jax.lax.custom_linear_solve`.

    jax's function cannot transpose `pair`.
    """
    found = times(jax.lax.stop_gradient(solve(times, right)))
    return solve(times, right + jax.lax.stop_gradient(found) - found)


def product(passes: int, subscripts: str, *arrays: jax.Array) -> jax.Array:
    """Multiply two arrays or, from the left, three."""
    if len(arrays) == 3:  # ij,jk,kl->il
        left, right = "...ij,...jk->...ik", "...ik,...kl->...il"
        return pair(passes, right, pair(passes, left, *arrays[:2]), arrays[2])
    return pair(passes, subscripts, *arrays)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def pair(passes: int, subscripts: str, one: jax.Array, two: jax.Array) -> jax.Array:
    """Multiply in TF32 (one pass) or in bfloat16 parts (six), summed in float32.

    The products of the gradient are rounded in the same way.
    """
    return sum(jnp.einsum(subscripts, *x) for x in parts(passes, one, two))


def pair_forward(passes: int, subscripts: str, *arrays: jax.Array) -> tuple:
    return pair(passes, subscripts, *arrays), arrays


def pair_backward(passes: int, subscripts: str, arrays: tuple, change: Any) -> tuple:
    def gradient(i: int) -> jax.Array:
        def by(change: jax.Array, other: jax.Array) -> jax.Array:
            operands = (other, arrays[1]) if i else (arrays[0], other)
            _, pull = jax.vjp(partial(jnp.einsum, subscripts), *operands)
            return pull(change)[i]

        return sum(by(*x) for x in parts(passes, change, arrays[1 - i]))

    return gradient(0), gradient(1)


pair.defvjp(pair_forward, pair_backward)


def parts(passes: int, one: jax.Array, two: jax.Array) -> list:
    """Return pairs to multiply: one in TF32, or the six largest of bfloat16 parts."""
    if passes == 1:
        return [[jax.lax.reduce_precision(x, 8, 10) for x in (one, two)]]
    (a, b, c), (d, e, f) = (bfloat16_parts(x) for x in (one, two))
    return [[a, d], [a, e], [b, d], [b, e], [a, f], [c, d]]


def bfloat16_parts(x: jax.Array) -> list[jax.Array]:
    """Split an array into three parts of 8 bits, whose sum has its float32 digits."""
    found = []
    for _ in range(3):
        found.append(jax.lax.reduce_precision(x, 8, 7))
        x = x - found[-1]
    return found


def kernel(rows: Any, *arrays: Any) -> Any:
    """Run the interpreted TPU kernel of the Performer."""
    recurrence = Normalised(RANDOM_FEATURES["positive"])
    random = FeatureParameters(rows, jnp.float32(SIZE**-0.5))
    fallback = InXla(recurrence, 128)
    return TpuFeatures(recurrence, True).attend(Tokens(*arrays), random, fallback)


def graded(attend: Callable, rows: Any, arrays: Arrays, weigh: np.ndarray) -> Arrays:
    """Return the output, and the gradients of its product with `weigh`."""

    @jax.jit
    def both(rows, weigh, *arrays):
        output, pull = jax.vjp(partial(attend, rows), *arrays)
        return output, *pull(weigh)

    with jax.enable_x64(arrays[0].dtype == np.float64):
        return [np.asarray(x) for x in both(rows, weigh, *arrays)]


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    difference = np.linalg.norm(found.astype(np.float64) - wanted)
    return float(difference / np.linalg.norm(wanted))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
