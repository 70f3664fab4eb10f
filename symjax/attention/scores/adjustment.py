"""Changes of scores by arrays: forget gates, sinks, factors by the number of keys.

    def forgetting(q, k, v, g):          # one head: q, k [T H], v [T V], g [T]
        c = np.cumsum(g)
        scores = q @ k.T / np.sqrt(q.shape[-1]) + c[:, None] - c[None]
        weights = np.tril(np.exp(scores))
        return weights @ v / weights.sum(axis=-1, keepdims=True)

    def with_sink(q, k, v, sink):        # sink: one logit
        weights = np.tril(np.exp(q @ k.T / np.sqrt(q.shape[-1])))
        return weights @ v / (weights.sum(axis=-1, keepdims=True) + np.exp(sink))

`symjax.attention.core.lengths` has the factors.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.core.operands import Adjustment, repeat_noise, signal_keys
from symjax.attention.core.sequence import gather
from symjax.attention.core.visibility import Visibility, slice_axis
from symjax.attention.scores.arguments import ScoreArguments

# Smaller log-decays count as this one. Otherwise their sum would lose the digits of
# later log-decays, and with −∞ the difference of two sums would be NaN.
LEAST_LOG_DECAY = -1e4


def adjustment_of(
    arguments: ScoreArguments, visibility: Visibility, dtype: Any
) -> Adjustment | None:
    """Return the changes of scores by arrays of a call, or None if there are none.

    Args:
        visibility: positions of the rows among the keys of all devices.
        dtype: type of the results, float32 at least.
    """
    log_decay, sink, law = arguments.log_decay, arguments.sink, arguments.length_scale
    has_law = isinstance(law, tuple)
    if log_decay is None and sink is None and not has_law:
        return None
    branches = arguments.query.shape[2] // arguments.groups
    found = Adjustment()
    if log_decay is not None:
        found = _decays(arguments, visibility, log_decay.astype(dtype))
    if sink is not None:
        sink = jnp.repeat(sink.astype(dtype), branches)[None, :, None, None]
        found = found._replace(sink=sink)
    if has_law:
        found = found._replace(
            law=tuple(_of_rows(x.astype(dtype), arguments, branches) for x in law)
        )
    return found


def _of_rows(
    numbers: Float[Array, "#B #T #N"], arguments: ScoreArguments, branches: int
) -> Float[Array, "#B Nq #T 1"]:
    """Return numbers per group of heads, repeated for each query head of the group."""
    shape = *numbers.shape[:2], arguments.groups
    of_heads = jnp.swapaxes(jnp.broadcast_to(numbers, shape), 1, 2)
    return jnp.repeat(of_heads, branches, axis=1)[..., None]


def _decays(
    arguments: ScoreArguments,
    visibility: Visibility,
    log_decay: Float[Array, "#B #S K"],
) -> Adjustment:
    """Return the sums of log-decays up to each row and up to each key.

    The log-decays of the keys of other devices are gathered.
    """
    batch, keys, kv_heads = arguments.key.shape[:3]
    log_decay = jnp.broadcast_to(log_decay, (log_decay.shape[0], keys, kv_heads))
    log_decay = jnp.maximum(log_decay, LEAST_LOG_DECAY)
    if arguments.axis_name is not None:
        log_decay = gather(log_decay, arguments.axis_name)
    if arguments.mask is not None:
        visible = arguments.mask.any(axis=(1, 2))
        if arguments.axis_name is not None and arguments.mask.shape[2] > 1:
            visible = jax.lax.pmax(visible.astype(jnp.int32), arguments.axis_name) > 0
        log_decay = jnp.where(visible[..., None], log_decay, 0)
    of_keys = _of_query_heads(arguments, jnp.cumsum(log_decay, axis=1))
    of_rows = _at_rows(of_keys, visibility)
    return Adjustment(of_rows[..., None], of_keys[:, :, None])


def _of_query_heads(
    arguments: ScoreArguments, sums: Float[Array, "#B S K"]
) -> Float[Array, "#B Nq S"]:
    """Return the sums of each key head, repeated for the query heads that use it."""
    kv_heads, heads = arguments.value.shape[2], arguments.query.shape[2]
    signals = arguments.signals
    if signals > 1:
        heads = 2 * arguments.output_heads
        sums = repeat_noise(sums, signal_keys(sums.shape[2], kv_heads))
    branches = sums.shape[2] // kv_heads
    groups = heads // sums.shape[2]
    sums = jnp.moveaxis(sums, 2, 1).reshape(
        sums.shape[0], kv_heads, 1, branches, sums.shape[1]
    )
    sums = jnp.repeat(sums, groups, axis=2)
    if signals > 1:  # `repeat_noise` repeated the noise heads: keep one per group
        pairs = sums.reshape(sums.shape[0], -1, signals, 2, sums.shape[4])
        signal_and_noise = pairs[:, :, :, 0], pairs[:, :, :1, 1]
        sums = jnp.concatenate(signal_and_noise, axis=2)
        heads = arguments.query.shape[2]
    return sums.reshape(sums.shape[0], heads, sums.shape[-1])


def _at_rows(
    sums: Float[Array, "#B N S"], visibility: Visibility
) -> Float[Array, "#B N T"]:
    """Return the sums up to the position of each row; 0 before the first key."""
    rows, time = visibility.row_positions, visibility.row_positions.shape[1]
    if visibility.consecutive and time <= visibility.length:
        of_rows: Any = slice_axis(sums, 2, start=rows[0, 0], size=time)
        return of_rows
    batch = max(sums.shape[0], rows.shape[0])
    sums = jnp.broadcast_to(sums, (batch, *sums.shape[1:]))
    index = jnp.clip(rows, 0, visibility.length - 1)[:, None]
    found = jnp.take_along_axis(sums, index, axis=2)
    return jnp.where(rows[:, None] < 0, 0, found)
