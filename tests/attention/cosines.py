"""Cosine attention for tests of its kernels: arrays, and the definition."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import oracles
from interpreted import B, K, N, antiparallel


def arrays(length, size, value_size, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (B, length, N, size), (B, length, K, size), (B, length, K, value_size)
    return [rng.normal(size=shape) for shape in shapes]


def definition(query, key, value, module=jnp, **seen):
    features = [oracles.cosine_features(x, module) for x in (query, key)]
    pairs = oracles.seen(*query.shape[:2], key.shape[1], causal=True, **seen)
    products = oracles.feature_products(*features, module)
    return oracles.weighted_mean(*products, value, pairs, module)


def far_from(kernel, keys, spread, width=3):
    """Rows behind 128 tokens that see none but these many keys, all before them: the
    arrays, the kernel, and the definition."""
    given = antiparallel(200, spread, heads=2, width=width)
    mask = np.broadcast_to(np.arange(200) < keys, (1, 1, 1, 200))
    return given, partial(kernel, mask=mask), partial(definition, mask=mask)
