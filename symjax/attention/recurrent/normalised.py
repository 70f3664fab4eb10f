"""Linear attention with a denominator: the recurrence of linear, cosine and Performer.

    def normalised(log_q, log_k, v):         # one head: log φ [T M] of both, v [T V]
        sums, total, running_max, out = 0, 0, -np.inf, []
        for t in range(len(v)):
            highest = np.maximum(running_max, log_k[t])
            fade, weights = np.exp(running_max - highest), np.exp(log_k[t] - highest)
            sums = sums * np.reshape(fade, (-1, 1)) + np.outer(weights, v[t])
            total, running_max = total * fade + weights, highest
            row = np.exp(log_q[t] + running_max - (log_q[t] + running_max).max())
            out.append(row @ sums / (row @ total))
        return np.stack(out)

A chunk of time is quadratic inside, where numerator and denominator share the weights
of pairs; what came before is read from the state.

The state of features with an exponent refers to `running_max`, the largest exponent of
a key so far for each feature, and a query to its own largest exponent beside that:
where amplitudes are 1, the key that set the maximum then adds at least 1 to the
denominator. Every factor is at most 1, nothing that matters underflows, no ε is needed,
and nothing depends on the future. The maxima cancel in the ratio, and are constants to
the gradient.

Features that change sign lose digits where their products cancel. Weights of pairs in a
chunk are therefore computed without features where these are polynomials or cosines;
a state is read as `centred.py` says.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.feature_maps import (
    LOST,
    Features,
    LogFeatures,
    finite,
    row_shift,
)
from symjax.attention.core.products import einsum, products, sum_dtype
from symjax.attention.recurrent.chunks import (
    Chunk,
    Stretch,
    chunk_of,
    past_pairs,
    through_segments,
    time_first,
)
from symjax.attention.recurrent.precision import (
    exact_product,
    exact_rows,
    read_centred,
    rescued,
)
from symjax.attention.recurrent.recurrence import Schedule


class LinearState(NamedTuple):
    """What linear attention keeps of the keys it has seen, in float32 at least.

    sums = Σ φ(k) vᵀ and total = Σ φ(k), both times exp(−running_max) when the features
    have an exponent: its maximum so far, over all features where they share it.
    """

    sums: Float[Array, "B K M V"]
    total: Float[Array, "B K M"]
    running_max: Float[Array, "B K M"] | Float[Array, "B K 1"] | None = None


class Rows(NamedTuple):
    """Rows of output before the division; all but the shift are times exp(−shift).

    Of stretches they are [B T K G …].
    """

    numerator: Float[Array, "B K G T V"]
    denominator: Float[Array, "B K G T"]
    size: Float[Array, "B K G T"]  # of the denominator's terms, before signs cancel
    shift: Float[Array, "B K G T"]


class Arithmetic(NamedTuple):
    """How features are multiplied and added up.

    product: an einsum, more exact where terms may cancel.
    signed: terms may cancel, so that the size of a denominator is another sum.
    leading: no weight is negative, nor are so many of a key's first features.
    """

    product: Callable[..., Array]
    signed: bool
    leading: int


class Mapped(NamedTuple):
    """A chunk as features, and its queries' divisor."""

    chunk: Chunk
    query: LogFeatures  # [B K G T M]
    divisor: Float[Array, "B K G T 1"] | None  # of the amplitude
    key: LogFeatures  # [B K T M]; 0 for hidden ones
    value: Float[Array, "B K T V"]


class Shown(NamedTuple):
    """What the rows of a chunk may see: keys by pairs, and the state if it reaches them
    (None: it reaches all)."""

    pairs: Bool[Array, "B T S"]
    sees: Bool[Array, "B T"]  # a key, by pairs
    segment: Int[Array, "B T"] | None
    reaches: Bool[Array, "B T"] | None


class Given(NamedTuple):
    """What the rows of a chunk are computed from."""

    state: LinearState
    query: LogFeatures
    key: LogFeatures
    value: Float[Array, "B K S V"]


@dataclass(frozen=True)
class Normalised:
    """The recurrence, given by its features."""

    kernel = "features"
    features: Features

    def schedule(self) -> Schedule:
        return Schedule(on_one_gpu_only=self.features.exponents)

    def empty(self, parameters: Any, sizes: tuple, dtype: Any) -> LinearState:
        batch, heads, size, value_size = sizes
        dtype = jnp.promote_types(dtype, jnp.float32)
        like = jax.ShapeDtypeStruct((batch, heads, size), dtype)
        key = jax.eval_shape(self.features.key, like, parameters)
        shape = jax.eval_shape(LogFeatures.weights, key).shape
        highest = None
        if key.exponent is not None:
            highest = jnp.full(key.exponent.shape, -jnp.inf, dtype)
        sums = jnp.zeros((*shape, value_size), dtype)
        return LinearState(sums, jnp.zeros(shape, dtype), highest)

    def advance(
        self, state: LinearState, mapped: Mapped, divided: bool = True
    ) -> tuple[LinearState, Any]:
        """All factors of a row refer to the highest exponent in its chunk.

        It may lie in the row's future. It cancels, but a later key that is far larger
        pushes earlier ones out of range: their rows are computed once more, exactly.
        """
        chunk, query, _, key, value = mapped
        how = self.arithmetic(chunk)
        empty = forgotten(state)
        before, carried, reaches, joins = through_segments(chunk, state, empty)
        pairs = past_pairs(chunk)
        if before.running_max is None or value.shape[2] == 1:
            rows = self.rows(before, mapped, pairs, reaches)
        else:
            sees = (pairs & chunk.visible[:, None, :]).any(axis=-1)
            pairs = jnp.broadcast_to(pairs, (*sees.shape, *pairs.shape[2:]))
            shown = Shown(pairs, sees, chunk.segment, reaches)
            forms = partial(_quick, how), partial(_exactly, how)
            given = Given(before, query, key, value)
            rows = cast(Rows, rescued(*forms, shown, given))
        if joins is not None:
            key = key.where(joins[:, None])
        after = update(how, carried, key, value)
        return after, jax.tree.map(time_first, divide(rows) if divided else rows)

    def effect(self, mapped: Mapped) -> tuple[LinearState, None]:
        how = self.arithmetic(mapped.chunk)
        return update(how, None, mapped.key, mapped.value), None

    def merge(self, one: tuple, two: tuple) -> tuple[LinearState, None]:
        return merge(one[0], two[0]), None

    def prepare(self, parameters: Any, stretch: Stretch) -> Mapped:
        """The largest amplitude of a query cancels in the ratio, so it is made 1:
        products of amplitudes would leave float32 long before the amplitudes do.
        """
        chunk = chunk_of(stretch)
        dtype = sum_dtype(*chunk[:3])
        query = self.features.query(chunk.query.astype(dtype), parameters)
        divisor = None
        if query.amplitude is not None and not self.features.bounded:
            divisor = jnp.abs(query.amplitude).max(axis=-1, keepdims=True)
            divisor = jax.lax.stop_gradient(jnp.where(divisor > 0, divisor, 1))
            query = query._replace(amplitude=query.amplitude / divisor)
        key = self.features.key(chunk.key.astype(dtype), parameters)
        key = key.where(chunk.visible[:, None])
        return Mapped(chunk, query, divisor, key, chunk.value.astype(dtype))

    def arithmetic(self, chunk: Chunk) -> Arithmetic:
        signed, leading = self.features.signed, self.features.leading
        product = products(*chunk[:3], cancel=signed)
        count = leading(chunk.key.shape[-1]) if leading else 0
        return Arithmetic(product, signed, count)

    def rows(
        self,
        state: LinearState,
        mapped: Mapped,
        pairs: Bool[Array, "#B T S"],
        reaches: Bool[Array, "B T"] | None = None,
    ) -> Rows:
        """Rows that see keys by pairs, and the state if it reaches them."""
        chunk, query, divisor, key, value = mapped
        scores, how = None, self.arithmetic(chunk)
        if self.features.pairs is not None:
            asking, asked = (x.astype(value.dtype) for x in (chunk.query, chunk.key))
            scores = self.features.pairs(how.product, asking, asked, divisor)
            pairs = pairs & chunk.visible[:, None]
        given = Given(state, query, key, value)
        return _rows(how, pairs, reaches, given, scores)


def forgotten(state: LinearState) -> LinearState:
    """The state of these sizes that has read nothing."""
    highest = state.running_max
    if highest is not None:
        highest = jnp.full_like(highest, -jnp.inf)
    sums, total = (jnp.zeros_like(x) for x in state[:2])
    return LinearState(sums, total, highest)


def highest_exponent(state: LinearState | None, key: LogFeatures) -> Array | None:
    """The running maximum after these keys: [B K M], or [B K 1] where it is shared."""
    if key.exponent is None:
        return None
    highest = key.exponent.max(axis=-2, initial=-jnp.inf)
    if state is not None:
        highest = jnp.maximum(cast(Array, state.running_max), highest)
    return jax.lax.stop_gradient(highest)


def row_weights(query: LogFeatures, highest: Array | None) -> tuple[Array, Array]:
    """Feature weights of at most 1, and the logarithm that was divided out of a row."""
    if highest is None:
        weights = query.weights()
        return weights, jnp.zeros_like(weights[..., 0])
    query = query.raised(highest[:, :, None, None])
    shift = row_shift(query)
    return query.raised(-shift).weights(), shift[..., 0]


def key_weights(key: LogFeatures, highest: Array | None) -> Array:
    if highest is None:
        return key.weights()
    return key.raised(-finite(highest)[:, :, None]).weights()


def rescale(state: LinearState, highest: Array | None) -> LinearState:
    """The same state relative to a higher maximum."""
    if highest is None or state.running_max is None:
        return state
    decay = jnp.exp(state.running_max - finite(highest))
    return LinearState(state.sums * decay[..., None], state.total * decay, highest)


def update(
    how: Arithmetic, state: LinearState | None, key: LogFeatures, value: Array
) -> LinearState:
    """The state after all these keys; None: before them nothing was read."""
    highest = highest_exponent(state, key)
    weights = key_weights(key, highest)
    sums = how.product("bksm,bksv->bkmv", weights, value)
    total = weights.sum(axis=-2)
    if state is not None:
        before = rescale(state, highest)
        sums, total = before.sums + sums, before.total + total
    return LinearState(sums, total, highest)


def merge(one: LinearState, two: LinearState) -> LinearState:
    """The state that has seen the keys of both, which must be different keys.

    (c, S, z) of both, c = max: S₁ exp(c₁ − c) + S₂ exp(c₂ − c), and so z. Associative
    and commutative; an empty state changes nothing.
    """
    highest = None
    if one.running_max is not None and two.running_max is not None:
        highest = jnp.maximum(one.running_max, two.running_max)
    one, two = rescale(one, highest), rescale(two, highest)
    return LinearState(one.sums + two.sums, one.total + two.total, highest)


def query_state(how: Arithmetic, state: LinearState, query: LogFeatures) -> Rows:
    """Rows that see the state and nothing else."""
    row, shift = row_weights(query, state.running_max)
    return rows_of(how, state, row, shift)


def _rows(
    how: Arithmetic,
    pairs: Bool[Array, "#B T S"],
    reaches: Bool[Array, "B T"] | None,
    given: Given,
    scores: Float[Array, "B K G T S"] | None = None,
) -> Rows:
    """Rows that see keys by pairs, and the state if it reaches them (None: all).

    scores: weights of pairs that are no products of features.
    """
    state, query, key, value = given
    highest = highest_exponent(state, key)
    row, shift = row_weights(query, highest)
    if scores is None:
        weights = key_weights(key, highest)
        scores = how.product("bkgtm,bksm->bkgts", row, weights)
    scores = scores * pairs[:, None, None].astype(scores.dtype)
    if reaches is not None:
        row = jnp.where(reaches[:, None, None, :, None], row, 0)
    return rows_of(how, rescale(state, highest), row, shift, scores, value)


def rows_of(
    how: Arithmetic,
    state: LinearState,
    row: Float[Array, "B K G T M"],
    shift: Float[Array, "B K G T"],
    scores: Float[Array, "B K G T S"] | None = None,
    value: Float[Array, "B K S V"] | None = None,
) -> Rows:
    """Rows of feature weights that see the state, and beside it keys by scores."""
    denominator = how.product("bkgtm,bkm->bkgt", row, state.total)
    size = denominator
    if how.signed:
        size = how.product("bkgtm,bkm->bkgt", *map(_size, (row, state.total)))
    if how.leading:
        sums = state.sums, state.total
        given = how.product, how.leading, *sums, row, denominator, size
        numerator, denominator = read_centred(*given)
        size = denominator
    else:
        numerator = how.product("bkgtm,bkmv->bkgtv", row, state.sums)
    if scores is not None:
        numerator = numerator + how.product("bkgts,bksv->bkgtv", scores, value)
        denominator = denominator + scores.sum(axis=-1)
        size = size + _size(scores).sum(axis=-1) if how.signed else denominator
    return Rows(numerator, denominator, jax.lax.stop_gradient(size), shift)


def _size(x: Array) -> Array:
    """Return |x|, a constant to the gradient."""
    return jnp.abs(jax.lax.stop_gradient(x))


def divide(rows: Rows) -> Float[Array, "*rows V"]:
    """numerator / denominator, and zeros where that is nothing but rounding.

    Both are first divided by the constant denominator: the gradient of a plain quotient
    holds its square, which overflows where it does not.
    """
    tolerance = 8 * jnp.finfo(rows.denominator.dtype).eps
    constant, size = jax.lax.stop_gradient((rows.denominator, rows.size))
    some = jnp.abs(constant) > tolerance * size
    scale = 1 / jnp.where(some, constant, jnp.inf)
    ones = jnp.where(some, rows.denominator * scale, 1)
    return einsum("...v,...->...v", rows.numerator * scale[..., None], 1 / ones)


def _quick(
    how: Arithmetic, shown: Shown, given: Given
) -> tuple[Rows, Bool[Array, "B K G T"]]:
    """Rows, and which of them see a key but have lost all of them to rounding."""
    pairs, sees, _, reaches = shown
    rows, highest = _rows(how, pairs, reaches, given), given.state.running_max
    remembers = ~jnp.isneginf(cast(Array, highest)).all(axis=-1)[..., None]
    if reaches is not None:
        remembers = remembers & reaches[:, None]
    some = (sees[:, None] | remembers)[:, :, None]
    return rows, some & (jax.lax.stop_gradient(rows.size) < LOST)


def _exactly(how: Arithmetic, shown: Shown, given: Given) -> Rows:
    state, query, key, value = given
    read = partial(rows_of, how._replace(product=exact_product), state)
    highest = cast(Array, state.running_max)
    return exact_rows(read, highest, query, key, value, shown.pairs, shown.reaches)
