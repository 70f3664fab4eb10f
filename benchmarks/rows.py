"""Time of attention by row blocks beside attention by the whole map.

    python benchmarks/rows.py [rounds]

Times are of forward + backward on this machine. Columns:

ms                    softmax by row blocks
softmax               time by the whole map divided by time by row blocks
differential          the same for differential attention
differential/softmax  both by row blocks, at equal parameters: differential attention
                      has half as many heads, with values twice as wide
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
from turns import in_turn, milliseconds, ratio

from symjax import attention

SIZES = ((32, 300, 8, 32), (4, 1024, 8, 64), (1, 4096, 8, 64))  # B T N H of softmax


def arrays(batch: int, length: int, heads: int, size: int, branches: int):
    """Draw query, key and value; their size does not depend on the branches."""
    values = heads // branches, size * branches
    shapes = (heads, size), (heads, size), values
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(
        jax.random.normal(key, (batch, length, *shape))
        for key, shape in zip(keys, shapes, strict=True)
    )


def gradient(attend, operands):
    """Return a function that runs the gradient of the sum of squares."""

    def loss(*operands):
        return jnp.square(attend(*operands, is_causal=True)).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*operands).compile()
    return lambda: jax.block_until_ready(compiled(*operands))


def main(rounds: int = 15) -> None:
    print("sizes B T N H        ms   softmax  differential  differential/softmax")
    for shape in SIZES:
        one, two = arrays(*shape, branches=1), arrays(*shape, branches=2)
        softmax = attention.softmax
        differential = partial(attention.differential, lam=0.5)
        rows = {
            "softmax": gradient(softmax, one),
            "differential": gradient(differential, two),
        }
        # Before calls with whole maps: after them, memory must be allocated again.
        times = in_turn(rows, rounds)
        columns = [ratio(times, "differential", "softmax")]
        for name, form, operands in (
            ("differential", differential, two),
            ("softmax", softmax, one),
        ):
            whole = gradient(partial(form, implementation="whole"), operands)
            both = in_turn({"rows": rows[name], "whole": whole}, rounds)
            columns.insert(0, ratio(both, "whole", "rows"))
        print(f"{str(shape):18} {milliseconds(times, 'softmax'):>8.2f}", end="")
        print("".join(f"{x:>10.2f}" for x in columns), flush=True)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
