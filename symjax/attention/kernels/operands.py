"""Arrays and shapes that the kernels of all platforms share."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.feature_maps import Features, LogFeatures
from symjax.attention.core.operands import Tokens
from symjax.attention.core.products import TILE
from symjax.attention.core.sequence import id_changes, segment_runs
from symjax.attention.core.visibility import hidden_as_zero, visible_keys

# `checkpoint_name` of the outputs of forward kernels. If a policy of `jax.checkpoint`
# saves this name, the backward pass does not run the kernel again.
RESIDUAL = "attention_residual"

LARGEST_HEAD = 256  # the largest head size that a kernel of recurrences supports
MOST_FEATURES = 1024
NEVER = -1e30  # log-decay that forgets the state; unlike −∞, no difference is NaN


def unsupported(tokens: Tokens) -> str | None:
    """Return why no kernel of a recurrence supports these arrays; None if one may."""
    query, key, value = tokens[:3]
    dtype = jnp.result_type(query, key, value)
    if query.shape[1] < TILE:
        return f"it takes {TILE} tokens or more, got {query.shape[1]}"
    if 0 in (*query.shape, value.shape[3]):
        return "an array is empty"
    if (size := max(key.shape[3], value.shape[3])) > LARGEST_HEAD:
        return f"it takes heads of at most {LARGEST_HEAD} dimensions, got {size}"
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"it takes bfloat16 and float32, got {dtype}"
    return None


def key_features(maps: Features, key: Array, parameters: Any) -> LogFeatures:
    """Return the shapes of the features of keys; no feature is computed."""
    like = jax.ShapeDtypeStruct(key.shape, jnp.float32)
    return jax.eval_shape(maps.key, like, parameters)


def feature_count(maps: Features, key: Array, parameters: Any) -> int | None:
    """Return the number of features of a key; no feature is computed.

    The result is None if the features have both an amplitude and an exponent.
    """
    amplitude, exponent, _ = key_features(maps, key, parameters)
    parts = [x for x in (amplitude, exponent) if x is not None]
    return parts[0].shape[3] if len(parts) == 1 else None


def log_decay_of(
    operands: Sequence[Array], parameters: Float[Array, "K 1"] | None
) -> Float[Array, "#B #T K F"]:
    """Return the log-decay of each token, or the one that all tokens share."""
    return operands[0] if parameters is None else parameters[None, None]


def visible_arrays(tokens: Tokens, log_decay: Array | None, beta: Array | None) -> list:
    """Return query, key, value, log-decays of each head or channel, and β.

    All except the query are 0 for hidden tokens. The first token of a segment has the
    log-decay `NEVER`, so that it forgets the segment before.
    """
    query, key, value, visible, segment = VisibleTokens.of(tokens)
    if log_decay is not None:
        shape = *key.shape[:3], log_decay.shape[3]
        log_decay = jnp.broadcast_to(log_decay, shape).astype(jnp.float32)
    if visible is not None:
        if log_decay is not None:
            (log_decay,) = hidden_as_zero(visible, log_decay)
        if beta is not None:
            beta = jnp.where(visible[..., None], beta, 0)
    if log_decay is not None:
        if segment is not None:
            first = id_changes(segment)[:, :, None, None]
            log_decay = jnp.where(first, NEVER, log_decay)
        log_decay = jnp.maximum(log_decay, NEVER)
        if log_decay.shape[3] == 1:
            log_decay = log_decay[..., 0]
    return [query, key, value, log_decay, beta]


def result(like: Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Return the type of an output that has the manual mesh axes of an input."""
    kind = jax.typeof(like).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind)


def round_up(size: int, unit: int = TILE) -> int:
    """Round up to a multiple of `unit`."""
    return -(-size // unit) * unit


class VisibleTokens(NamedTuple):
    """Query, key and value of one dtype; keys and values of hidden tokens are 0."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B T K H"]
    value: Float[Array, "B T K V"]
    visible: Bool[Array, "B T"] | None  # None: all are visible
    segment: Int[Array, "B T"] | None  # number of each token's segment

    @classmethod
    def of(cls, tokens: Tokens):
        query, key, value, _, mask, segment_ids = tokens
        dtype = jnp.result_type(query, key, value)
        query, key, value = (x.astype(dtype) for x in (query, key, value))
        visible = segment = None
        if mask is not None:
            visible = visible_keys(mask, *key.shape[:2])
            key, value = hidden_as_zero(visible, key, value)
        if segment_ids is not None:
            segment = segment_runs(segment_ids)
        return cls(query, key, value, visible, segment)
