"""Time split over an axis of a mesh, in a `jax.shard_map`.

Every device holds a stretch of time, of the same length on all, in the order of the
axis. Mechanisms that score pairs need the keys of other stretches; those that have a
state need what the stretches before add up to, and no key of them.

Nothing here is a sum over devices (`psum`), so that gradients are those of the
function over all of time, for any loss of the devices' outputs.

Segments: runs of equal ids, whose tokens see no other.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from symjax.attention.core.meshes import like_its_first


@like_its_first
def segment_runs(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The number of each token's run of equal ids, from 0, consecutive in time."""
    return jnp.cumsum(starts(segment_ids), axis=1)


def starts(ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """The first tokens of runs of equal ids, but for that at time 0."""
    return ids != jnp.concatenate([ids[:, :1], ids[:, :-1]], axis=1)


def gather(tree: Any, axis_name: str) -> Any:
    """All stretches of arrays [B T …], one after the other."""

    def whole(x: Array) -> Array:
        return jax.lax.all_gather(x, axis_name, axis=1, tiled=True)

    return jax.tree.map(whole, tree)


def first_token(query: Array, key: Array, axis_name: str) -> Int[Array, ""]:
    """The position of a device's first token.

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
    """The runs of equal ids of a device's own tokens, and of all tokens.

    Args:
        axis_name: the mesh axis that time is split over; None: it is not.
    """
    if axis_name is None:
        runs = segment_runs(segment_ids)
        return runs, runs
    length = segment_ids.shape[1]
    runs = segment_runs(gather(segment_ids, axis_name))
    first = jax.lax.axis_index(axis_name) * length
    return jax.lax.dynamic_slice_in_dim(runs, first, length, axis=1), runs


def around(
    axis_name: str,
    meet: Callable[[Any, Any, Array], tuple[Any, Any]],
    own: Any,
    moving: Any,
) -> tuple[Any, Any]:
    """(own, moving) ← meet(own, moving, source) on every device, once for each device
    `source` whose things are moving; last they are on the device before their own."""
    count, index = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)

    def step(carry: tuple, distance: Array) -> tuple[tuple, None]:
        own, moving = meet(carry[0], carry[1], (index - distance) % count)
        return (own, pass_on(moving, axis_name)), None

    turns = jnp.arange(count - 1)
    (own, moving), _ = jax.lax.scan(step, (own, moving), turns)
    return meet(own, moving, (index + 1) % count)


def if_seen(
    window: tuple[int | None, int | None],
    length: int,
    distance: Array,
    visit: Callable[[Any], Any],
    start: Any,
) -> Any:
    """visit(start), or `start` where no row sees a device `distance` later; each has
    `length` tokens."""
    left, right = window
    seen = jnp.asarray(True)
    if left is not None:  # its last key is near enough to the first row
        seen &= (distance + 1) * length - 1 >= -left
    if right is not None:  # its first key is near enough to the last row
        seen &= (distance - 1) * length + 1 <= right
    if left is None and right is None:
        return visit(start)
    return jax.lax.cond(seen, visit, lambda start: start, start)


def pass_on(tree: Any, axis_name: str) -> Any:
    """The arrays of the device before, of the last one for the first."""
    count = jax.lax.axis_size(axis_name)
    ring = [(device, (device + 1) % count) for device in range(count)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis_name, ring), tree)


def state_before(
    merge: Callable[[Any, Any], Any], own: Any, empty: Any, axis_name: str
) -> Any:
    """The merged states of all stretches before a device's own.

    With n devices in 1 + log₂(n − 1) rounds, rounded up, in each of which a device
    sends one state.

    Args:
        merge: (earlier, later) → the state that has read both; associative.
        own: what a device's own stretch adds up to.
        empty: the state that has read nothing.
    """
    count, index = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)

    def from_before(state: Any, distance: int) -> Any:
        pairs = [(device, device + distance) for device in range(count - distance)]

        def receive(x: Array, nothing: Array) -> Array:
            x = jax.lax.ppermute(x, axis_name, pairs)
            return jnp.where(index >= distance, x, nothing)

        return jax.tree.map(receive, state, empty)

    state, window = from_before(own, 1), 1  # of the `window` stretches before
    while window < count - 1:
        state = merge(from_before(state, window), state)
        window *= 2
    return state


def segment_state_before(
    merge: Callable[[Any, Any], Any],
    own: Any,
    empty: Any,
    segment: Int[Array, "B T"] | None,
    axis_name: str,
) -> Any:
    """`state_before` where a state is that of one segment: of the first token's.

    Args:
        own: the state of the last segment of a device's own stretch, arrays [B …].
        segment: numbers the segments of all tokens, here those of a device's own.
    """
    if segment is None:
        return state_before(merge, own, empty, axis_name)

    def merge_segments(one: tuple, two: tuple) -> tuple:
        """Stretches that end with one segment are parts of it; others replace it."""
        return choose(one[1] == two[1], merge(one[0], two[0]), two[0]), two[1]

    last = segment[:, -1]
    nothing = (empty, jnp.full_like(last, -1))
    state, before = state_before(merge_segments, (own, last), nothing, axis_name)
    return choose(before == segment[:, 0], state, empty)


def choose(where: Array, one: Any, two: Any) -> Any:
    """One state or the other for each example of the batch. where: [B]."""

    def pick(a: Array, b: Array) -> Array:
        return jnp.where(where.reshape((-1,) + (1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(pick, one, two)
