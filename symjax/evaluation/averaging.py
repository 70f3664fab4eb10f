"""Where growing scores hurt: an average of n values by softmax attention.

Log-n scaling multiplies scores by log n / log base, so that a row that looks at a few
keys still does so among more of them. A row that should give every key the same has
only noise in its scores, and scaling makes the noise larger: with scores from N(0, σ²)
and c = log n / log base the weights have Σ w² ≈ exp(c²σ²)/n, so that the average of n
values of variance 1 is off by √((exp(c²σ²) − 1)/n).
"""

import jax
import jax.numpy as jnp
import numpy as np

from symjax import attention
from symjax.evaluation.finding import Table

EXAMPLES = 256
SPREAD = 0.5  # σ of the scores, which should all be equal


def averages(lengths: list[int], base: float, seed: int) -> list[dict[str, float]]:
    """Errors of the average and of the majority of n values ±1, scaling off and on.

    Errors are root mean squares, in units of 1/√n, the spread of the true average:
    1 is as bad as giving one in two values no weight.
    """
    rows = []
    for n in lengths:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), n))
        key = SPREAD * jax.random.normal(keys[0], (EXAMPLES, n, 1, 1))
        value = jax.random.rademacher(keys[1], key.shape, key.dtype)
        true = np.asarray(value, np.float64).mean(axis=(1, 2, 3))
        row: dict[str, float] = {"n": n}
        for name, length_base in (("off", None), ("on", base)):
            query = jnp.ones((EXAMPLES, 1, 1, 1))
            found = attention.softmax(
                query, key, value, scale=1.0, length_base=length_base
            )
            found = np.asarray(found, np.float64)[:, 0, 0, 0]
            error = np.sqrt(n * np.mean((found - true) ** 2))
            clear = true != 0
            wrong = np.sign(found[clear]) != np.sign(true[clear])
            row |= {f"average_{name}": float(error)}
            row |= {f"majority_{name}": float(wrong.mean())}
        rows.append(row)
    return rows


def averaging_table(rows: list[dict[str, float]]) -> Table:
    columns = ("n", "average, off", "majority, off", "average, on", "majority, on")
    return Table("averaging", columns, [tuple(row.values()) for row in rows])
