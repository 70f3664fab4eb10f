"""Which keys a row sees: masks, causality, windows, segments.

Entropy-invariant scaling: the scores of a row by the logarithm of what it sees.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

HIDDEN = -(2**30)  # a position that is beyond any window


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("rows", "keys", "mask", "row_segments", "key_segments"),
    meta_fields=("window", "mask_self", "length", "consecutive"),
)
@dataclass(frozen=True)
class Visibility:
    """Which keys each row sees, given the positions of rows and keys in time.

    A row at t sees the keys from t − left to t + right that mask and segments leave.
    All arrays have an axis of examples, of length 1 where examples are alike.

    Attributes:
        mask: True = attend.
        row_segments, key_segments: the number of a token's run of equal ids.
        window: (left, right); None: no bound. Causality is right = 0.
        mask_self: hide a row's own position, unless it sees nothing else.
        length: how many keys there are; `keys` may be a part of them.
        consecutive: each row stands one place after the one before.
    """

    rows: Int[Array, "#B t"]
    keys: Int[Array, "#B s"]
    mask: Bool[Array, "#B #N #t #s"] | None = None
    row_segments: Int[Array, "#B t"] | None = None
    key_segments: Int[Array, "#B s"] | None = None
    window: tuple[int | None, int | None] = (None, None)
    mask_self: bool = False
    length: int = 0
    consecutive: bool = True

    def map_keys(self, function: Callable) -> "Visibility":
        """function(array, axis of keys, what fills it up) of every array."""
        return replace(
            self,
            keys=function(self.keys, 1, HIDDEN),
            mask=function(self.mask, 3),
            key_segments=function(self.key_segments, 1),
        )

    def distance(self) -> Int[Array, "#B 1 t s"]:
        """How far before its row a key stands; below 0 where it comes later."""
        return self.rows[:, None, :, None] - self.keys[:, None, None, :]

    def pairs(self) -> Bool[Array, "#B #N #t s"] | None:
        """The pairs (row, key) that every restriction allows; None if all are."""
        (left, right), allowed = self.window, []
        if self.mask is not None:  # with an entry a key, so that keys can be counted
            shape = (*self.mask.shape[:3], self.keys.shape[1])
            allowed.append(jnp.broadcast_to(self.mask, shape))
        if left is not None:
            allowed.append(self.distance() <= left)
        if right is not None:
            allowed.append(self.distance() >= -right)
        if self.row_segments is not None and self.key_segments is not None:
            rows, keys = self.row_segments, self.key_segments
            allowed.append(rows[:, None, :, None] == keys[:, None, None, :])
        if self.mask_self:
            others = reduce(jnp.logical_and, allowed, self.distance() != 0)
            alone = self._alone(others)
            allowed.append((self.distance() != 0) | alone)
        return reduce(jnp.logical_and, allowed) if allowed else None

    def count(self, visible: Array | None) -> Int[Array, "#B #N #t 1"]:
        """How many keys each row sees; `visible` are its pairs with all of them."""
        if visible is not None and self._depends_on_tokens():
            return visible.sum(axis=-1, keepdims=True)
        before, after = self._neighbours()
        count = jnp.maximum(before + after + 1, 0)
        if self.mask_self:
            rows = self.rows[:, None, :, None]
            count -= (0 <= rows) & (rows < self.length) & (count > 1)
        return count

    def _depends_on_tokens(self) -> bool:
        """Whether a mask or segments decide who is seen, beside positions."""
        return self.mask is not None or self.row_segments is not None

    def _neighbours(self) -> tuple[Array, Array]:
        """How many keys before and after its own each row may see, [#B 1 t 1]."""
        (left, right), rows = self.window, self.rows[:, None, :, None]
        before, after = rows, self.length - 1 - rows
        if left is not None:
            before = jnp.minimum(before, left)
        if right is not None:
            after = jnp.minimum(after, right)
        return before, after

    def _alone(self, others: Array) -> Bool[Array, "#B #N #t 1"]:
        """The rows that see nothing but themselves."""
        if self._depends_on_tokens():
            return ~others.any(axis=-1, keepdims=True)
        before, after = self._neighbours()
        return (before + after) <= 0


def part(
    x: Array | None, axis: int, _: int = 0, *, start: int | Array, size: int
) -> Array | None:
    """`size` entries of an axis from `start` on; one that is broadcast stays."""
    if x is None or x.shape[axis] in (1, size):
        return x
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def visible_keys(
    mask: Bool[Array, "#B 1 1 #S"] | None, batch: int, length: int
) -> Bool[Array, "B S"]:
    """The keys that a mask which only hides keys leaves."""
    if mask is None:
        return jnp.ones((batch, length), bool)
    mask = jax.lax.expand_dims(mask, range(4 - mask.ndim))
    return jnp.broadcast_to(mask[:, 0, 0], (batch, length))


def only_seen(
    seen: Bool[Array, "#B #S"], *arrays: Shaped[Array, "B S K _"]
) -> tuple[Array, ...]:
    """Keys, values and the like, with 0 for the keys that are not seen.

    A NaN or infinity in them then reaches no output and no gradient. One in a query
    still reaches its own row, and may reach the gradient of every key, seen or not:
    0 · NaN is NaN. Put zeros into queries that hold no token.
    """
    return tuple(jnp.where(seen[:, :, None, None], x, 0) for x in arrays)


SHORTEST = 16  # visible keys below which the length scale no longer shrinks


def length_scale(visible: Int[Array, "*shape"], base: float) -> Shaped[Array, "*shape"]:
    """log n / log base, the entropy-invariant factor of a row that sees n keys.

    In a causal model n is the row's own count, so that decoding a token gives what
    the whole sequence gave. Counts below 16 are taken as 16: a short row would
    otherwise be blurred.

    Args:
        base: above 1, as `softmax` sees to.
    Source: Su Jianlin 2021, spaces.ac.cn/archives/8823 and 9588 (base 512).
    """
    return jnp.log(jnp.maximum(visible, SHORTEST).astype(float)) / math.log(base)
