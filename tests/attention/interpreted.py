"""Inputs and comparisons for tests of kernels that are interpreted on the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from symjax.attention import decay_causal

B, N, K = 2, 4, 2
# A block that does not exist is an error, where interpret=True would read the last one.
STRICT = pltpu.InterpretParams(out_of_bounds_reads="raise")


def padding(length):
    """Hide some keys, and in one example all keys of the first chunk."""
    mask = np.random.default_rng(5).random((B, 1, 1, length)) < 0.7
    mask[0, ..., :140] = False
    return mask


def segments(length):
    """Return segment ids of runs of different lengths, one of them a single token."""
    change = np.random.default_rng(6).random((B, length)) < 0.02
    change[:, 40:42] = True
    return np.cumsum(change, axis=1)


def seen_by(length, *names):
    seen = {"mask": padding(length), "segment_ids": segments(length)}
    return {name: seen[name] for name in names}


def scan(query, key, value, log_decay, **seen):
    """Run `decay_causal` in chunks, with decays per channel or per head."""
    if log_decay.shape[-1] == 1:
        log_decay = log_decay[..., 0]
    return decay_causal(query, key, value, log_decay, **seen)


def differentiated(form, given, dtype=np.float32):
    """Return the output, and the gradients of a random sum of it."""
    weigh = np.random.default_rng(1).normal(
        size=(*given[0].shape[:3], given[2].shape[3])
    )
    weigh = weigh.astype(jnp.bfloat16).astype(dtype)

    def both(weigh, *arrays):
        output, back = jax.vjp(form, *arrays)
        return output, *back(weigh)

    with jax.enable_x64(dtype == np.float64):
        found = jax.jit(both)(weigh, *(x.astype(dtype) for x in given))
        return [np.asarray(x) for x in found]


def bfloat16_agrees(attend, exact, given, worst):
    """Assert that output and gradients in bfloat16 equal those in float64.

    Their error is at most `worst` of the norm of all values.
    """
    found = differentiated(attend, given, jnp.bfloat16)
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in given]
        wanted = differentiated(exact, wide, np.float64)
    for one, two in zip(found, wanted, strict=True):
        one, two = np.asarray(one, np.float64), np.asarray(two)
        assert np.linalg.norm(one - two) <= worst * np.linalg.norm(two)


def antiparallel(length, spread, heads=40, size=64, width=3):
    """Return keys near one direction and queries near the opposite one, in float32."""
    rng = np.random.default_rng(0)
    axis = rng.normal(size=(1, 1, heads, size))
    shapes = [(1, length, heads, n) for n in (size, size, width)]
    query, key, value = (rng.normal(size=shape) for shape in shapes)
    near = -axis + spread * query, axis + spread * key, value
    return [x.astype(np.float32) for x in near]
