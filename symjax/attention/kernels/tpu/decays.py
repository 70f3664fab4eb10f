"""Decay factors of the pairs and of the state of a chunk, for recurrent kernels.

Exponents are sums of log-decays. Sums are never subtracted and factors never divided.
So no digits are lost to a stronger decay of other tokens, and no factor is above 1. On
the matrix unit a sum is the product of a matrix of 0 and 1 with log-decays, which are
split into bfloat16 parts: three parts for float32, which are exact, and two if the
operands are bfloat16.

With a decay per channel a score is not multiplied by one number. So a chunk is split
into blocks of 2, 4, … 128 tokens, and each size is a level. (In XLA,
`recurrent/decays.py` splits it into blocks of one size, about the root of its length.)
In each block the later half reads the earlier half. The decay of a pair is the decay
from the key to the boundary of the halves, times the decay from there to the query.
Each level is one product of all 128 rows and keys, of which only the pairs of the level
are used.

A decay per head multiplies the scores of all pairs, by one exponential each. The
exponents are L diag(g) U, with the log-decays g. L is 1 where u ≤ t (row t, column u),
and U is 1 where u > s (row u, column s); elsewhere they are 0.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from symjax.attention.core.bfloat16_parts import in_parts
from symjax.attention.kernels.tpu.chunks import ChunkPlan
from symjax.attention.kernels.tpu.packed_heads import in_lanes, own
from symjax.attention.kernels.tpu.tiles import ACROSS, LANES, PLAIN, column, product

BLOCK = LANES  # tokens of a chunk
LEVELS = BLOCK.bit_length() - 1
DIAGONAL, LATER = -1, LEVELS  # levels of a token with itself, and with later tokens
ALL = -2  # all levels except these two
PARTS = {"bfloat16": 2, "float32": 3}  # bfloat16 parts of a log-decay
SINCE, UNTIL = LEVELS, LEVELS + 1  # sums from the start of the chunk, and to its end


class Fading:
    """Decay factors of a chunk, and the gradient of its log-decays.

    Each factor is exp of a sum of log-decays. The gradient is the sum of the results of
    the `gradient_by_…` methods: [c P·H] for decays per channel, [P c] for decays per
    head. This base class is for chunks without a decay.
    """

    levels: Sequence[int] = (ALL,)  # levels of pairs, without DIAGONAL
    since: Any = 1.0  # [c P·H], from the chunk's start through each token
    until: Any = 1.0  # [c P·H], after each token through the chunk's end

    def __init__(self, plan: ChunkPlan):
        self.plan = plan

    @property
    def through(self) -> Any:
        """Return the factors [1 P·H] of the whole chunk."""
        return 1.0 if self.since is Fading.since else self.since[BLOCK - 1 :]

    @property
    def factors(self) -> Sequence[Any]:
        """Return the factors [c P·H] of queries and keys, for pairs of each level."""
        return [1.0] * len(self.levels)

    @property
    def weights(self) -> Sequence[Any]:
        """Return the factors [c c] of the pairs of each head, with a row per query."""
        return [1.0] * self.plan.packed

    @property
    def turned_weights(self) -> Sequence[Any]:
        """Return the transposes of `weights`, with a row per key."""
        return [1.0] * self.plan.packed

    def gradient_by_sums(self, level: int, change: Float[Array, "c P*H"]) -> Any:
        """Return the part that comes from the gradient of the sums of a level."""
        return 0.0

    def gradient_by_pairs(self, changes: list[Float[Array, "c c"]]) -> Any:
        """Return the part that comes from the exponents of the pairs of each head."""
        return 0.0

    def gradient_by_state(self, change: Float[Array, "1 P*H"]) -> Any:
        """Return the part that comes from the sums over the whole chunk."""
        return 0.0


class ByChannel(Fading):
    """Decay factors with a log-decay per channel of a key head."""

    levels = range(LEVELS)

    def __init__(self, plan: ChunkPlan, parts: Any, sums: Any):
        super().__init__(plan)
        self.parts, self.sums = parts, sums

    @cached_property
    def factors(self) -> list[Float[Array, "c P*H"]]:
        return [self._factor(level) for level in self.levels]

    @cached_property
    def since(self) -> Float[Array, "c P*H"]:
        return self._factor(SINCE)

    @cached_property
    def until(self) -> Float[Array, "c P*H"]:
        return self._factor(UNTIL)

    def _factor(self, level: int) -> Float[Array, "c P*H"]:
        parts = [self.parts[i] for i in range(self.parts.shape[0])]
        return jnp.exp(_summed(self.sums[0, level], parts))

    def gradient_by_sums(self, level: int, change: Array) -> Float[Array, "c P*H"]:
        return _summed(self.sums[1, level], in_parts(change, self.parts.shape[0]))

    def gradient_by_state(self, change: Array) -> Float[Array, "1 P*H"]:
        return change


class ByHead(Fading):
    """Decay factors with a log-decay per head."""

    def __init__(self, plan: ChunkPlan, rates: Any, order: Any, parts: int):
        super().__init__(plan)
        self.rates, self.order, self.parts = rates, order, parts
        self.up_to = order[0] != LATER  # L: row t, column u, whether u ≤ t
        self.before = pairs_of(order, ALL, 1)  # Uᵀ: row s, column u, whether s < u

    @cached_property
    def weights(self) -> list[Float[Array, "c c"]]:
        """Return exp(L diag(g) U)."""
        return self._between(self.up_to, pairs_of(self.order, ALL))

    @cached_property
    def turned_weights(self) -> list[Float[Array, "c c"]]:
        """Return exp(Uᵀ diag(g) Lᵀ)."""
        return self._between(self.before, self.order[1] != LATER)

    @cached_property
    def since(self) -> Float[Array, "c P*H"]:
        return self._in_lanes(self.up_to)

    @cached_property
    def until(self) -> Float[Array, "c P*H"]:
        return self._in_lanes(self.before)

    def gradient_by_sums(self, level: int, change: Array) -> Any:
        if level not in (SINCE, UNTIL):
            return 0.0
        taken = self.up_to if level == SINCE else self.before
        return self._rows(
            jnp.where(taken, x, 0).sum(axis=0, keepdims=True)
            for x in self._by_head(change)
        )

    def gradient_by_pairs(self, changes: list[Array]) -> Float[Array, "P c"]:
        """Return the diagonal of Lᵀ change Uᵀ."""
        before = _as_numbers(self.before)
        found = []
        for change in changes:
            parts = in_parts(change, self.parts)
            later = reduce(jnp.add, [product(x, before, PLAIN) for x in parts])
            found.append(jnp.where(self.up_to, later, 0).sum(axis=0, keepdims=True))
        return self._rows(found)

    def gradient_by_state(self, change: Array) -> Float[Array, "P 1"]:
        return self._rows(self._by_head(change))

    def _between(
        self, first: Bool[Array, "c c"], last: Bool[Array, "c c"]
    ) -> list[Float[Array, "c c"]]:
        rates = [column(self._rates(i)) for i in range(self.plan.packed)]
        parts = [in_parts(jnp.where(last, x, 0), self.parts) for x in rates]
        return [jnp.exp(_summed(_as_numbers(first), x)) for x in parts]

    def _rates(self, head: int) -> Float[Array, "1 c"]:
        return self.rates[head : head + 1, :]

    def _in_lanes(self, taken: Bool[Array, "c c"]) -> Float[Array, "c P*H"]:
        """Return exp of each token's sum of log-decays.

        Args:
            taken: whether the sum of token t (row) includes token u (column).
        """
        columns = [
            jnp.where(taken, self._rates(i), 0).sum(axis=1, keepdims=True)
            for i in range(self.plan.packed)
        ]
        return jnp.exp(in_lanes(columns, (BLOCK, self.plan.widths[1])))

    def _by_head(self, x: Float[Array, "_ P*H"]) -> list[Float[Array, "_ 1"]]:
        """Return the sums over the channels of each head."""
        size = self.plan.head_size
        heads = [own(x, size, i) for i in range(self.plan.packed)]
        return [head.sum(axis=1, keepdims=True) for head in heads]

    def _rows(self, rows: Iterable[Float[Array, "1 _"]]) -> Float[Array, "P _"]:
        """Stack one row of each head."""
        first, *others = rows
        found = jnp.broadcast_to(first, (self.plan.packed, first.shape[1]))
        index = jax.lax.broadcasted_iota(jnp.int32, found.shape, 0)
        for i, row in enumerate(others, 1):
            found = jnp.where(index == i, row, found)
        return found


def fading_of(plan: ChunkPlan, refs: Any) -> Fading:
    """Return the factors of a chunk, from the `GatedOperands` of a kernel."""
    if refs.by_channel is not None:
        return ByChannel(plan, refs.by_channel, refs.sums)
    if refs.by_head is None:
        return Fading(plan)
    return ByHead(plan, refs.by_head, refs.levels, PARTS[refs.value.dtype.name])


def constants(by_channel: bool) -> tuple[Array | None, Array]:
    """Return the matrices that sum log-decays, and the level of each pair.

    Returns:
        sums: [2 LEVELS+2 c c]: matrices of 0 and 1, and their transposes; None unless
            decays are per channel.
        levels: [2 c c]: a matrix with a row per query, and one with a row per key.
    """
    row, other = np.arange(BLOCK)[:, None], np.arange(BLOCK)
    levels = np.frexp(row ^ other)[1] - 1  # the highest bit that differs; -1: none
    levels = np.where(other <= row, levels, LATER).astype(np.int32)
    both = jnp.asarray(np.stack([levels, levels.T]))
    if not by_channel:
        return None, both
    sums = []
    for level in range(LEVELS):
        same = row >> level == other >> level
        later = (row >> level) % 2 == 1
        sums.append(same & np.where(later, other <= row, other > row))
    sums += [other <= row, other > row]
    sums = np.stack([np.stack(sums), np.stack([x.T for x in sums])])
    return jnp.asarray(sums, jnp.bfloat16), both


def pairs_of(levels: Any, level: int, turned: int = 0) -> Bool[Array, "c c"]:
    """Return the pairs of a level, with a row per query; if `turned`, a row per key."""
    found = levels[turned]
    if level == ALL:
        return (found != DIAGONAL) & (found != LATER)
    return found == level


def scores_of(
    plan: ChunkPlan,
    refs: Any,
    fading: Fading,
    reading: Float[Array, "c P*H"],
    key: Float[Array, "c P*H"],
    with_own: bool = True,
) -> list[Float[Array, "c c"]]:
    """Return for each head x_t·k_s times the decay from s to t, for s ≤ t.

    Args:
        reading: x, queries or keys that read the state.
        with_own: whether to include s = t.
    """
    dtype, found = refs.value.dtype, []
    faded = [(key * factor).astype(dtype) for factor in fading.factors]
    for i in range(plan.packed):
        mine = own(reading, plan.head_size, i)
        scores = jnp.zeros((BLOCK, BLOCK), jnp.float32)
        if with_own:
            whole = product(mine.astype(dtype), key.astype(dtype), ACROSS)
            scores = jnp.where(pairs_of(refs.levels, DIAGONAL), whole, scores)
        rows = [(mine * factor).astype(dtype) for factor in fading.factors]
        by_level = [product(x, y, ACROSS) for x, y in zip(rows, faded, strict=True)]
        for level, x in zip(fading.levels, by_level, strict=True):
            scores = jnp.where(pairs_of(refs.levels, level), x, scores)
        found.append(scores * fading.weights[i])
    return found


def through_pairs(
    plan: ChunkPlan,
    refs: Any,
    fading: Fading,
    readers: list[Float[Array, "c P*H"]],
    key: Float[Array, "c P*H"],
    rows: list[Float[Array, "c P*V"]],
    written: Float[Array, "c P*V"],
    scores: list[list[Float[Array, "c c"]]],
) -> tuple[list[Array], Array, Any]:
    """Return what pairs add to the gradients of readers, keys and log-decays.

    Args:
        readers: queries, and for the delta rule the keys that read the state. Queries
            see the key of their own token, and other readers do not.
        rows: the gradients of the rows that each reader reads.
        written: what tokens write at their keys.
        scores: of each reader, by head.
    """
    dtype, heads = written.dtype, range(plan.packed)
    gradients = []  # of each head's pairs, [t s] and [s t], for each reader
    changed = []  # gradients of the exponents of each head's pairs
    for i in heads:
        mine = [own(x, plan.value_size, i) for x in rows]
        by_row = [product(x, written, ACROSS) for x in mine]
        both = zip(by_row, scores, strict=True)
        changed.append(reduce(jnp.add, [x * y[i] for x, y in both]))
        here, turned = fading.weights[i], fading.turned_weights[i]
        gradients.append(
            [
                (x * here, product(written, y, ACROSS) * turned)
                for x, y in zip(by_row, mine, strict=True)
            ]
        )

    def of_level(level: int, reading: list[Array], faded: Array) -> tuple[list, Array]:
        of_faded = jnp.zeros_like(faded)
        of_reading = [of_faded] * len(reading)
        for i in heads:
            past = own(faded, plan.head_size, i).astype(dtype)
            for j, x in enumerate(reading):
                row = own(x, plan.head_size, i).astype(dtype)
                by_row, by_key = (
                    jnp.where(pairs_of(refs.levels, level, turned), y, 0).astype(dtype)
                    for turned, y in enumerate(gradients[i][j])
                )
                of_reading[j] += product(by_row, past, PLAIN)
                of_faded += product(by_key, row, PLAIN)
        return of_reading, of_faded

    (first,), key_change = of_level(DIAGONAL, readers[:1], key)
    changes = [first, *[jnp.zeros_like(first)] * (len(readers) - 1)]
    at_level = [
        ([x * factor for x in readers], key * factor) for factor in fading.factors
    ]
    found = [of_level(x, *y) for x, y in zip(fading.levels, at_level, strict=True)]
    decay_change = fading.gradient_by_pairs(changed)
    for i, (of_reading, of_faded) in enumerate(found):
        reading, faded = at_level[i]
        of_sums = of_faded * faded
        for j, x in enumerate(of_reading):
            changes[j] += x * fading.factors[i]
            of_sums += x * reading[j]
        key_change += of_faded * fading.factors[i]
        decay_change += fading.gradient_by_sums(fading.levels[i], of_sums)
    return changes, key_change, decay_change


def decay_costs(plan: ChunkPlan, operands: Any) -> list[tuple[int, int]]:
    """Return the costs of log-decays in the forward and the backward kernel.

    Each is a pair: the MXU passes that sum the log-decays of a chunk, and the
    exponentials of one token for all heads of a tile. A pass is a product of 128 rows
    with a tile of 128 columns.
    """
    width = plan.widths[1]
    if operands.by_channel is not None:
        passes = operands.by_channel.shape[0] * (LEVELS + 2)
        return [(passes, width * (LEVELS + 2)), (2 * passes, width * (LEVELS + 2))]
    if operands.by_head is None:
        return [(0, 0)] * 2
    passes, pairs = PARTS[operands.value.dtype.name] * plan.packed, plan.packed * BLOCK
    return [(passes, pairs + 2 * width), (3 * passes, 2 * (pairs + width))]


def _summed(matrix: Array, parts: list[Array]) -> Float[Array, "c _"]:
    return reduce(jnp.add, [product(matrix, x, PLAIN) for x in parts])


def _as_numbers(x: Bool[Array, "c c"]) -> Float[Array, "c c"]:
    return jnp.where(x, 1.0, 0.0).astype(jnp.bfloat16)
