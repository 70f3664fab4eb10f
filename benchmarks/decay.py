"""Time of `decay_causal`, which runs in chunks, beside a scan over single tokens.

    python benchmarks/decay.py [rounds]

There is a row for decays per head and one for decays per channel. Columns, forward and
then forward + backward: milliseconds in chunks of 64 tokens, and the time of the scan
divided by the time of the chunks. Above 1 chunks are faster.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
from turns import in_turn, milliseconds, ratio

from symjax import attention

SIZES = ((1, 256, 4, 64), (1, 512, 4, 64), (1, 1024, 4, 64))  # B T N H


def arrays(batch: int, length: int, heads: int, size: int, channels: tuple[int, ...]):
    """Draw query, key, value, and log-decays of gates near 1."""
    shapes = 3 * [(batch, length, heads, size)] + [(batch, length, heads, *channels)]
    keys = jax.random.split(jax.random.key(0), 4)
    drawn = [jax.random.normal(*pair) for pair in zip(keys, shapes, strict=True)]
    return *drawn[:3], attention.gated_log_decay(drawn[3])


def by_token(query, key, value, log_decay):
    """Run the recurrence token by token."""
    rates = jnp.exp(log_decay.reshape(*key.shape[:3], -1))

    def step(sums, now):
        query, key, value, rate = now
        sums = rate[..., None] * sums + key[..., None] * value[..., None, :]
        return sums, jnp.einsum("bnh,bnhv->bnv", query, sums)

    batch, _, heads, size = key.shape
    empty = jnp.zeros((batch, heads, size, value.shape[-1]))
    times = [jnp.moveaxis(x, 1, 0) for x in (query, key, value, rates)]
    return jnp.moveaxis(jax.lax.scan(step, empty, times)[1], 0, 1)


def compiled(function, operands):
    """Return a function that runs the compiled program to its end."""
    program = jax.jit(function).lower(*operands).compile()
    return lambda: jax.block_until_ready(program(*operands))


def gradient(attend):
    """Return the gradient of the sum of squares of the output."""

    def loss(*operands):
        return jnp.square(attend(*operands)).sum()

    return jax.grad(loss, (0, 1, 2, 3))


def main(rounds: int = 15) -> None:
    chunked = partial(attention.decay_causal, chunk_size=64)
    print("sizes B T N H      decay          ms  scan/chunks       ms  scan/chunks")
    for shape in SIZES:
        for kind, channels in (("head", ()), ("channel", shape[3:])):
            operands, columns = arrays(*shape, channels), ""
            for form in (lambda attend: attend, gradient):
                forms = {"chunks": form(chunked), "scan": form(by_token)}
                rivals = {x: compiled(y, operands) for x, y in forms.items()}
                times = in_turn(rivals, rounds)
                columns += f"{milliseconds(times, 'chunks'):>9.2f}"
                columns += f"{ratio(times, 'scan', 'chunks'):>13.2f}"
            print(f"{str(shape):18} {kind:8} {columns}", flush=True)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
