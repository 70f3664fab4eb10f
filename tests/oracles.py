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


# Scores of pairs: softmax, symmetric and differential attention.


def visible(
    batch,
    heads,
    queries,
    keys,
    *,
    is_causal=False,
    mask_self=False,
    mask=True,
    segment_ids=None,
):
    """Which key each query sees, [B N T S]; the last query stands at the last key."""
    pairs = np.broadcast_to(mask, (batch, heads, queries, keys)).copy()
    for b, n, t in np.ndindex(batch, heads, queries):
        own = t + keys - queries
        for s in range(keys):
            future = is_causal and s > own
            foreign = segment_ids is not None and segment_ids[b, t] != segment_ids[b, s]
            if future or foreign:
                pairs[b, n, t, s] = False
        if mask_self and pairs[b, n, t].sum() > 1 and 0 <= own < keys:
            pairs[b, n, t, own] = False
    return pairs


def softmax_map(
    query, key, pairs, *, bias=None, scale=None, length_base=None, module=np
):
    """[B N T S]: exp(score) over its sum along the visible keys, else 0."""
    key = module.repeat(key, query.shape[2] // key.shape[2], axis=2)
    scores = module.einsum("btnh,bsnh->bnts", query, key)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if length_base is not None:
        count = np.maximum(pairs.sum(axis=-1, keepdims=True), 16)
        scores = scores * np.log(count) / np.log(length_base)
    if bias is not None:
        scores = scores + bias
    powers = module.where(pairs, module.exp(module.where(pairs, scores, 0.0)), 0.0)
    total = powers.sum(axis=-1, keepdims=True)
    return powers / module.where(total == 0, 1.0, total)


def softmax(query, key, value, pairs, *, module=np, **options):
    value = module.repeat(value, query.shape[2] // value.shape[2], axis=2)
    weights = softmax_map(query, key, pairs, module=module, **options)
    return module.einsum("bnts,bsnv->btnv", weights, value)


def symmetric(query, value, metric, pairs, *, normalise=None, module=np, **options):
    key = module.einsum("nij,btnj->btni", metric, query)
    if normalise == "unit":
        key = key / module.sqrt((key**2).sum(axis=-1, keepdims=True))
    elif normalise == "rms":
        key = key / module.sqrt((key**2).mean(axis=-1, keepdims=True) + 1e-6)
    return softmax(query, key, value, pairs, module=module, **options)


def differential(query, key, value, lam, pairs, *, bias=None, module=np, **options):
    """Head by head: its two branches, its group's two key branches, its values."""
    heads = query.shape[2] // 2
    outputs = []
    for n in range(heads):
        group = n * value.shape[2] // heads
        own = slice(n, n + 1)
        head_bias = bias if bias is None or bias.shape[1] == 1 else bias[:, own]
        one, two = (
            softmax_map(
                query[:, :, [2 * n + branch]],
                key[:, :, [2 * group + branch]],
                pairs[:, own],
                bias=head_bias,
                module=module,
                **options,
            )
            for branch in (0, 1)
        )
        combined = (one - lam[n] * two)[:, 0]
        outputs.append(module.einsum("bts,bsv->btv", combined, value[:, :, group]))
    return module.stack(outputs, axis=2)


def rotate(x, positions, base=10000.0):
    """Each pair (i, i + H/2) as a complex number turned by position · frequency."""
    half = x.shape[-1] // 2
    numbers = x[..., :half] + 1j * x[..., half:]
    for i in range(half):
        angle = positions * base ** (-2 * i / x.shape[-1])
        numbers[..., i] *= np.exp(1j * angle)[..., None]
    return np.concatenate([numbers.real, numbers.imag], axis=-1)


# Attention whose state decays.


def decay(
    query, key, value, log_decay, *, mask=None, segment_ids=None, sums=None, module=np
):
    """Token by token, S = exp(g) S + k vᵀ and out = q S: the outputs and the last S.

    A hidden token leaves S as it was; S is 0 again where the segment changes.
    """
    batch, length, heads, size = key.shape
    rates = log_decay if log_decay.ndim == 4 else log_decay[..., None]
    rates = module.broadcast_to(rates, key.shape)
    if sums is None:
        sums = module.zeros((batch, heads, size, value.shape[-1]))
    outputs = []
    for t in range(length):
        if segment_ids is not None and t > 0:
            same = segment_ids[:, t] == segment_ids[:, t - 1]
            sums = module.where(same[:, None, None, None], sums, 0.0)
        new = module.exp(rates[:, t])[..., None] * sums
        new = new + key[:, t, :, :, None] * value[:, t, :, None]
        if mask is not None:
            new = module.where(mask[:, :, :, t, None], new, sums)
        sums = new
        repeated = module.repeat(sums, query.shape[2] // heads, axis=1)
        outputs.append(module.einsum("bnh,bnhv->bnv", query[:, t], repeated))
    return module.stack(outputs, axis=1), sums
