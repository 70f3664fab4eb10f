"""What each mechanism is by definition, pair by pair, in float64."""

import numpy as np

# Linear attention. `module` is numpy, or jax.numpy to differentiate the definition.


def seen(batch, queries, keys, *, causal=False, mask=None, segment_ids=None):
    """Which key each query sees, [B 1 T S]; segments are runs of equal ids."""
    pairs = np.ones((batch, 1, queries, keys), bool)
    if causal:
        pairs &= np.arange(keys)[None, :] <= np.arange(queries)[:, None]
    if mask is not None:
        pairs = pairs & mask
    if segment_ids is not None:
        change = np.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
        run = np.cumsum(change, axis=1)
        pairs = pairs & (run[:, None, :, None] == run[:, None, None, :])
    return pairs


def weighted_mean(logarithms, signs, value, pairs, module=np):
    """Σ_s w v_s / Σ_s w for w = sign · exp(logarithm) of the visible pairs, else 0."""
    value = module.repeat(value, logarithms.shape[1] // value.shape[2], axis=2)
    logarithms = module.where(pairs, logarithms, -np.inf)
    highest = logarithms.max(axis=-1, keepdims=True)
    highest = module.where(module.isinf(highest), 0.0, highest)
    weights = signs * module.exp(logarithms - highest)
    total = weights.sum(axis=-1, keepdims=True)
    weights = module.where(
        total == 0, 0.0, weights / module.where(total == 0, 1, total)
    )
    return module.einsum("bnts,bsnv->btnv", weights, value)


def feature_products(query, key, module=np):
    """log|w| and sign of w = φ(q)·φ(k), from features [B T N M] and [B S K M]."""
    key = module.repeat(key, query.shape[2] // key.shape[2], axis=2)
    weights = module.einsum("btnm,bsnm->bnts", query, key)
    nothing = weights == 0
    logarithms = module.log(module.abs(module.where(nothing, 1.0, weights)))
    return module.where(nothing, -np.inf, logarithms), module.sign(weights)


def cosine_features(x, module=np):
    norm = module.sqrt((x * x).sum(axis=-1, keepdims=True)) + 1e-6
    return module.concatenate([module.ones_like(norm), x / norm], axis=-1)


def performer_products(query, key, projection, *, hyperbolic=False, module=np):
    """log of Σ_m φ_m(q) φ_m(k), up to what cancels in a row, and the sign 1."""
    key = module.repeat(key, query.shape[2] // key.shape[2], axis=2)
    query, key = query * query.shape[-1] ** -0.25, key * key.shape[-1] ** -0.25
    if hyperbolic:
        projection = module.concatenate([projection, -projection])
    query = module.einsum("btnh,mh->bntm", query, projection)[:, :, :, None]
    half = 0.5 * (key * key).sum(axis=-1, keepdims=True)
    key = module.einsum("bsnh,mh->bsnm", key, projection) - half
    exponent = query + module.moveaxis(key, 2, 1)[:, :, None]
    highest = exponent.max(axis=-1, keepdims=True)
    sums = module.exp(exponent - highest).sum(axis=-1)
    return module.log(sums) + highest[..., 0], 1.0
