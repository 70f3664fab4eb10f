"""Sums over the past: what every linear attention is made of.

out[t] = φ(q_t)·Σ_s φ(k_s) v_sᵀ / φ(q_t)·Σ_s φ(k_s)

The sums over s are a state of fixed size. `absorb` adds keys to it, `read` asks it, and
`advance` takes a chunk of time, in which every row sees its own past: quadratic inside
the chunk, through the state to what came before.

Features with an exponent have a state relative to `peak`, the largest exponent of a key
so far for each feature, and a query relative to its largest exponent + peak: where
amplitudes are 1, the key that set the peak then adds at least 1 to the denominator.
Every factor is at most 1, nothing that matters underflows, no ε is needed, and nothing
depends on the future. Peaks are constants to the gradient: they cancel in the ratio.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.features import Features, Powers

# Below this a chunk that is referred to its last peak has lost its early rows.
_LOST = 1e-20
einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class LinearState(NamedTuple):
    """What linear attention keeps of the keys it has seen, in float32 at least.

    sums = Σ φ(k) vᵀ and total = Σ φ(k), both times exp(−peak) when the features have an
    exponent: peak is its running maximum, over all features where they share it.
    """

    sums: Float[Array, "B K M V"]
    total: Float[Array, "B K M"]
    peak: Float[Array, "B K M"] | Float[Array, "B K 1"] | None = None


class Fraction(NamedTuple):
    """Rows of output before the division; both parts are times exp(−shift)."""

    top: Float[Array, "B K G T V"]
    bottom: Float[Array, "B K G T"]
    size: Float[Array, "B K G T"]  # of the terms of bottom, before signs cancel
    shift: Float[Array, "B K G T"]


class Chunk(NamedTuple):
    """A stretch of time: vectors, and after `to_features` their features.

    `run` numbers the segments; `fresh` says that one starts with this chunk.
    """

    query: Any  # [B K G T H], then Powers
    key: Any  # [B K T H], then Powers
    value: Float[Array, "B K T V"]
    visible: Bool[Array, "B T"]
    run: Int[Array, "B T"] | None = None
    fresh: Bool[Array, " B"] | None = None


def _finite(peak: Array) -> Array:
    """A peak to subtract: 0 where no key was seen, since −inf − (−inf) is NaN."""
    return jnp.where(jnp.isneginf(peak), 0, peak)


def to_features(features: Features, parameters: Any, chunk: Chunk, dtype: Any) -> Chunk:
    """The same chunk with φ of queries and keys; φ = 0 for hidden keys.

    The largest amplitude of a query cancels in the ratio, so it is made 1: products of
    amplitudes would leave the range of float32 long before the amplitudes do.
    """
    query = features.query(chunk.query.astype(dtype), parameters)
    if query.amplitude is not None:
        largest = jnp.abs(query.amplitude).max(axis=-1, keepdims=True)
        largest = jax.lax.stop_gradient(jnp.where(largest > 0, largest, 1))
        query = query._replace(amplitude=query.amplitude / largest)
    chunk = chunk._replace(query=query)
    return key_features(features, parameters, chunk, dtype)


def key_features(
    features: Features, parameters: Any, chunk: Chunk, dtype: Any
) -> Chunk:
    """The same chunk with φ of keys alone."""
    key = features.key(chunk.key.astype(dtype), parameters)
    return chunk._replace(
        key=key.where(chunk.visible[:, None]), value=chunk.value.astype(dtype)
    )


def _weigh_query(query: Powers, peak: Array | None) -> tuple[Array, Array]:
    """Feature weights of at most 1, and the logarithm that was divided out of a row."""
    if peak is None:
        weights = query.weights()
        return weights, jnp.zeros_like(weights[..., 0])
    query = query.raised(peak[:, :, None])
    shift = _finite(_largest(query))
    return query.raised(-shift).weights(), shift[..., 0]


def _largest(query: Powers) -> Array:
    """The largest exponent of each row, a constant to the gradient."""
    return jax.lax.stop_gradient(query.exponent.max(axis=-1, keepdims=True))


def _weigh_key(key: Powers, peak: Array | None) -> Array:
    return key.weights() if peak is None else key.raised(-_finite(peak)).weights()


def _refer(state: LinearState, peak: Array | None) -> LinearState:
    """The same state relative to a higher peak."""
    if peak is None or state.peak is None:
        return state
    decay = jnp.exp(state.peak - _finite(peak))
    return LinearState(state.sums * decay[..., None], state.total * decay, peak)


def _add(state: LinearState, weights: Array, value: Array) -> LinearState:
    """The state after more keys, whose weights refer to the state's peak."""
    sums = state.sums + einsum("bksm,bksv->bkmv", weights, value)
    return LinearState(sums, state.total + weights.sum(axis=-2), state.peak)


def absorb(state: LinearState, key: Powers, value: Array) -> LinearState:
    """The state after all these keys."""
    peak = state.peak
    if peak is not None:
        highest = key.exponent.max(axis=-2, initial=-jnp.inf)
        peak = jax.lax.stop_gradient(jnp.maximum(peak, highest))
    return _add(_refer(state, peak), _weigh_key(key, _row(peak)), value)


def _row(peak: Array | None) -> Array | None:
    """[B K M] → [B K 1 M], to stand beside rows of time."""
    return None if peak is None else peak[:, :, None]


def union(one: LinearState, two: LinearState) -> LinearState:
    """The state that has seen the keys of both, which must be different keys.

    (c, S, z) of both, c = max: S₁ exp(c₁ − c) + S₂ exp(c₂ − c), and so z. Associative
    and commutative; an empty state changes nothing.
    """
    peak = None
    if one.peak is not None and two.peak is not None:
        peak = jnp.maximum(one.peak, two.peak)
    one, two = _refer(one, peak), _refer(two, peak)
    return LinearState(one.sums + two.sums, one.total + two.total, peak)


def read(state: LinearState, query: Powers) -> Fraction:
    """Rows that see the state and nothing else."""
    weights, shift = _weigh_query(query, _row(state.peak))
    return _look(state, weights, shift, query.amplitude is not None)


def _look(state: LinearState, weights: Array, shift: Array, signed: bool) -> Fraction:
    top = einsum("bkgtm,bkmv->bkgtv", weights, state.sums)
    bottom = einsum("bkgtm,bkm->bkgt", weights, state.total)
    if not signed:
        return Fraction(top, bottom, bottom, shift)
    size = einsum("bkgtm,bkm->bkgt", jnp.abs(weights), jnp.abs(state.total))
    return Fraction(top, bottom, size, shift)


def _and_scores(past: Fraction, scores: Array, value: Array, signed: bool) -> Fraction:
    """Rows that see, beside the past, the keys of their own chunk."""
    bottom = scores.sum(axis=-1)
    size = jnp.abs(scores).sum(axis=-1) if signed else bottom
    top = einsum("bkgts,bksv->bkgtv", scores, value)
    return Fraction(past.top + top, past.bottom + bottom, past.size + size, past.shift)


def divide(fraction: Fraction) -> Array:
    """top / bottom, and zeros where bottom is nothing but rounding.

    Both are first divided by the constant bottom: the gradient of a plain quotient
    holds bottom⁻², which overflows where bottom⁻¹ does not.
    """
    tolerance = 8 * jnp.finfo(fraction.bottom.dtype).eps
    bottom, size = jax.lax.stop_gradient((fraction.bottom, fraction.size))
    some = jnp.abs(bottom) > tolerance * size
    scale = jnp.where(some, 1 / jnp.where(some, bottom, 1), 0)
    ones = jnp.where(some, fraction.bottom * scale, 1)
    return fraction.top * scale[..., None] / ones[..., None]


def merge(one: Fraction, two: Fraction) -> Fraction:
    """Rows that see the keys of both, which must be different keys.

    A side without keys has shift −∞: that of the other may be far below 0.
    """
    shifts = [jnp.where(x.size > 0, x.shift, -jnp.inf) for x in (one, two)]
    shift = _finite(jnp.maximum(*shifts))
    a, b = (jnp.exp(own - shift) for own in shifts)
    return Fraction(
        one.top * a[..., None] + two.top * b[..., None],
        one.bottom * a + two.bottom * b,
        one.size * a + two.size * b,
        shift,
    )


def _highest(peak: Array, run: Array | None) -> Array:
    """Running maximum along time [B K T M] that starts anew with each run [B T]."""
    if run is None:
        return jax.lax.cummax(peak, axis=2)
    shift = 1
    while shift < peak.shape[2]:  # windows of 1, 2, 4 … tokens
        same = jnp.pad(run[:, shift:] == run[:, :-shift], ((0, 0), (shift, 0)))
        before = jnp.pad(peak[:, :, :-shift], ((0, 0), (0, 0), (shift, 0), (0, 0)))
        higher = jnp.maximum(peak, before)
        peak = jnp.where(same[:, None, :, None], higher, peak)
        shift *= 2
    return peak


def _pairs(chunk: Chunk) -> Bool[Array, "B T T"]:
    """Who may see whom: the past and oneself, inside one run."""
    length = chunk.value.shape[2]
    past = jnp.tril(jnp.ones((1, length, length), bool))
    if chunk.run is None:
        return past
    return past & (chunk.run[:, :, None] == chunk.run[:, None, :])


def empty(like: LinearState) -> LinearState:
    """A state that has seen no key."""
    peak = None if like.peak is None else jnp.full_like(like.peak, -jnp.inf)
    return LinearState(jnp.zeros_like(like.sums), jnp.zeros_like(like.total), peak)


def choose(where: Array, one: Any, two: Any) -> Any:
    """One state or the other for each example of the batch. where: [B]."""

    def pick(a: Array, b: Array) -> Array:
        return jnp.where(where.reshape((-1,) + (1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(pick, one, two)


def _started(peak: Array, key: Powers) -> Array:
    """A key's exponents with the peak of the past folded into the first token."""
    constant = jax.lax.stop_gradient(key.exponent)
    first = jnp.maximum(constant[:, :, :1], peak[:, :, None])
    return jnp.concatenate([first, constant[:, :, 1:]], axis=2)


def _reference(state: LinearState, key: Powers, run: Array | None) -> Array | None:
    """The peak at the end of the chunk, or of each token's run: [B K 1 or T M]."""
    if state.peak is None:
        return None
    started = _started(state.peak, key)
    if run is None:
        return started.max(axis=2, keepdims=True)
    running = _highest(started, run)
    return jnp.flip(_highest(jnp.flip(running, 2), jnp.flip(run, 1)), 2)


def advance(state: LinearState, chunk: Chunk) -> tuple[LinearState, Fraction]:
    """One chunk of features: the state after it, and its rows.

    The state of the last run goes on; a run that starts with the chunk forgets it.
    """
    run = chunk.run
    if chunk.fresh is not None:
        state = choose(chunk.fresh, empty(state), state)
    peak = _reference(state, chunk.key, run)
    weights = _weigh_key(chunk.key, peak)
    old = _refer(state, None if peak is None else peak[:, :, 0])
    fraction = _together(old, chunk, weights, peak)
    if state.peak is not None:
        fraction = _rescue(fraction, state, state.peak, chunk)
    if run is not None:
        old = choose(run[:, 0] == run[:, -1], old, empty(old))
        old = old._replace(peak=None if peak is None else peak[:, :, -1])
        last = run == run[:, -1:]
        weights = jnp.where(last[:, None, :, None], weights, 0)
    return _add(old, weights, chunk.value), fraction


def _together(
    old: LinearState, chunk: Chunk, weights: Array, peak: Array | None
) -> Fraction:
    """Rows of a chunk whose factors all refer to the peak at the chunk's end.

    That peak lies in the future of most rows: it cancels in the ratio, but a later key
    that is far larger pushes earlier ones out of range. `_rescue` looks after those.
    """
    row, shift = _weigh_query(chunk.query, peak)
    scores = einsum("bkgtm,bksm->bkgts", row, weights)
    scores = scores * _pairs(chunk)[:, None, None].astype(scores.dtype)
    if chunk.run is not None:
        reaches = chunk.run == chunk.run[:, :1]
        row = jnp.where(reaches[:, None, None, :, None], row, 0)
    signed = chunk.query.amplitude is not None
    past = _look(old, row, shift, signed)
    return _and_scores(past, scores, chunk.value, signed)


def _rescue(
    fraction: Fraction, state: LinearState, peak: Array, chunk: Chunk
) -> Fraction:
    """Replace the rows whose keys all left float32, if there are any.

    Row by row, so that no example depends on what another one needed.
    """
    sees = (_pairs(chunk) & chunk.visible[:, None, :]).any(axis=-1)[:, None]
    remembers = ~jnp.isneginf(peak).all(axis=-1)[..., None]
    if chunk.run is not None:
        remembers = remembers & (chunk.run == chunk.run[:, :1])[:, None]
    some = (sees | remembers)[:, :, None]
    lost = some & (jax.lax.stop_gradient(fraction.size) < _LOST)

    def exactly(fraction: Fraction) -> Fraction:
        exact = jax.checkpoint(_by_halves)(state, peak, chunk)
        return Fraction(
            jnp.where(lost[..., None], exact.top, fraction.top),
            jnp.where(lost, exact.bottom, fraction.bottom),
            jnp.where(lost, exact.size, fraction.size),
            jnp.where(lost, exact.shift, fraction.shift),
        )

    return jax.lax.cond(lost.any(), exactly, lambda fraction: fraction, fraction)


def _by_halves(state: LinearState, peak: Array, chunk: Chunk) -> Fraction:
    """The rows of a chunk, each referred to its own running peak.

    Pairs are split as in a merge sort: at each level the second half of a block looks
    at the first half, through the running peak at the boundary. Keys of the first half
    lie below that peak and it lies below the peaks of the second half: all factors are
    at most 1. log₂ T levels, each as dear as the chunk itself.
    """
    query, key, run = chunk.query, chunk.key, chunk.run
    signed = query.amplitude is not None
    running = _highest(_started(peak, key), run)
    shift = _finite(_largest(query.raised(running[:, :, None])))
    query = query.raised(-shift)
    before = query.raised(peak[:, :, None, None])
    if run is not None:
        before = before.where((run == run[:, :1])[:, None, None])
    past = _look(state, before.weights(), shift[..., 0], signed)

    @jax.checkpoint
    def level(scores: Array, half: Array) -> tuple[Array, None]:
        return scores + _across(chunk._replace(query=query), running, half), None

    length = chunk.value.shape[2]
    halves = 2 ** jnp.arange(max(length - 1, 0).bit_length())
    oneself = jnp.eye(length, dtype=past.top.dtype)[None, None, None]
    scores = _itself(query, key)[..., None] * oneself
    scores, _ = jax.lax.scan(level, scores, halves)
    return _and_scores(past, scores, chunk.value, signed)


def _itself(query: Powers, key: Powers) -> Array:
    """φ(q_t)·φ(k_t), from the sums of exponents: each alone may be out of range."""
    products = query.raised(key.exponent[:, :, None]).weights()
    if key.amplitude is not None:
        products = products * key.amplitude[:, :, None]
    return products.sum(axis=-1)


def _across(chunk: Chunk, running: Array, half: Array) -> Array:
    """Scores between the second half and the first of every block of 2·half rows."""
    time = jnp.arange(chunk.value.shape[2])
    block, second = time // (2 * half), (time // half) % 2 == 1
    last = jnp.minimum(block * 2 * half + half - 1, len(time) - 1)  # of the first half
    boundary = running[:, :, last]
    near, far = second[None], ~second[None]
    if chunk.run is not None:
        same = chunk.run == chunk.run[:, last]
        near, far = near & same, far & same
    left = chunk.key.raised(-_finite(boundary)).where(far[:, None])
    right = chunk.query.raised(boundary[:, :, None]).where(near[:, None, None])
    scores = einsum("bkgtm,bksm->bkgts", right.weights(), left.weights())
    inside = (block[:, None] == block[None, :])[None, None, None]
    return scores * inside.astype(scores.dtype)
