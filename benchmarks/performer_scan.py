"""Time of the causal Performer, which runs in chunks, beside a scan over tokens.

    python benchmarks/performer_scan.py [rounds]

The scan is our version of the algorithm of google-research's fast_attention. A scan
over tokens computes prefix sums, and its gradient is a second scan that subtracts the
terms again. Features are divided by their maximum over all tokens, so later tokens
change earlier rows; in `performer_causal` they do so by rounding at most. Inputs are
one row with four heads of size 64.

`bare` is a lower bound for chunks in XLA: the same matrix products, with exponentials
that subtract no maximum (they overflow unless inputs are small), and no check for rows
that underflow.

Columns, forward and then forward + backward: milliseconds of
`symjax.attention.performer_causal` (ours), scan / ours, and scan / bare.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from turns import in_turn, milliseconds, ratio

from symjax import attention

HEADS, SIZE = 4, 64
LENGTHS, FEATURES = (1024, 4096, 16384), (64, 256)


@jax.custom_vjp
def sums_of_the_past(query, key, value):
    """Compute Σ_{s≤t} (q_t·k_s) v_s of features [T N M] and values [T N V]."""
    return _scan_forward(query, key, value)[0]


def _scan_forward(query, key, value):
    def step(sums, now):
        query, key, value = now
        sums = sums + key[..., None] * value[..., None, :]
        return sums, jnp.einsum("nm,nmv->nv", query, sums)

    empty = jnp.zeros((*key.shape[1:], value.shape[-1]))
    sums, output = jax.lax.scan(step, empty, (query, key, value))
    return output, (query, key, value, sums)


def _scan_backward(residuals, change):
    query, key, value, sums = residuals

    def step(carry, now):
        sums, sums_change = carry
        query, key, value, change = now
        query_change = jnp.einsum("nmv,nv->nm", sums, change)
        sums_change = sums_change + query[..., None] * change[..., None, :]
        key_change = jnp.einsum("nmv,nv->nm", sums_change, value)
        value_change = jnp.einsum("nmv,nm->nv", sums_change, key)
        sums = sums - key[..., None] * value[..., None, :]
        return (sums, sums_change), (query_change, key_change, value_change)

    start = sums, jnp.zeros_like(sums)
    _, changes = jax.lax.scan(step, start, (query, key, value, change), reverse=True)
    return changes


sums_of_the_past.defvjp(_scan_forward, _scan_backward)


def by_token(query, key, value, projection):
    """Attend [1 T N H]: numerator and denominator by two scans, as in the original."""

    def features(x, axes):
        x = x[0] * SIZE**-0.25
        exponent = x @ projection.T
        highest = jax.lax.stop_gradient(exponent.max(axis=axes, keepdims=True))
        square = jnp.square(x).sum(axis=-1, keepdims=True) / 2
        return jnp.exp(exponent - square - highest) + 1e-6

    query, key = features(query, -1), features(key, (0, -1))
    ones = jnp.ones((*key.shape[:2], 1))
    output = sums_of_the_past(query, key, value[0])
    return (output / sums_of_the_past(query, key, ones))[None]


def bare(query, key, value, projection, chunk_size: int = 64):
    """Attend [1 T N H] in chunks without a maximum; chunk_size divides T."""
    past = jnp.tril(jnp.ones((chunk_size, chunk_size)))

    @partial(jax.checkpoint, prevent_cse=False)
    def advance(state, chunk):
        (sums, total), (query, key, value) = state, chunk
        square = jnp.square(key).sum(axis=-1, keepdims=True) / 2
        query, key = jnp.exp(query @ projection.T), jnp.exp(key @ projection.T - square)
        weights = past * (query @ key.mT)
        denominator = weights.sum(axis=-1) + jnp.einsum("ntm,nm->nt", query, total)
        rows = (weights @ value + query @ sums) / denominator[..., None]
        return (sums + key.mT @ value, total + key.sum(axis=-2)), rows

    def chunks(x):
        return x[0].reshape(-1, chunk_size, HEADS, SIZE).swapaxes(1, 2)

    empty = jnp.zeros((HEADS, len(projection), SIZE))
    arrays = chunks(query * SIZE**-0.25), chunks(key * SIZE**-0.25), chunks(value)
    _, rows = jax.lax.scan(advance, (empty, empty[..., 0]), arrays)
    return rows.swapaxes(1, 2).reshape(query.shape)


def main(rounds: int = 15) -> None:
    print(f"jax {jax.__version__}, {HEADS} heads of {SIZE}, float32")
    columns = f"{'ms':>10}{'scan/ours':>11}{'scan/bare':>11}"
    print(f"{'features':9}{'T':>7}{columns}{columns}")
    for count in FEATURES:
        projection = attention.orthogonal_projection(jax.random.key(0), count, SIZE)
        for length in LENGTHS:
            draw = np.random.default_rng(0).normal(size=(3, 1, length, HEADS, SIZE))
            inputs = [jnp.asarray(x, jnp.float32) / 2 for x in draw]
            print(f"{count:<9}{length:>7}", end="")
            for backward in (False, True):
                rivals = {}
                for name, attend in (
                    ("ours", attention.performer_causal),
                    ("scan", by_token),
                    ("bare", bare),
                ):
                    call = partial(attend, projection=projection)
                    rivals[name] = compiled(call, inputs, backward)
                times = in_turn(rivals, rounds)
                print(f"{milliseconds(times, 'ours'):10.1f}", end="")
                print(f"{ratio(times, 'scan', 'ours'):11.2f}", end="")
                print(f"{ratio(times, 'scan', 'bare'):11.2f}", end="", flush=True)
            print()


def compiled(attend, inputs, backward: bool):
    """Return a function that runs the compiled program to its end."""
    function = attend
    if backward:

        def loss(*arrays):
            return jnp.square(attend(*arrays)).sum()

        function = jax.value_and_grad(loss, (0, 1, 2))
    program = jax.jit(function).lower(*inputs).compile()
    return lambda: jax.block_until_ready(program(*inputs))


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
