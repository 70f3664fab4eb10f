"""Arrays of one call, and the static settings of a call of a score mechanism."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.meshes import rows_as
from symjax.attention.core.visibility import Visibility


class Tokens(NamedTuple):
    """Arrays of one call of a recurrence, as the caller passed them.

    `operands` are the arrays besides query, key and value, for instance log-decays. The
    class `ScoreArrays` has all arrays of a call of a score mechanism.
    """

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]
    operands: tuple[Any, ...] = ()  # one entry per token, [#B #T K …]
    mask: Bool[Array, "#B 1 1 #S"] | None = None
    segment_ids: Int[Array, "B T"] | None = None


# (scores [B N t s], visible pairs or None for all) → weights, zero for hidden pairs; or
# (weights, divisor [B N t 1]), where the divisor is applied to the rows of the output.
RowWeights = Callable[[Array, Array | None], Array | tuple[Array, Array]]


class Adjustment(NamedTuple):
    """Changes of scores by arrays of the call: forget gates, a sink, a law of length.

    No kernel supports them. The ring refuses `law`.

    Attributes:
        row_decay, key_decay: sums of the log-decays up to each row and up to each key.
            The absolute value of their difference is subtracted from the score.
        sink: logit of one more key without a value, which every row sees.
        law: slope and power of a factor of each row (`lengths.adaptive_scale`).
    """

    row_decay: Float[Array, "#B Nq T 1"] | None = None
    key_decay: Float[Array, "#B Nq 1 S"] | None = None
    sink: Float[Array, "1 Nq 1 1"] | None = None
    law: tuple[Float[Array, "#B Nq #T 1"], ...] | None = None

    def map_rows(self, function: Callable) -> "Adjustment":
        return self._replace(
            row_decay=function(self.row_decay, 2),
            law=jax.tree.map(lambda x: function(x, 2), self.law),
        )

    def map_keys(self, function: Callable) -> "Adjustment":
        return self._replace(key_decay=function(self.key_decay, 3))


class ScoreArrays(NamedTuple):
    """All arrays of one call of a score mechanism; axes of length 1 are broadcast.

    Nq and Nk are the heads of query and key, N the output heads. Heads come before
    time, which is 3 to 11 % faster on a CPU.
    """

    query: Float[Array, "B Nq T H"]
    key: Float[Array, "B Nk S H"]
    value: Float[Array, "B K S V"]
    bias: Float[Array, "#B #Nq #T #S"] | None
    slopes: Float[Array, "1 Nq 1 1"] | None
    lam: Float[Array, "#B N #T"] | None
    scale: Float[Array, ""]
    visibility: Visibility
    adjustment: Adjustment | None = None

    def swapped(self) -> "ScoreArrays":
        """Return the arrays with heads and time of query, key and value exchanged."""
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in self[:3])
        return self._replace(query=query, key=key, value=value)

    def branch(self, index: int, signals: int) -> "ScoreArrays":
        """Return the arrays of one branch of all differential heads.

        Branch 0 has the signal heads and their keys, branch 1 the noise heads and their
        keys. Both have all values and λ.

        Args:
            signals: number of signal heads before each noise head.
        """

        def heads(x: Array | None, signals: int = signals) -> Array | None:
            if x is None or x.shape[1] == 1:
                return x
            if index == 1 or signals == 1:
                return x[:, index * signals :: signals + 1]
            groups = x.reshape(x.shape[0], -1, signals + 1, *x.shape[2:])
            return groups[:, :, :-1].reshape(x.shape[0], -1, *x.shape[2:])

        return self._replace(
            query=heads(self.query),
            key=heads(self.key, self.signal_keys) if self.signal_keys else self.key,
            bias=heads(self.bias),
            slopes=heads(self.slopes),
            visibility=replace(self.visibility, mask=heads(self.visibility.mask)),
            adjustment=jax.tree.map(heads, self.adjustment),
        )

    @property
    def signal_keys(self) -> int:
        """Number of signal keys before each noise key; 0 if branches share keys."""
        return signal_keys(self.key.shape[1], self.value.shape[1])

    def repeat_noise(self, signals: int) -> "ScoreArrays":
        """Return the arrays with each noise head repeated for each signal head."""

        def heads(x: Array | None, signals: int = signals) -> Any:
            if x is None or x.shape[1] == 1:
                return x
            return repeat_noise(x, signals, axis=1)

        return self._replace(
            query=heads(self.query),
            key=heads(self.key, self.signal_keys) if self.signal_keys else self.key,
            bias=heads(self.bias),
            slopes=heads(self.slopes),
            visibility=replace(self.visibility, mask=heads(self.visibility.mask)),
            adjustment=jax.tree.map(heads, self.adjustment),
        )

    def map_rows(self, function: Callable) -> "ScoreArrays":
        """Return the arrays with function(array, axis of rows) applied.

        The function is applied to every array that may have an axis of rows.
        """
        visibility, adjustment = self.visibility, self.adjustment
        return self._replace(
            query=function(self.query, 2),
            bias=function(self.bias, 2),
            lam=function(self.lam, 2),
            adjustment=adjustment and adjustment.map_rows(function),
            visibility=replace(
                visibility,
                row_positions=function(visibility.row_positions, 1),
                mask=function(visibility.mask, 2),
                row_segments=function(visibility.row_segments, 1),
            ),
        )

    def map_keys(self, function: Callable) -> "ScoreArrays":
        """Return the arrays with function(array, axis of keys) applied.

        The function is applied to every array that may have an axis of keys. For arrays
        of the visibility it also gets a fill value, see `Visibility.map_keys`.
        """
        adjustment = self.adjustment
        return self._replace(
            key=function(self.key, 2),
            value=function(self.value, 2),
            bias=function(self.bias, 3),
            adjustment=adjustment and adjustment.map_keys(function),
            visibility=self.visibility.map_keys(function),
        )


class ScoreSettings(NamedTuple):
    """Static settings of one call of a score mechanism.

    Attributes:
        weights: function that computes the weights of rows from their scores.
        scale: factor of the scores; None if it is known only at run time.
        length_base: base of the entropy-invariant scale, or None.
        length_scale: another law of length: "floor", "distance", or "adaptive", for
            which `Adjustment.law` has the slope and power of each row.
        offset: position of row 0 among the keys; None if known only at run time.
        whole: compute all rows as one block, without checkpointing.
        dtypes: types in which keys and values are multiplied, in this order.
        block_rows, extents, few_keys: sizes of blocks; see the constants of
            `symjax.attention.scores.rows`.
        signals: with λ, number of signal heads that share a noise head.
    """

    weights: RowWeights
    scale: float | None
    length_base: float | None
    length_scale: str | None
    offset: int | None
    whole: bool
    dtypes: tuple[Any, Any]
    block_rows: int
    extents: int
    few_keys: int
    signals: int = 1


def signal_keys(key_heads: int, value_heads: int) -> int:
    """Return the number of signal keys before each noise key.

    There is one signal key for each value head. All further key heads are noise keys.
    If there are none, the result is 0.
    """
    noise_keys = key_heads - value_heads
    return value_heads // noise_keys if noise_keys else 0


def repeat_noise(x: Array, signals: int, *, axis: int = 2) -> Array:
    """Return heads (signal, …, signal, noise) as (signal, noise, signal, noise, …).

    N/r groups of r + 1 heads become 2N heads: a noise head is repeated for each signal
    head of its group.

    Args:
        signals: r, the number of signal heads before each noise head.
        axis: the axis of the heads.
    """
    if signals == 1:
        return x
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    groups = jnp.moveaxis(x.reshape(*before, -1, signals + 1, *after), axis + 1, 0)
    signal = groups[:-1]
    pairs = jnp.stack([signal, jnp.broadcast_to(groups[-1:], signal.shape)], axis=1)
    pairs = jnp.moveaxis(pairs, (0, 1), (axis + 1, axis + 2))
    return pairs.reshape(*before, -1, *after)


def spec_of_score_rows(arrays: ScoreArrays) -> P:
    """Return the sharding of output rows, which is that of the queries.

    With `lam` there are fewer output heads than query heads. Output heads are then
    sharded as the heads of the values.
    """
    batch, heads, time, _ = jax.typeof(arrays.query).sharding.spec
    if arrays.lam is not None:
        heads = jax.typeof(arrays.value).sharding.spec[1]
    return rows_as((batch, heads, time), arrays.value)
