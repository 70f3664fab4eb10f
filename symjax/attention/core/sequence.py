"""Time split over an axis of a mesh in a `jax.shard_map`, and segments of time.

Each device holds a part of the tokens, in the order of the axis. All parts are equally
long. Score mechanisms need the keys of other devices. Recurrences need only the state
after the tokens of all earlier devices.

Nothing here uses `psum`: in a `jax.shard_map` with check_vma=False the derivative of
`psum` is another `psum`, so with n devices a gradient is n times too large.

A segment is a run of equal ids; its tokens see no token of another segment.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from symjax.attention.core.meshes import sharded_like_first


@sharded_like_first
def segment_runs(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Return the number of the segment of each token, counted from 0."""
    return jnp.cumsum(id_changes(segment_ids), axis=1)


def id_changes(ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Return True for tokens whose id is not that of the token before them.

    They are the first tokens of all segments except the first segment.
    """
    return ids != jnp.concatenate([ids[:, :1], ids[:, :-1]], axis=1)


def gather(tree: Any, axis_name: str) -> Any:
    """Return arrays [B T …] with the tokens of all devices."""

    def gather_array(x: Array) -> Array:
        return jax.lax.all_gather(x, axis_name, axis=1, tiled=True)

    return jax.tree.map(gather_array, tree)


def first_token(query: Array, key: Array, axis_name: str) -> Int[Array, ""]:
    """Return the position of the first token of this device.

    Raises:
        ValueError: query and key [B T …] differ in length.
    """
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            f"time split over {axis_name!r} needs as many keys as queries, got query "
            f"{query.shape} and key {key.shape}"
        )
    return jax.lax.axis_index(axis_name) * query.shape[1]


def segment_runs_over(
    segment_ids: Int[Array, "B T"], axis_name: str | None
) -> tuple[Int[Array, "B T"], Int[Array, "B S"]]:
    """Return the segment numbers of the tokens of this device, and of all tokens.

    Args:
        axis_name: the mesh axis that time is split over, or None.
    """
    if axis_name is None:
        runs = segment_runs(segment_ids)
        return runs, runs
    length = segment_ids.shape[1]
    runs = segment_runs(gather(segment_ids, axis_name))
    first = jax.lax.axis_index(axis_name) * length
    return jax.lax.dynamic_slice_in_dim(runs, first, length, axis=1), runs


def around_ring(
    axis_name: str,
    meet: Callable[[Any, Any, Array], tuple[Any, Any]],
    local: Any,
    moving: Any,
) -> tuple[Any, Any]:
    """Pass arrays around the ring of devices; return (local, moving) after n turns.

    In each turn every device computes (local, moving) = meet(local, moving, source),
    where `source` is the index of the device that these moving arrays began on. Between
    turns each device passes `moving` to the next device. With n devices there are n
    turns and n − 1 passes. At the end device i holds the arrays that began on device
    i + 1, and the last device those of device 0.
    """
    count, index = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)

    def turn(carry: tuple, distance: Array) -> tuple[tuple, None]:
        local, moving = meet(carry[0], carry[1], (index - distance) % count)
        return (local, pass_on(moving, axis_name)), None

    distances = jnp.arange(count - 1)
    (local, moving), _ = jax.lax.scan(turn, (local, moving), distances)
    return meet(local, moving, (index + 1) % count)


def if_seen(
    window: tuple[int | None, int | None],
    length: int,
    distance: Array,
    visit: Callable[[Any], Any],
    start: Any,
) -> Any:
    """Return visit(start), or `start` if the window hides all keys of a device.

    Args:
        length: number of tokens of a device.
        distance: index of the device of the keys minus the index of this device.
    """
    left, right = window
    seen = jnp.asarray(True)
    if left is not None:  # position of the last key − position of the first row
        seen &= (distance + 1) * length - 1 >= -left
    if right is not None:  # position of the first key − position of the last row
        seen &= (distance - 1) * length + 1 <= right
    if left is None and right is None:
        return visit(start)
    return jax.lax.cond(seen, visit, lambda start: start, start)


def pass_on(tree: Any, axis_name: str) -> Any:
    """Send arrays to the next device of a ring; return those of the previous device."""
    count = jax.lax.axis_size(axis_name)
    ring = [(device, (device + 1) % count) for device in range(count)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis_name, ring), tree)


def state_before(
    merge: Callable[[Any, Any], Any], own: Any, empty: Any, axis_name: str
) -> Any:
    """Return the merged state of all devices before this one.

    With n devices this takes 1 + ⌈log₂(n − 1)⌉ rounds. In each round a device sends one
    state.

    Args:
        merge: (earlier, later) → the state after both; it must be associative.
        own: the state after the tokens of this device alone.
        empty: the state before any token.
    """
    count, index = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)

    def from_before(state: Any, distance: int) -> Any:
        pairs = [(device, device + distance) for device in range(count - distance)]

        def receive(x: Array, nothing: Array) -> Array:
            x = jax.lax.ppermute(x, axis_name, pairs)
            return jnp.where(index >= distance, x, nothing)

        return jax.tree.map(receive, state, empty)

    state, merged = from_before(own, 1), 1  # the state of `merged` devices before
    while merged < count - 1:
        state = merge(from_before(state, merged), state)
        merged *= 2
    return state


def segment_state_before(
    merge: Callable[[Any, Any], Any],
    own: Any,
    empty: Any,
    segment: Int[Array, "B T"] | None,
    axis_name: str,
) -> Any:
    """Return the state before the first token of this device.

    The state has read those tokens of earlier devices that are in the segment of the
    first token.

    Args:
        own: the state of the last segment on this device, arrays [B …].
        segment: segment numbers of the tokens of this device, counted over all devices.
    """
    if segment is None:
        return state_before(merge, own, empty, axis_name)

    def merge_segments(earlier: tuple, later: tuple) -> tuple:
        """Merge two (state, segment); if the segments differ, return the later one."""
        merged = merge(earlier[0], later[0])
        return choose(earlier[1] == later[1], merged, later[0]), later[1]

    last = segment[:, -1]
    nothing = (empty, jnp.full_like(last, -1))
    state, before = state_before(merge_segments, (own, last), nothing, axis_name)
    return choose(before == segment[:, 0], state, empty)


def choose(condition: Array, chosen: Any, otherwise: Any) -> Any:
    """Return `chosen` for examples where `condition` [B] is True, else `otherwise`."""

    def pick(a: Array, b: Array) -> Array:
        return jnp.where(condition.reshape((-1,) + (1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(pick, chosen, otherwise)
