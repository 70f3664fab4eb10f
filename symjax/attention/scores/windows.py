"""Windows with two bounds: the row-block engine with only the keys in the window.

Time is cut into strips of rows, and each strip becomes an example with its own keys.
The engine then reads and writes O(T (left + right)) numbers, forward and backward,
instead of O(T S).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.core.meshes import on_any_mesh
from symjax.attention.core.operands import (
    ScoreArrays,
    ScoreSettings,
    spec_of_score_rows,
)
from symjax.attention.scores.rows import attend_rows, widened


@on_any_mesh("settings", specs=spec_of_score_rows)
def attend_window(
    settings: ScoreSettings, arrays: ScoreArrays
) -> Float[Array, "B N T V"]:
    """Return the same rows as `attend_rows`, for a window bounded on both sides."""
    batch, _, time, _ = arrays.query.shape
    if time == 1:
        return attend_rows(settings, _keys_around_one_row(arrays))
    size = _strip_size(settings, arrays)
    if not size:
        return attend_rows(settings, arrays)
    rows = attend_rows(*_strips(settings, widened(arrays), size))
    rows = rows.reshape(batch, -1, *rows.shape[1:]).swapaxes(1, 2)
    return rows.reshape(batch, rows.shape[1], -1, rows.shape[-1])[:, :, :time]


def _strip_size(settings: ScoreSettings, arrays: ScoreArrays) -> int:
    """Return the number of rows of a strip; 0 where strips do not help.

    Strips are at least as long as the longer side of the window. They help only if
    there are more than two strips. With a mask or bias [T S] strips would save no
    memory, since this array is as large as the map.
    """
    left, right = arrays.visibility.window
    pairs = [x for x in (arrays.bias, arrays.visibility.mask) if x is not None]
    if left is None or right is None or settings.offset is None or settings.whole:
        return 0
    if any(x.shape[2] > 1 and x.shape[3] > 1 for x in pairs):
        return 0
    blocks = max(settings.extents, -(-max(left, right) // settings.block_rows))
    size = blocks * settings.block_rows
    return size if arrays.query.shape[2] > 2 * size else 0


def _strips(
    settings: ScoreSettings, arrays: ScoreArrays, size: int
) -> tuple[ScoreSettings, ScoreArrays]:
    """Return strips of `size` rows as examples, each with the keys in its window.

    The keys of a strip are those of its own rows, and those of the strip before and of
    the strip after it if the window reaches there. So each key has up to three copies.
    """
    before, after = (int(bool(x)) for x in arrays.visibility.window)
    offset = settings.offset or 0
    batch, _, time, _ = arrays.query.shape
    count = -(-time // size)

    def cut(x: Array | None, axis: int, fill: int, front: int, near: int):
        """Return [B … S …] as [B·count … near·size …], with `near` strips in each.

        `front` entries of value `fill` come first.
        """
        if x is None or x.shape[axis] == 1:
            return x
        missing = (count + near - 1) * size - x.shape[axis] - front
        edges = [(0, 0, 0)] * x.ndim
        edges[axis] = (front, missing, 0)  # a negative number drops unseen keys
        x = jax.lax.pad(x, jnp.asarray(fill, x.dtype), edges)
        x = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
        shifted = [
            jax.lax.slice_in_dim(x, i, i + count, axis=axis) for i in range(near)
        ]
        x = jnp.moveaxis(jnp.concatenate(shifted, axis=axis + 1), axis, 1)
        x = jnp.broadcast_to(x, (batch, *x.shape[1:]))
        return x.reshape(batch * count, *x.shape[2:])

    def rows(x: Array | None, axis: int) -> Array | None:
        return cut(x, axis, 0, 0, 1)

    def keys(x: Array | None, axis: int, fill: int = 0) -> Array | None:
        return cut(x, axis, fill, before * size - offset, 1 + before + after)

    def repeated(x: Array) -> Array:
        """Return an array without a time axis, repeated for every strip."""
        whole = batch > 1 and x.shape[:1] == (batch,)
        return jnp.repeat(x, count, axis=0) if whole else x

    strips = jax.tree.map(repeated, arrays.map_rows(rows).map_keys(keys))
    return settings._replace(offset=before * size), strips


def _keys_around_one_row(arrays: ScoreArrays) -> ScoreArrays:
    """Return the arrays with the keys in the window of the only row of an example."""
    visibility, count = arrays.visibility, arrays.key.shape[2]
    left, right = (x or 0 for x in visibility.window)
    size = min(left + 1 + right, count)
    start = jnp.clip(visibility.row_positions[:, 0] - left, 0, count - size)

    def keys(x: Array | None, axis: int, fill: int = 0) -> Array | None:
        if x is None or x.shape[axis] == 1:
            return x
        if len(start) == 1:
            return jax.lax.dynamic_slice_in_dim(x, start[0], size, axis)
        x = jnp.broadcast_to(x, (len(start), *x.shape[1:]))
        window = partial(jax.lax.dynamic_slice_in_dim, slice_size=size, axis=axis - 1)
        return jax.vmap(window)(x, start)

    return arrays.map_keys(keys)


def attend_window_of_device(
    settings: ScoreSettings, arrays: ScoreArrays
) -> Float[Array, "B N T V"]:
    """Return the rows of one device, for time split over a mesh axis.

    The position of the first row is known only at run time. So the keys in the window
    of the device's rows are cut from the keys of all devices, before `attend_window`.
    """
    first = arrays.visibility.row_positions[0, 0]
    left, right = arrays.visibility.window
    size = arrays.query.shape[2] + (left or 0) + (right or 0)
    if left is None or right is None or size >= arrays.key.shape[2]:
        return attend_window(settings, arrays)

    def keys(x: Array | None, axis: int, fill: int = 0) -> Array | None:
        if x is None or x.shape[axis] == 1:
            return x
        edges = [(0, 0, 0)] * x.ndim
        edges[axis] = (left, right, 0)
        x = jax.lax.pad(x, jnp.asarray(fill, x.dtype), edges)
        return jax.lax.dynamic_slice_in_dim(x, first, size, axis)

    return attend_window(settings._replace(offset=left), arrays.map_keys(keys))
