"""Which key each query row may see."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped


def visible_pairs(
    rows: Int[Array, "*#B t"],
    keys: Int[Array, "s"],
    mask: Bool[Array, "#B #N #t #s"] | None = None,
    *,
    is_causal: bool = False,
    mask_self: bool = False,
    row_segments: Int[Array, "#B t"] | None = None,
    key_segments: Int[Array, "#B s"] | None = None,
) -> Bool[Array, "#B #N t s"] | None:
    """The pairs (row, key) that every restriction allows; None if all are.

    Args:
        rows, keys: positions in time, those of rows may differ by example; a causal
            row sees keys at or before its own.
        mask: True = attend.
        mask_self: hide a row's own position, unless it sees nothing else.
        row_segments, key_segments: pairs of different segments do not see each other.
    """
    visible = mask
    if mask is not None:  # a row that sees every key sees them all, not one
        visible = jnp.broadcast_to(mask, (*mask.shape[:3], keys.size))
    distance = (jnp.atleast_2d(rows)[:, :, None] - keys[None, None])[:, None]
    if is_causal:
        visible = _both(visible, distance >= 0)
    if row_segments is not None and key_segments is not None:
        same = row_segments[:, None, :, None] == key_segments[:, None, None, :]
        visible = _both(visible, same)
    if mask_self:
        others = _both(visible, distance != 0)
        alone = ~others.any(axis=-1, keepdims=True)
        visible = others | (_both(visible, distance == 0) & alone)
    return visible


def visible_keys(
    mask: Bool[Array, "#B 1 1 #S"] | None, batch: int, length: int
) -> Bool[Array, "B S"]:
    """The keys that a mask which only hides keys leaves."""
    if mask is None:
        return jnp.ones((batch, length), bool)
    flat = mask.reshape(-1, mask.shape[-1]) if mask.ndim else mask.reshape(1, 1)
    return jnp.broadcast_to(flat, (batch, length))


def only_seen(
    seen: Bool[Array, "#B #S"], *arrays: Shaped[Array, "B S K _"]
) -> tuple[Array, ...]:
    """Keys, values and the like, with 0 for the keys that are not seen: not even NaN
    gets through where it is multiplied by a weight of 0."""
    return tuple(jnp.where(seen[:, :, None, None], x, 0) for x in arrays)


def segment_runs(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The number of each token's run of equal ids, from 0: what a state can follow."""
    before = jnp.concatenate([segment_ids[:, :1], segment_ids[:, :-1]], axis=1)
    return jnp.cumsum(segment_ids != before, axis=1)


def _both(visible: Array | None, more: Array) -> Array:
    return more if visible is None else visible & more
