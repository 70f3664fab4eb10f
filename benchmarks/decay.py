"""Decay in chunks against a scan over tokens: time on this machine.

    python benchmarks/decay.py [repeats]

Every size is timed in turn with its rivals, round after round, and the median of the
ratios of one round is reported, since another process may slow any moment of it.
Columns, for a decay a head and for one a channel: milliseconds in chunks of 64, and the
scan's time over that of the chunks; forward, and with the backward pass.
"""

import sys
import time
from functools import partial
from statistics import median

import jax
import jax.numpy as jnp

from symjax import attention

SIZES = ((1, 256, 4, 64), (1, 512, 4, 64), (1, 1024, 4, 64))  # B T N H


def arrays(batch: int, length: int, heads: int, size: int, channels: tuple[int, ...]):
    """Query, key, value and the log-decays of gates near 1."""
    shapes = 3 * [(batch, length, heads, size)] + [(batch, length, heads, *channels)]
    keys = jax.random.split(jax.random.key(0), 4)
    drawn = [jax.random.normal(*pair) for pair in zip(keys, shapes, strict=True)]
    return *drawn[:3], attention.gated_log_decay(drawn[3])


def by_token(query, key, value, log_decay):
    """The recurrence as it is written."""
    rates = jnp.exp(log_decay.reshape(*key.shape[:3], -1))

    def step(sums, now):
        query, key, value, rate = now
        sums = rate[..., None] * sums + key[..., None] * value[..., None, :]
        return sums, jnp.einsum("bnh,bnhv->bnv", query, sums)

    batch, _, heads, size = key.shape
    empty = jnp.zeros((batch, heads, size, value.shape[-1]))
    times = [jnp.moveaxis(x, 1, 0) for x in (query, key, value, rates)]
    return jnp.moveaxis(jax.lax.scan(step, empty, times)[1], 0, 1)


def timed(function, operands):
    """A call that runs a compiled function and gives the seconds."""
    compiled = jax.jit(function).lower(*operands).compile()

    def once() -> float:
        start = time.perf_counter()
        jax.block_until_ready(compiled(*operands))
        return time.perf_counter() - start

    once()
    return once


def gradient(attend):
    def loss(*operands):
        return jnp.square(attend(*operands)).sum()

    return jax.grad(loss, (0, 1, 2, 3))


def main(repeats: int = 15) -> None:
    chunked = partial(attention.decay_causal, chunk_size=64)
    print("sizes B T N H      decay          ms  scan/chunks       ms  scan/chunks")
    for shape in SIZES:
        for kind, channels in (("head", ()), ("channel", shape[3:])):
            operands = arrays(*shape, channels)
            rivals = [timed(attend, operands) for attend in (chunked, by_token)]
            rivals += [
                timed(gradient(attend), operands) for attend in (chunked, by_token)
            ]
            rounds = [[rival() for rival in rivals] for _ in range(repeats)]
            columns = ""
            for chunks in (0, 2):
                ms = 1000 * median(times[chunks] for times in rounds)
                ratio = median(times[chunks + 1] / times[chunks] for times in rounds)
                columns += f"{ms:>9.2f}{ratio:>13.2f}"
            print(f"{str(shape):18} {kind:8} {columns}", flush=True)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
