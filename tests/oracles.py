"""Definitions of the mechanisms in float64: pair by pair, or token by token.

`module` is numpy, or jax.numpy where tests differentiate a definition.
"""

from functools import partial

import numpy as np

# Linear attention.


def seen(batch, queries, keys, *, causal=False, mask=None, segment_ids=None):
    """Return which keys each query sees [B 1 T S]. Segments are runs of equal ids."""
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
    """Return Σ_s w v_s / Σ_s w over the visible keys, or 0 where Σ_s w is 0.

    w = sign · exp(logarithm)
    """
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
    """Return log|w| and the sign of w = φ(q)·φ(k) of features [B T N M], [B S K M]."""
    key = module.repeat(key, query.shape[2] // key.shape[2], axis=2)
    weights = module.einsum("btnm,bsnm->bnts", query, key)
    nothing = weights == 0
    logarithms = module.log(module.abs(module.where(nothing, 1.0, weights)))
    return module.where(nothing, -np.inf, logarithms), module.sign(weights)


def cosine_features(x, module=np):
    norm = module.sqrt((x * x).sum(axis=-1, keepdims=True)) + 1e-6
    return module.concatenate([module.ones_like(norm), x / norm], axis=-1)


def performer_products(
    query,
    key,
    projection,
    *,
    features="positive",
    scale=None,
    statistics=None,
    module=np,
):
    """Return log|w| and the sign of w = Σ_m φ_m(q) φ_m(k), up to a common factor."""
    if features == "slay":
        return slay_products(query, key, projection, module=module)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    key = module.repeat(key, query.shape[2] // key.shape[2], axis=2)
    query, key = query * scale**0.5, key * scale**0.5
    half_query = 0.5 * module.moveaxis((query * query).sum(axis=-1), 2, 1)[..., None]
    half_key = 0.5 * module.moveaxis((key * key).sum(axis=-1), 2, 1)[:, :, None]
    rows, offset = projection, 0.0
    if statistics is not None:
        a, b = statistics
        rows = module.einsum("mi,ij->mj", projection, b)
        offset = module.einsum("mi,i,mi->m", projection, a, projection)
        offset = 2 * offset.reshape(1, 1, 1, 1, -1)
    if features == "hyperbolic":
        rows = module.concatenate([rows, -rows])
    query = module.einsum("btnh,mh->bntm", query, rows)[:, :, :, None]
    key = module.einsum("bsnh,mh->bnsm", key, rows)[:, :, None]
    if features == "relu":
        sums = (module.maximum(query, 0) * module.maximum(key, 0)).sum(axis=-1)
        shift = 0.0
    elif features == "trigonometric":
        sums = module.cos(query - key).sum(axis=-1)
        shift = half_query + half_key
    else:
        exponent = query + key + offset
        highest = exponent.max(axis=-1, keepdims=True)
        sums = module.exp(exponent - highest).sum(axis=-1)
        shift = highest[..., 0] - half_query - half_key
    nothing = sums == 0
    logarithms = module.log(module.abs(module.where(nothing, 1.0, sums))) + shift
    return module.where(nothing, -np.inf, logarithms), module.sign(sums)


def slay_products(query, key, projection, *, module=np):
    """Return log w and 1 for w = Σ_m φ_m(q) φ_m(k) with SLAY's two nodes 2 ∓ √2."""
    count = len(projection)
    place = np.arange(count)
    anchors = projection[(place + count // 2) % count]
    anchors = anchors / np.linalg.norm(anchors, axis=1, keepdims=True)
    node = (2 - 2**0.5 * (-1.0) ** place) / (2 + 1e-6)
    weight = (2 + 2**0.5 * (-1.0) ** place) / np.where(
        place % 2, count // 2, (count + 1) // 2
    )

    def features(x):
        x = x / (x * x).sum(axis=-1, keepdims=True) ** 0.5
        squares = module.einsum("btnh,mh->bntm", x, anchors) ** 2
        rows = projection * (2 * node[:, None]) ** 0.5
        exponents = module.einsum("btnh,mh->bntm", x, rows)
        return squares * module.exp(exponents - node.reshape(1, 1, 1, count))

    key = module.repeat(key, query.shape[2] // key.shape[2], axis=2)
    total = module.einsum("bntm,bnsm,m->bnts", features(query), features(key), weight)
    return module.log(total), module.sign(total)


# Scores of pairs: softmax, symmetric and differential attention.


def visible(
    batch,
    heads,
    queries,
    keys,
    *,
    is_causal=False,
    window=(None, None),
    mask_self=False,
    mask=True,
    segment_ids=None,
):
    """Return which keys each query sees [B N T S]; the last query is at the last key.

    With `mask_self` a query that sees other keys does not see its own.
    """
    pairs = np.broadcast_to(mask, (batch, heads, queries, keys)).copy()
    run = None
    if segment_ids is not None:
        run = np.cumsum(np.diff(segment_ids, axis=1, prepend=-1) != 0, axis=1)
    for b, n, t in np.ndindex(batch, heads, queries):
        own = t + keys - queries
        for s in range(keys):
            future = is_causal and s > own
            far = window[0] is not None and s < own - window[0]
            far |= window[1] is not None and s > own + window[1]
            foreign = run is not None and run[b, t] != run[b, s]
            if future or far or foreign:
                pairs[b, n, t, s] = False
        if mask_self and pairs[b, n, t].sum() > 1 and 0 <= own < keys:
            pairs[b, n, t, own] = False
    return pairs


def scores(
    query,
    key,
    pairs,
    *,
    bias=None,
    scale=None,
    length_base=None,
    length_scale=None,
    module=np,
):
    """Return scores [B N T S]: q·k·scale, changed by a law of length, plus the bias."""
    key = module.repeat(key, query.shape[2] // key.shape[2], axis=2)
    scores = module.einsum("btnh,bsnh->bnts", query, key)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if length_base is not None:
        count = np.maximum(pairs.sum(axis=-1, keepdims=True), 16)
        scores = scores * np.log(count) / np.log(length_base)
    if length_scale == "distance":
        rows, keys = (np.arange(n, dtype=float) for n in scores.shape[2:])
        distance = np.abs(rows[:, None] + len(keys) - len(rows) - keys[None])
        square = 2 * np.log(1 + distance[None, None] / 10) + 1
        scores = np.sqrt(square) * scores + (1 - square)
    elif length_scale is not None:  # slope and power [B T N]
        slope, power = (module.moveaxis(x, 2, 1)[..., None] for x in length_scale)
        count = np.maximum(pairs.sum(axis=-1, keepdims=True), 1)
        scores = scores * (1 + slope * np.log(count + 1) ** power)
    return scores if bias is None else scores + bias


def softmax_weights(scores, pairs, module=np):
    """Return exp(score) / Σ exp(score) over the visible keys; 0 for hidden keys."""
    powers = module.where(pairs, module.exp(module.where(pairs, scores, 0.0)), 0.0)
    total = powers.sum(axis=-1, keepdims=True)
    return powers / module.where(total == 0, 1.0, total)


def sparse_weights(power, scores, pairs, module=np):
    """Return weights [z/power − τ]₊^power of the visible keys, which sum to 1.

    Power 1 is sparsemax and 2 is entmax-1.5. Σ_r [z_r/power − x]₊^power falls with x
    and is 1 at x = τ. So the support, z_s/power > τ, has those s for which the sum at
    x = z_s/power is below 1. τ is the smaller root of Σ (z/power − x)^power = 1 over
    the support.
    """
    z = module.where(pairs, scores, 0.0) / power
    higher = module.maximum(z[..., None, :] - z[..., :, None], 0.0) ** power
    support = pairs & ((higher * pairs[..., None, :]).sum(axis=-1) < 1)
    count = module.maximum(1, support.sum(axis=-1, keepdims=True))
    mean = module.where(support, z, 0.0).sum(axis=-1, keepdims=True) / count
    variance = module.where(support, (z - mean) ** 2, 0.0)
    variance = variance.sum(axis=-1, keepdims=True) / count
    depth = 1 / count if power == 1 else module.sqrt(1 / count - variance)
    return module.where(support, z - mean + depth, 0.0) ** power


def weighted(weights, query, key, value, pairs, *, module=np, **options):
    """Attend with weights that are a function of (scores, pairs, module)."""
    value = module.repeat(value, query.shape[2] // value.shape[2], axis=2)
    own = scores(query, key, pairs, module=module, **options)
    return module.einsum("bnts,bsnv->btnv", weights(own, pairs, module), value)


softmax = partial(weighted, softmax_weights)


def softpick_weights(scores, pairs, module=np):
    """Return relu(exp(z) − 1) over the sum of |exp(z) − 1| and 1e-6."""
    powers = module.exp(module.where(pairs, scores, 0.0)) - 1
    total = module.abs(powers).sum(axis=-1, keepdims=True) + 1e-6
    return module.maximum(powers, 0.0) / total


sparsemax = partial(weighted, partial(sparse_weights, 1))
entmax15 = partial(weighted, partial(sparse_weights, 2))
softpick = partial(weighted, softpick_weights)


def entmax15_weights(scores, pairs, module=np):
    return sparse_weights(2, scores, pairs, module)


def forgetting(
    query, key, value, logits, pairs, *, seen, bias=None, module=np, **options
):
    """Softmax whose scores fall by the log-decays log σ(logit) between key and query.

    The decay of token r lies between key s and row t if s < r ≤ t, or t < r ≤ s.
    """
    keys, rows = np.arange(key.shape[1]), np.arange(query.shape[1])
    rows = rows + len(keys) - len(rows)
    low = np.minimum(rows[:, None], keys[None])[..., None]
    high = np.maximum(rows[:, None], keys[None])[..., None]
    between = ((low < keys) & (keys <= high)).astype(float)
    decays = -module.logaddexp(0.0, -logits[..., 0])
    decays = module.where(seen[..., None], decays, 0.0)
    fall = module.einsum("tsr,brk->bkts", between, decays)
    fall = module.repeat(fall, query.shape[2] // key.shape[2], axis=1)
    bias = fall if bias is None else bias + fall
    return softmax(query, key, value, pairs, bias=bias, module=module, **options)


def forgetting_twice(query, key, value, logits, lam, pairs, *, module=np, **options):
    """Differential V1, where each branch has its own keys and its own decays."""
    one, two = (
        forgetting(
            *(query[:, :, i::2], key[:, :, i::2], value, logits[:, :, i::2], pairs),
            module=module,
            **options,
        )
        for i in (0, 1)
    )
    return one - lam.reshape(1, 1, -1, 1) * two


def with_sink(*arrays, weights=softmax_weights, module=np, **options):
    """Attend with one more key, whose score is the sink and whose value is 0."""
    *arrays, sink, pairs = arrays

    def with_one_more(scores, pairs, module):
        more = module.broadcast_to(sink.reshape(1, -1, 1, 1), (*scores.shape[:3], 1))
        scores = module.concatenate([scores, more], axis=-1)
        pairs = np.concatenate([pairs, np.ones((*pairs.shape[:3], 1), bool)], axis=-1)
        return weights(scores, pairs, module)[..., :-1]

    return weighted(with_one_more, *arrays, pairs, module=module, **options)


def by_distance(*arrays, length_base=None, **options):
    return softmax(*arrays, length_scale="distance", **options)


def adaptive_entmax15(
    query, key, value, slope, power, pairs, *, length_base=None, **options
):
    law = slope, power
    return entmax15(query, key, value, pairs, length_scale=law, **options)


def symmetric_key(query, metric=None, normalise=None, module=np):
    key = query if metric is None else module.einsum("nij,btnj->btni", metric, query)
    if normalise == "unit":
        return key / module.sqrt((key**2).sum(axis=-1, keepdims=True))
    if normalise == "rms":
        return key / module.sqrt((key**2).mean(axis=-1, keepdims=True) + 1e-6)
    return key


def symmetric(query, value, metric, pairs, *, normalise=None, module=np, **options):
    key = symmetric_key(query, metric, normalise, module)
    return softmax(query, key, value, pairs, module=module, **options)


def differential(
    query,
    key,
    value,
    lam,
    pairs,
    *,
    signals=1,
    weights=softmax_weights,
    bias=None,
    module=np,
    **options,
):
    """Compute differential V1 head by head, with the keys and values of its group.

    Every `signals` heads share a noise map. Its query follows the queries of these
    heads, and its key follows their keys.
    """
    groups = query.shape[2] // (signals + 1)
    heads, kv_heads = signals * groups, value.shape[2]
    # Signal keys before each noise key; value heads are those of signal keys.
    shared = kv_heads // (key.shape[2] - kv_heads)
    outputs = []
    for n in range(heads):
        noise, group = n // signals, n * kv_heads // heads
        first, first_key = noise * (signals + 1), group // shared * (shared + 1)
        own = slice(noise, noise + 1)
        head_bias = bias if bias is None or bias.shape[1] == 1 else bias[:, own]
        one, two = (
            weights(
                scores(
                    query[:, :, [first + query_head]],
                    key[:, :, [first_key + key_head]],
                    pairs[:, own],
                    bias=head_bias,
                    module=module,
                    **options,
                ),
                pairs[:, own],
                module,
            )
            for query_head, key_head in (
                (n % signals, group % shared),
                (signals, shared),
            )
        )
        combined = (one - lam[n] * two)[:, 0]
        outputs.append(module.einsum("bts,bsv->btv", combined, value[:, :, group]))
    return module.stack(outputs, axis=2)


def differential_v2(query, key, value, lam, pairs, *, bias=None, module=np, **options):
    """Compute differential V2: two softmax outputs per head, the second times λ."""
    pairs = np.repeat(pairs, 2, axis=1)
    if bias is not None and bias.shape[1] > 1:
        bias = module.repeat(bias, 2, axis=1)
    both = softmax(query, key, value, pairs, bias=bias, module=module, **options)
    return both[:, :, 0::2] - lam[..., None] * both[:, :, 1::2]


def rotate(x, positions, base=10000.0):
    """Rotate each pair (i, i + H/2), a complex number, by position · frequency."""
    half = x.shape[-1] // 2
    numbers = x[..., :half] + 1j * x[..., half:]
    for i in range(half):
        angle = positions * base ** (-2 * i / x.shape[-1])
        numbers[..., i] *= np.exp(1j * angle)[..., None]
    return np.concatenate([numbers.real, numbers.imag], axis=-1)


def scaled_frequencies(
    kind,
    size,
    base,
    *,
    factor,
    original_length=0,
    low=1.0,
    high=4.0,
    fast=32.0,
    slow=1.0,
    truncate=True,
    length=0,
):
    """Return the angle per token of each pair of features, pair by pair.

    Position interpolation (arXiv:2306.15595), NTK and YaRN (arXiv:2309.00071), Llama 3.
    """

    def pair_with(turns):  # i, where base^(−2i/R) · original_length = 2π · turns
        ratio = original_length / (2 * np.pi * turns)
        return size * np.log(ratio) / (2 * np.log(base))

    if kind == "yarn":
        first, last = pair_with(fast), pair_with(slow)
        if truncate:
            first, last = np.floor(first), np.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
    found = []
    for i in range(size // 2):
        plain = base ** (-2 * i / size)
        turns = original_length * plain / (2 * np.pi)
        if kind == "linear":
            found.append(plain / factor)
        elif kind == "dynamic":
            ratio = max(length, original_length) / original_length
            grown = base * (factor * ratio - (factor - 1)) ** (size / (size - 2))
            found.append(grown ** (-2 * i / size))
        elif kind == "yarn":
            between = (i - first) / (last - first)
            slowness = 0 if i <= first else 1 if i >= last else between
            found.append(slowness * plain / factor + (1 - slowness) * plain)
        elif turns < low:
            found.append(plain / factor)
        elif turns > high:
            found.append(plain)
        else:
            smooth = (turns - low) / (high - low)
            found.append((1 - smooth) * plain / factor + smooth * plain)
    return np.array(found)


# Gated attention units: relu² without normalisation.


def squared_relu(
    query,
    key,
    value,
    pairs,
    *,
    divisor,
    bias=None,
    scale=None,
    length_base=None,
    module=np,
):
    """Return Σ_s relu²(score) v_s / divisor over the visible keys.

    The divisor is a number, or "count" or "squared_count" of the visible keys.
    """
    groups = query.shape[2] // key.shape[2]
    key, value = (module.repeat(x, groups, axis=2) for x in (key, value))
    scores = module.einsum("btnh,bsnh->bnts", query, key)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    count = pairs.sum(axis=-1, keepdims=True)
    if length_base is not None:
        scores = scores * np.log(np.maximum(count, 16)) / np.log(length_base)
    if bias is not None:
        scores = scores + bias
    if isinstance(divisor, str):
        divisor = np.maximum(count, 1) ** {"count": 1, "squared_count": 2}[divisor]
    weights = module.where(pairs, module.maximum(scores, 0) ** 2, 0.0) / divisor
    return module.einsum("bnts,bsnv->btnv", weights, value)


def flash(
    query,
    key,
    linear_query,
    linear_key,
    value,
    *,
    group_size,
    causal,
    scale=None,
    divisor=None,
    linear_divisor=None,
    module=np,
    **seen_by,
):
    """Compute FLASH: relu² of pairs in a group, and plain products of all pairs.

    If causal, the plain products are those with keys of earlier groups.
    """
    length = query.shape[1]
    pairs = seen(query.shape[0], length, length, **seen_by)
    group = np.arange(length) // group_size
    near, far = group[:, None] == group[None], np.ones((length, length), bool)
    if causal:
        near &= np.tril(far)
        far = group[None] < group[:, None]
    divisor = group_size if divisor is None else divisor
    options = {"scale": scale, "divisor": divisor, "module": module}
    quadratic = squared_relu(query, key, value, pairs & near, **options)
    groups = query.shape[2] // linear_key.shape[2]
    linear_key, value = (module.repeat(x, groups, axis=2) for x in (linear_key, value))
    products = module.einsum("btnm,bsnm->bnts", linear_query, linear_key)
    products = module.where(pairs & far, products, 0.0)
    linear = module.einsum("bnts,bsnv->btnv", products, value)
    divisor = group_size if linear_divisor is None else linear_divisor
    return quadratic + linear / divisor


# Attention whose state decays.


def decay(query, key, value, log_decay, sums=0, *, mask=None, segment_ids=None):
    """Run S = exp(g) S + k vᵀ, out = q S token by token; return outputs and last S.

    A hidden token does not change S. S is reset to 0 where the segment changes.
    """
    length, heads = key.shape[1:3]
    rates = log_decay if log_decay.ndim == 4 else log_decay[..., None]
    rates = np.broadcast_to(rates, key.shape)
    outputs = []
    for t in range(length):
        if segment_ids is not None and t > 0:
            same = segment_ids[:, t] == segment_ids[:, t - 1]
            sums = np.where(same[:, None, None, None], sums, 0)
        new = key[:, t, :, :, None] * value[:, t, :, None]
        new = new + np.exp(rates[:, t])[..., None] * sums
        sums = new if mask is None else np.where(mask[:, :, :, t, None], new, sums)
        repeated = np.repeat(sums, query.shape[2] // heads, axis=1)
        outputs.append(np.einsum("bnh,bnhv->bnv", query[:, t], repeated))
    return np.stack(outputs, axis=1), sums


def delta(
    query,
    key,
    value,
    beta,
    log_decay=None,
    erase=None,
    *,
    sums=0.0,
    mask=None,
    segment_ids=None,
):
    """Run the delta rule token by token: decay, erase, write, read.

    Return outputs and the last S. Hidden tokens do nothing. S is reset to 0 where the
    segment changes.
    """
    eraser = key if erase is None else erase * key
    batch, length, heads, size = key.shape
    rates = np.zeros((1, 1, 1)) if log_decay is None else log_decay
    rates = rates if rates.ndim == 4 else rates[..., None]
    rates = np.broadcast_to(rates, key.shape)
    sums = np.broadcast_to(sums, (batch, heads, size, value.shape[-1]))
    outputs = []
    for t in range(length):
        if segment_ids is not None and t > 0:
            same = segment_ids[:, t] == segment_ids[:, t - 1]
            sums = np.where(same[:, None, None, None], sums, 0)
        faded = np.exp(rates[:, t])[..., None] * sums
        held = np.einsum("bkh,bkhv->bkv", eraser[:, t], faded)
        change = beta[:, t, :, None] * (value[:, t] - held)
        new = faded + key[:, t, :, :, None] * change[:, :, None]
        sums = new if mask is None else np.where(mask[:, :, :, t, None], new, sums)
        repeated = np.repeat(sums, query.shape[2] // heads, axis=1)
        outputs.append(np.einsum("bnh,bnhv->bnv", query[:, t], repeated))
    return np.stack(outputs, axis=1), sums


# Functions of the matrix QQᵀ.


def matrix_function(query, value, function, scale=None, mask=None, normalise="none"):
    """Compute f(scale · QQᵀ) V of the visible tokens by the eigenvalues of QQᵀ."""
    output = np.zeros_like(value)
    for b, n in np.ndindex(query.shape[0], query.shape[2]):
        seen = np.ones(query.shape[1], bool) if mask is None else mask[b, 0, 0]
        rows, columns = query[b, seen, n], value[b, seen, n]
        factor = scale or 1 / (len(rows) * np.sqrt(rows.shape[1]))
        weights = function_of_scores(factor * rows @ rows.T, function)
        output[b, seen, n] = rows_over_size(weights, normalise) @ columns
    return output


def function_of_scores(scores, function):
    """Return f(A) of a symmetric matrix, or 1 + A/‖A‖² if f is "ones_plus"."""
    if function == "ones_plus":
        return 1 + scores / (scores**2).sum()
    values, vectors = np.linalg.eigh(scores)
    return (vectors * function(values)) @ vectors.T


def rows_over_size(weights, normalise):
    """Divide every row by its sum ("rows") or by its length ("l2")."""
    if normalise == "rows":
        return weights / weights.sum(axis=-1, keepdims=True)
    if normalise == "l2":
        return weights / np.linalg.norm(weights, axis=-1, keepdims=True)
    return weights


def causal_matrix_function(
    query,
    value,
    function,
    scale,
    *,
    mask=None,
    segment_ids=None,
    log_decay=None,
    normalise="none",
):
    """Compute for every token the last row of f(scale · QQᵀ) V of its visible prefix.

    The eigenvalues of a prefix are the squared singular values of its Q. A decay since
    token s multiplies q_s q_sᵀ and q_s v_sᵀ. Hidden tokens have a zero row.
    """
    output = np.zeros_like(value)
    shown = seen(*query.shape[:2], query.shape[1], causal=True, mask=mask)
    pairs = shown & seen(*query.shape[:2], query.shape[1], segment_ids=segment_ids)
    decays = np.zeros(query.shape[:3]) if log_decay is None else log_decay
    if mask is not None:
        decays = np.where(mask[:, 0, 0, :, None], decays, 0)
    sums = np.cumsum(decays, axis=1)
    for b, t, n in np.ndindex(query.shape[:3]):
        past = pairs[b, 0, t]
        if not past[t]:
            continue
        root = np.exp((sums[b, t, n] - sums[b, past, n]) / 2)[:, None]
        rows, columns = root * query[b, past, n], root * value[b, past, n]
        if function == "ones_plus" or normalise != "none":
            weights = function_of_scores(scale * rows @ rows.T, function)[-1]
            output[b, t, n] = rows_over_size(weights, normalise) @ columns
            continue
        vectors, sizes, _ = np.linalg.svd(rows, full_matrices=False)
        change = function(scale * sizes**2) - function(0.0)
        reached = (vectors[-1] * change) @ (vectors.T @ columns)
        output[b, t, n] = function(0.0) * value[b, t, n] + reached
    return output


def mesa(query, key, value, ridge, *, module=np, **options):
    """Compute q (Λ + Σ k kᵀ)⁻¹ Σ k vᵀ over the keys that each token sees."""
    pairs = seen(*query.shape[:2], key.shape[1], causal=True, **options)[:, 0]
    used = pairs.any(axis=1)[..., None, None]
    key, value = (module.where(used, x, 0) for x in (key, value))
    pairs = pairs.astype(float)
    moments = module.einsum("bts,bskh,bski->btkhi", pairs, key, key)
    sums = module.einsum("bts,bskh,bskv->btkhv", pairs, key, value)
    moments = moments + (ridge[..., None] * np.eye(key.shape[-1]))[None, None]
    fit = module.repeat(
        module.linalg.solve(moments, sums), query.shape[2] // key.shape[2], axis=2
    )
    return module.einsum("btnh,btnhv->btnv", query, fit)
