"""Differential attention: one attention map minus λ times another.

    def differential(q, k, v, lam):          # one head: q, k [2 T H], v [T V]; causal
        weights = np.tril(np.exp(q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])))
        one, two = weights / weights.sum(axis=-1, keepdims=True)
        return (one - lam * two) @ v

The maps may be those of any mechanism. If the mechanism computes outputs without a map,
its two outputs are subtracted: A₁V − λ(A₂V).
"""

import math
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from einops import rearrange, repeat
from jaxtyping import Array, Float

from symjax.attention.core.arguments import (
    as_array,
    check_arrays,
    check_count,
    check_floating,
    check_function,
    check_groups,
    check_number,
)
from symjax.attention.core.operands import repeat_noise, signal_keys
from symjax.attention.scores.mechanism import ScoreMechanism
from symjax.attention.softmax import softmax


def lambda_initial(depth: int) -> float:
    """Return 0.8 − 0.6 exp(−0.3 depth), the constant part of λ; depth counts from 0.

    Raises:
        ValueError: a depth below 0, or one that is not a number.
    Source: Ye et al. 2024, arXiv:2410.05258, section 2.1 (layers count from 1 there).
    """
    check_number("lambda_initial", "depth", depth, needed=True)
    if depth < 0:
        raise ValueError(f"lambda_initial: depth must be at least 0, got {depth}")
    return 0.8 - 0.6 * math.exp(-0.3 * depth)


def differential_lambda(
    query_1: Float[Array, "H"],
    key_1: Float[Array, "H"],
    query_2: Float[Array, "H"],
    key_2: Float[Array, "H"],
    initial: float,
) -> Float[Array, ""]:
    """Return λ = exp(query_1·key_1) − exp(query_2·key_2) + initial, at least float32.

    All heads of a layer share λ. It may become negative.

    Raises:
        ValueError: vectors of different lengths.
    Source: Ye et al. 2024, arXiv:2410.05258, equation 2.
    """
    four = {"query_1": query_1, "key_1": key_1, "query_2": query_2, "key_2": key_2}
    check_floating("differential_lambda", **four)
    shapes = [x.shape for x in (query_1, key_1, query_2, key_2)]
    if len(set(shapes)) > 1 or query_1.ndim != 1:
        raise ValueError(
            f"differential_lambda: the four vectors must have one length, got {shapes}"
        )
    wide = jnp.promote_types(query_1.dtype, jnp.float32)
    first = jnp.exp(jnp.sum(query_1.astype(wide) * key_1.astype(wide)))
    second = jnp.exp(jnp.sum(query_2.astype(wide) * key_2.astype(wide)))
    return first - second + initial


def differential(
    query: Float[Array, "B T 2N H"],
    key: Float[Array, "B S 2K H"],
    value: Float[Array, "B S K V"],
    lam: Float[Array, "*N"] | float,
    *,
    signals: int = 1,
    attend: Callable = softmax,
    **options,
):
    """Return (A₁ − λA₂) V, where A₁ and A₂ are the maps of the two branches of a head.

    The shapes above are for `signals` = 1. Then branch 1 of output head n is query head
    2n, and branch 2 is query head 2n + 1. The 2K key heads alternate in the same way.
    If K < N, several output heads share a value head and its two key heads. The norm
    over each head and the factor 1 − λ_init belong to the layer
    (`symjax.layers.attention`).

    Grouped differential attention has `signals` = r > 1: r consecutive heads share one
    noise map A₂, and each has its own signal map A₁. With m = min(K, N/r):

        array   heads      order                                 N = 8, r = 4, K = 4
        query   N + N/r    r signal queries, their noise query   s s s s n s s s s n
        key     K + m      K/m signal keys, their noise key      s s n s s n
        value   K          one for each signal key
        output  N          one for each signal query

    Cost. For score mechanisms XLA computes blocks of rows (`scores.rows`): it subtracts
    the two maps and multiplies the difference by the values once. On CPUs of four kinds
    this took 0.93 to 1.14 times as long as softmax with N heads of size 2H, which has
    as many parameters (docs/performance/cpu.md). Kernels, `implementation="ring"` and
    mechanisms without scores compute two outputs and subtract them; a recurrence has a
    state per branch. A shared noise map is computed once in blocks of rows. All other
    ways compute it once for each of its r heads.

    Args:
        lam: λ, a scalar, or one per head [N].
        signals: r, number of signal heads before each noise head.
        attend: a mechanism with the arguments (query, key, value, **options). If it
            returns (output, state), so does this function.
        options: options of `attend`. A mask or bias has N/r heads, one per noise head,
            or one head for all. alibi and sink have N/r numbers. log_decay and beta
            have one number per token and key head (K + m heads). If several signal keys
            share a noise key (m < K), recurrences take neither log_decay nor beta.
    Raises:
        ValueError: shapes that do not fit together, naming both.
    Source: Ye et al. 2024, arXiv:2410.05258, equation 1; grouped: Lim et al. 2025,
        arXiv:2510.06949. Motif-2-12.7B has r = 4, K = N/r and this order of heads.
    """
    check_function("differential", attend)
    check_count("differential", "signals", signals)
    check_arrays("differential", query=query, key=key, value=value)
    check_groups("differential", query, key, value, signals)
    heads = query.shape[2] // (signals + 1) * signals
    lam = as_array("differential", "lam", lam)
    if lam.shape not in ((), (heads,)):
        raise ValueError(
            "differential: lam must be a scalar or have one value per head "
            f"{(heads,)} of query {query.shape}, got {lam.shape}"
        )
    lam = jnp.broadcast_to(lam, (1, 1, heads))
    return _difference(query, key, value, lam, attend, options, signals=signals)


def differential_v2(
    query: Float[Array, "B T 2N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    lam: Float[Array, "B T N"],
    *,
    attend: Callable = softmax,
    **options,
):
    """Return a[2n] − λ[n]·a[2n+1], where a has the outputs of 2N query heads.

    Both query heads of a pair use the same keys and values, and every token has its own
    λ. Layers of V2 add no norm and no factor 1 − λ_init. Cost and execution are as in
    `differential`, except that both branches of a recurrence read one state per key
    head.

    Args:
        lam: λ of each token and head, after a sigmoid, in (0, 1).
        attend, options: as in `differential`; a mask or bias has N heads, or one.
    Raises:
        ValueError: shapes that do not fit together, naming both; or the query heads of
            a pair would use two key heads.
    Source: Ye et al. 2026, differential transformer V2 (microsoft/unilm).
    """
    check_function("differential_v2", attend)
    check_arrays("differential_v2", query=query, key=key, value=value)
    if key.shape[2] != value.shape[2]:
        raise ValueError(
            "differential_v2 needs as many key heads as value heads, got key "
            f"{key.shape} and value {value.shape}"
        )
    if query.shape[2] % (2 * key.shape[2]):
        raise ValueError(
            "differential_v2 needs an even number of query heads for each key head, "
            f"got query {query.shape} and key {key.shape}"
        )
    lam = as_array("differential_v2", "lam", lam)
    wanted = *query.shape[:2], query.shape[2] // 2
    if lam.shape != wanted:
        raise ValueError(
            f"differential_v2: lam must be [batch, time, heads] {wanted} for query "
            f"{query.shape}, got {lam.shape}"
        )
    return _difference(query, key, value, lam, attend, options)


def _difference(
    query: Array,
    key: Array,
    value: Array,
    lam: Array,
    attend: Callable,
    options: dict,
    *,
    signals: int = 1,
):
    """Return the signal heads minus λ times the noise heads.

    A key head belongs to one branch (V1) or to both (V2).
    """
    if isinstance(attend, partial) and not attend.args:
        attend, options = attend.func, {**attend.keywords, **options}
    if isinstance(attend, ScoreMechanism):
        return attend(query, key, value, lam=lam, signals=signals, **options)
    differing = _options_by_head(options, query, signals)
    if signals > 1:
        query = repeat_noise(query, signals)
        key = repeat_noise(key, signal_keys(key.shape[2], value.shape[2]))
    # Query heads of one key head must be adjacent. They come in the order (k, g, p),
    # with k the value head, g an output head of it and p the branch. V1 has a key head
    # for each (k, p), so query heads are moved to the order (k, p, g). V2 has a key
    # head for each k: the order stays.
    groups = {"k": value.shape[2], "p": 2}
    keys_per_value = key.shape[2] // value.shape[2]  # 2 in V1, 1 in V2
    order = "(k p g)" if keys_per_value == 2 else "(k g p)"
    for name, array in differing.items():
        array = jnp.repeat(array, signals, axis=1)
        array = repeat(array, f"b (k g) t s -> b {order} t s", **groups)
        by_head = name in ("alibi", "sink")
        options = {**options, name: array.ravel() if by_head else array}
    query = rearrange(query, f"b t (k g p) h -> b t {order} h", **groups)
    wide = jnp.promote_types(value.dtype, jnp.float32)
    repeated = repeat(value.astype(wide), "b t k v -> b t (k p) v", p=keys_per_value)
    result = attend(query, key, repeated, **options)
    output, *state = result if isinstance(result, tuple) else (result,)
    pairs = rearrange(output, f"b t {order} v -> p b t (k g) v", **groups)
    mixed = pairs[0] - lam[..., None].astype(wide) * pairs[1]
    mixed = mixed.astype(value.dtype)
    return (mixed, *state) if state else mixed


def _options_by_head(options: dict, query: Array, signals: int) -> dict[str, Array]:
    """Return the options with an entry per noise head, as [#B N/r #T #S].

    The axes T and S of alibi and sink have length 1.
    """
    heads, differing = query.shape[2] // (signals + 1), {}
    for name in ("mask", "bias", "alibi", "sink"):
        array = options.get(name)
        if array is None or array.ndim not in (1, 4):
            continue
        if array.ndim == 1:
            array = array[None, :, None, None]
        if array.shape[1] not in (1, heads):
            raise ValueError(
                f"{name} must have one head or {heads}, as many as noise heads in "
                f"query {query.shape}, got {array.shape}"
            )
        differing |= {name: array} if array.shape[1] > 1 else {}
    return differing
