"""Row blocks against the whole map: time of forward and backward on this machine.

    python benchmarks/rows.py [repeats]

Every size is timed in turn with its rivals, round after round, and the median of the
ratios of one round is reported, since another process may slow any moment of it.
Columns: whole/rows of softmax, whole/rows of differential attention, and differential
over softmax at equal parameters (half the heads, values twice as wide), both by rows.
"""

import sys
import time
from functools import partial
from statistics import median

import jax
import jax.numpy as jnp

from symjax import attention

SIZES = ((32, 300, 8, 32), (16, 300, 16, 16), (1, 2048, 4, 64))  # B T N H of softmax


def arrays(batch: int, length: int, heads: int, size: int, branches: int):
    """Query, key and value of as many parameters whatever the branches."""
    values = heads // branches, size * branches
    shapes = (heads, size), (heads, size), values
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(
        jax.random.normal(key, (batch, length, *shape))
        for key, shape in zip(keys, shapes, strict=True)
    )


def timed(attend, operands):
    """A call that runs the gradient of the sum of squares and gives the seconds."""

    def loss(*operands):
        return jnp.square(attend(*operands, is_causal=True)).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*operands).compile()

    def once() -> float:
        start = time.perf_counter()
        jax.block_until_ready(gradient(*operands))
        return time.perf_counter() - start

    once()
    return once


def main(repeats: int = 15) -> None:
    print("sizes B T N H        ms   softmax  differential  differential/softmax")
    for shape in SIZES:
        one, two = arrays(*shape, branches=1), arrays(*shape, branches=2)
        whole = {"implementation": "whole"}
        softmax = attention.softmax
        differential = partial(attention.differential, lam=0.5)
        rivals = (
            timed(softmax, one),
            timed(partial(softmax, **whole), one),
            timed(differential, two),
            timed(partial(differential, **whole), two),
        )
        rounds = [[rival() for rival in rivals] for _ in range(repeats)]
        columns = (
            1000 * median(a for a, _, _, _ in rounds),
            median(b / a for a, b, _, _ in rounds),
            median(d / c for _, _, c, d in rounds),
            median(c / a for a, _, c, _ in rounds),
        )
        ms, *ratios = (f"{column:.2f}" for column in columns)
        print(f"{str(shape):18} {ms:>8}" + "".join(f"{x:>10}" for x in ratios))


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
