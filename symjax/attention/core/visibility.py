"""Visibility of keys to rows: masks, causality, windows, segments."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

# Position of keys that `map_keys` adds. Only windows with two bounds get such keys, and
# their left bound hides this position from all rows.
BEFORE_WINDOWS = -(2**30)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "row_positions",
        "key_positions",
        "mask",
        "row_segments",
        "key_segments",
    ),
    meta_fields=("window", "mask_self", "length", "consecutive"),
)
@dataclass(frozen=True)
class Visibility:
    """Keys that each row (each query) sees, given the positions of rows and keys.

    A row at position t sees a key if

    - the position of the key is between t − left and t + right,
    - the mask allows the pair, and
    - both are in the same segment.

    The first axis of all arrays is the batch; it has length 1 if all examples are
    alike.

    Attributes:
        row_positions, key_positions: counted from 0 in the sequence of all keys.
        mask: True = attend.
        row_segments, key_segments: the number of the segment of each token.
        window: (left, right); None means no bound. Causal attention has right = 0.
        mask_self: hide from each row the key at the position of the row, unless the row
            sees no other key.
        length: number of all keys; the arrays may have only some of them.
        consecutive: whether each row is one position after the row before it.
    """

    row_positions: Int[Array, "#B t"]
    key_positions: Int[Array, "#B s"]
    mask: Bool[Array, "#B #N #t #s"] | None = None
    row_segments: Int[Array, "#B t"] | None = None
    key_segments: Int[Array, "#B s"] | None = None
    window: tuple[int | None, int | None] = (None, None)
    mask_self: bool = False
    length: int = 0
    consecutive: bool = True

    def map_keys(self, function: Callable) -> "Visibility":
        """Return the visibility with function(array, axis of keys, fill) applied.

        The function is applied to every array with an axis of keys. `fill` is the value
        for keys that the function adds, 0 if it is not passed.
        """
        return replace(
            self,
            key_positions=function(self.key_positions, 1, BEFORE_WINDOWS),
            mask=function(self.mask, 3),
            key_segments=function(self.key_segments, 1),
        )

    def distance(self) -> Int[Array, "#B 1 t s"]:
        """Return row position − key position; it is negative for later keys."""
        return (
            self.row_positions[:, None, :, None] - self.key_positions[:, None, None, :]
        )

    def pairs(self) -> Bool[Array, "#B #N #t s"] | None:
        """Return True for the pairs in which the row sees the key; None means all."""
        (left, right), allowed = self.window, []
        if self.mask is not None:
            # `count` sums over the axis of keys, so a mask with one entry is broadcast.
            shape = (*self.mask.shape[:3], self.key_positions.shape[1])
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
            allowed.append((self.distance() != 0) | self._see_only_themselves(others))
        return reduce(jnp.logical_and, allowed) if allowed else None

    def count(self, visible: Array | None) -> Int[Array, "#B #N #t 1"]:
        """Return the number of keys that each row sees.

        Args:
            visible: `pairs()` of these rows with all keys.
        """
        if visible is not None and self._depends_on_tokens():
            return visible.sum(axis=-1, keepdims=True)
        before, after = self._keys_in_window()
        count = jnp.maximum(before + after + 1, 0)
        if self.mask_self:
            rows = self.row_positions[:, None, :, None]
            count -= (0 <= rows) & (rows < self.length) & (count > 1)
        return count

    def _depends_on_tokens(self) -> bool:
        """Return whether visibility depends on more than positions."""
        return self.mask is not None or self.row_segments is not None

    def _keys_in_window(self) -> tuple[Array, Array]:
        """Return the numbers of keys before and after each row, [#B 1 t 1]."""
        (left, right), rows = self.window, self.row_positions[:, None, :, None]
        before, after = rows, self.length - 1 - rows
        if left is not None:
            before = jnp.minimum(before, left)
        if right is not None:
            after = jnp.minimum(after, right)
        return before, after

    def _see_only_themselves(self, others: Array) -> Bool[Array, "#B #N #t 1"]:
        """Return True for rows that see no key at another position.

        Args:
            others: visible pairs of a row and a key at another position.
        """
        if self._depends_on_tokens():
            return ~others.any(axis=-1, keepdims=True)
        before, after = self._keys_in_window()
        return (before + after) <= 0


def slice_axis(
    x: Array | None, axis: int, _: int = 0, *, start: int | Array, size: int
) -> Array | None:
    """Return `size` entries of an axis from `start` on.

    An axis of length 1 or `size` stays as it is. The third argument is ignored:
    `map_keys` passes a fill value.
    """
    if x is None or x.shape[axis] in (1, size):
        return x
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def visible_keys(
    mask: Bool[Array, "#B 1 1 #S"] | None, batch: int, length: int
) -> Bool[Array, "B S"]:
    """Return True for visible keys, given a mask that is the same for all rows."""
    if mask is None:
        return jnp.ones((batch, length), bool)
    mask = jax.lax.expand_dims(mask, range(4 - mask.ndim))
    return jnp.broadcast_to(mask[:, 0, 0], (batch, length))


def hidden_as_zero(
    visible: Bool[Array, "#B #S"], *arrays: Shaped[Array, "B S K _"]
) -> tuple[Array, ...]:
    """Return keys, values and other arrays of keys, with 0 for hidden keys.

    NaN and infinity in hidden keys then reach no output and no gradient. NaN in a query
    still reaches its own row. It may also reach the gradients of all visible keys, even
    of those that its row does not see, because 0 · NaN is NaN. So set queries of
    padding to zero.
    """
    return tuple(jnp.where(visible[:, :, None, None], x, 0) for x in arrays)
