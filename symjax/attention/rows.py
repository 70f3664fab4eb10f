"""The row-block engine: every mechanism that scores pairs runs through it.

A score mechanism owns one function, its row weights: from the scores of some query
rows against the keys they may see to the weights of those keys. The engine walks
blocks of query rows, hands a causal block only the keys up to its end, and wraps the
block in `jax.checkpoint`. Autodiff through it is the backward pass, and no [T S] map
is kept for it: memory is linear in T.

Heads come in (head, branch) order. A key head may serve several query heads (grouped
heads) and a value head may belong to two key heads, the branches of a differential
head; the engine then subtracts the branches' weights before it touches the values,
so the product with the values is paid once.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.checks import check_arrays
from symjax.attention.masks import only_seen, visible_pairs
from symjax.attention.scaling import head_scale, length_scale
from symjax.attention.shards import first_token, gather, segment_runs_over

# Scores [B N t s] and the visible pairs (None: all) → weights, zero where not visible.
RowWeights = Callable[[Array, Array | None], Array]

BLOCK_ROWS = 100  # rows a block at most; 64–128 are alike on CPU
EXTENTS = 8  # different key lengths, each compiled on its own


class Operands(NamedTuple):
    """What a block of rows is computed from; axes of length 1 are broadcast.

    Heads stand before time: a block is then a product of plain matrices, 3–11 % faster
    on CPU.
    """

    query: Float[Array, "B Nq T H"]
    key: Float[Array, "B Nk S H"]
    value: Float[Array, "B K S V"]
    bias: Float[Array, "#B #Nq #T #S"] | None
    mask: Bool[Array, "#B #Nq #T #S"] | None
    lam: Float[Array, "#B N #T"] | None
    row_segments: Int[Array, "B T"] | None
    key_segments: Int[Array, "B S"] | None
    scale: Float[Array, ""] | float
    first: Int[Array, ""] | None  # the position of row 0, where a device decides it


# The axis of time and the axis of keys in each operand.
TIME = (2, None, None, 2, 2, 2, 1, None, None, None)
KEYS = (None, 2, 2, 3, 3, None, None, 1, None, None)


class Rule(NamedTuple):
    """The static half of a call: what every block does alike."""

    weights: RowWeights
    is_causal: bool
    mask_self: bool
    length_base: float | None
    offset: int  # the position of row 0 otherwise: rows are aligned to the last key
    whole: bool  # all rows as one block, without checkpointing
    block_rows: int


def attend_rows(
    weights: RowWeights,
    query: Float[Array, "B T Nq H"],
    key: Float[Array, "B S Nk H"],
    value: Float[Array, "B S K V"],
    bias: Float[Array, "#B #Nq #T #S"] | None = None,
    mask: Bool[Array, "#B #Nq #T #S"] | None = None,
    *,
    lam: Float[Array, "#B #T N"] | None = None,
    scale: float | Float[Array, ""] | None = None,
    is_causal: bool = False,
    length_base: float | None = None,
    mask_self: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    whole: bool = False,
    axis_name: str | None = None,
) -> Float[Array, "B T N V"]:
    """Values averaged by row weights, block by block of query rows.

    With `lam`, sub-heads 2n and 2n+1 are the branches of head n and the weights are
    w[2n] − lam[n]·w[2n+1].

    Time O(T S (H + V)) a head, half of it if causal; memory O(T + S) beside one block.
    Rows that see no key are zero, also where there are no keys at all.

    Args:
        scale: of the scores, 1/√H by default.
        is_causal: row t sees keys up to t + S − T: the last query sees every key.
        length_base: multiply a row's scores by log n / log length_base; None or 0: off.
        mask_self: hide a token from itself unless it sees nothing else.
        segment_ids: tokens see only their own run of equal ids; needs T = S.
        whole: one block of all rows without checkpointing, which is the oracle and
            the form for reading maps.
        axis_name: in a `jax.shard_map`, the mesh axis that time is split over. Rows
            stay where they are; keys, values and segments of all devices are gathered.
            A mask or a bias is of a device's own rows and of all keys.
    Raises:
        ValueError: shapes that do not fit together, naming both.
    """
    if lam is None and key.shape[2:3] != value.shape[2:3]:
        raise ValueError(
            f"key and value must agree in heads, got {key.shape} and {value.shape}"
        )
    first = None
    if axis_name is not None:
        check_shapes(query, key, value, None, None, segment_ids, is_causal)
        first = first_token(query, key, axis_name)
        key, value = gather((key, value), axis_name)
    alike = segment_ids if axis_name is None else None
    check_shapes(query, key, value, bias, mask, alike, is_causal)
    if 0 in (*query.shape[:2], key.shape[1]):  # no rows, or nothing that they see
        heads = query.shape[2] // (1 if lam is None else 2)
        shape = (*query.shape[:2], heads, value.shape[-1])
        return jnp.zeros(shape, value.dtype)
    if mask is not None:
        key, value = only_seen(mask.any(axis=(1, 2)), key, value)
    own_runs, runs = segment_runs_over(segment_ids, axis_name)
    lam = None if lam is None else jnp.swapaxes(lam, 1, 2)
    operands = Operands(
        jnp.swapaxes(query, 1, 2),
        jnp.swapaxes(key, 1, 2),
        jnp.swapaxes(value, 1, 2),
        bias,
        mask,
        lam,
        own_runs,
        runs,
        head_scale(query.shape[-1]) if scale is None else scale,
        first,
    )
    rule = Rule(
        weights,
        is_causal,
        mask_self,
        float(length_base) if length_base else None,
        offset=key.shape[1] - query.shape[1],
        whole=whole or query.shape[1] == 1,
        block_rows=BLOCK_ROWS,
    )
    return jnp.swapaxes(_rows(rule, operands), 1, 2)


@partial(jax.jit, static_argnums=0)  # a call outside jit compiles once a shape
def _rows(rule: Rule, operands: Operands) -> Array:
    if rule.whole:
        return _block(rule, operands, 0)
    whole = partial(_blocks, rule)
    if operands.query.shape[0] == 1:
        return whole(operands)
    # Chosen where the program is lowered, not where it is traced: `jax.export`.
    return jax.lax.platform_dependent(
        operands, cpu=partial(_each_example, whole), default=whole
    )


def row_map(
    weights: RowWeights,
    query: Float[Array, "B T Nq H"],
    key: Float[Array, "B S Nk H"],
    *,
    is_causal: bool = False,
    lam: Float[Array, "#B #T N"] | None = None,
    shared_keys: bool = False,
    **options,
) -> Float[Array, "B N T S"]:
    """The whole map of weights, for reading: O(T S) memory. Options of `attend_rows`.

    It is what `attend_rows` gives for the unit vectors as values.

    Args:
        shared_keys: with `lam`, both query heads of a pair look at one key
            (differential V2); otherwise each has its own (V1).
    """
    branches = 1 if lam is None or shared_keys else 2
    heads = key.shape[2] // branches
    units = jnp.eye(key.shape[1], dtype=query.dtype)[None, :, None]
    value = jnp.broadcast_to(units, (key.shape[0], key.shape[1], heads, key.shape[1]))
    options = {"whole": True, "is_causal": is_causal, **options}
    rows = attend_rows(weights, query, key, value, lam=lam, **options)
    return jnp.swapaxes(rows, 1, 2)


def _each_example(function: Callable[[Operands], Array], operands: Operands) -> Array:
    """`function` on one example after another: on CPU a block then stays in cache."""
    batch = operands.query.shape[0]
    own = [x is not None and jnp.shape(x)[:1] == (batch,) for x in operands]
    shared = [None if mine else x for x, mine in zip(operands, own, strict=True)]
    owned = [x if mine else None for x, mine in zip(operands, own, strict=True)]

    def example(owned: list) -> Array:
        both = zip(owned, shared, strict=True)
        whole = Operands._make(y if x is None else x[None] for x, y in both)
        return function(whole)[0]

    return jax.lax.map(example, owned)


def _blocks(rule: Rule, operands: Operands) -> Array:
    """All rows, in blocks of equal size: few key extents outside, a loop inside."""
    time, keys = operands.query.shape[2], operands.key.shape[2]
    count = -(-time // rule.block_rows)
    rows = -(-time // count)
    triangle = rule.is_causal and operands.first is None
    per_extent = -(-count // EXTENTS) if triangle else count
    outputs = []
    for first in range(0, count, per_extent):
        start, stop = first * rows, min((first + per_extent) * rows, time)
        end = stop + rule.offset if triangle else keys
        part = _part(_part(operands, TIME, start, stop - start), KEYS, 0, end)
        if outputs:  # one extent after another: 0.7 of the memory of all at once
            part, outputs[-1] = jax.lax.optimization_barrier((part, outputs[-1]))
        outputs.append(_extent(rule, part, start, rows))
    return jnp.concatenate(outputs, axis=2)


def _extent(rule: Rule, operands: Operands, start: int, rows: int) -> Array:
    """Rows from `start` on that share one set of keys, `rows` at a time."""
    time = operands.query.shape[2]
    if time <= rows:
        return jax.checkpoint(partial(_block, rule))(operands, start)
    count = -(-time // rows)
    padded = _along(TIME, operands, partial(_pad, amount=count * rows - time))

    def step(first: Array) -> Array:
        return _block(rule, _part(padded, TIME, first, rows), start + first)

    firsts = jnp.arange(count) * rows
    outputs = jax.lax.map(jax.checkpoint(step, prevent_cse=False), firsts)
    outputs = jnp.moveaxis(outputs, 0, 2)
    outputs = outputs.reshape(*outputs.shape[:2], count * rows, outputs.shape[-1])
    return outputs[:, :, :time]


def _block(rule: Rule, operands: Operands, start: int | Array) -> Array:
    """One block of rows against the keys given: scores, weights, values."""
    value, lam = operands.value, operands.lam
    batch, kv_heads = value.shape[:2]
    own = rule.offset if operands.first is None else operands.first
    rows = start + own + jnp.arange(operands.query.shape[2])
    scores, visible = scored(rule, operands, rows, jnp.arange(value.shape[2]))
    weights = rule.weights(scores, visible)
    if lam is not None:
        lam = lam[..., None].astype(weights.dtype)
        weights = weights[:, 0::2] - lam * weights[:, 1::2]
    # relu² of float16's own numbers is soon ∞ or 0 in it.
    narrow = weights.dtype if value.dtype == jnp.float16 else value.dtype
    output = jnp.einsum(
        "bkgts,bksv->bkgtv",
        weights.reshape(batch, kv_heads, -1, *weights.shape[2:]).astype(narrow),
        value.astype(narrow),
        preferred_element_type=weights.dtype,
    )
    return output.reshape(batch, -1, *output.shape[-2:]).astype(value.dtype)


def scored(
    rule: Rule,
    operands: Operands,
    rows: Int[Array, " t"],
    keys: Int[Array, " s"],
) -> tuple[Float[Array, "B N t s"], Bool[Array, "#B #N t s"] | None]:
    """The scores of rows and keys at these positions, and which of them count."""
    query, key, value, bias, mask, _, row_segments, key_segments, scale, _ = operands
    wide = jnp.promote_types(jnp.result_type(query, key, value), jnp.float32)
    batch, heads, time, size = query.shape
    kv_heads, branches = value.shape[1], key.shape[1] // value.shape[1]
    scores = scale * jnp.einsum(
        "bkgpth,bkpsh->bkgpts",
        query.reshape(batch, kv_heads, -1, branches, time, size),
        key.reshape(batch, kv_heads, branches, -1, size),
        preferred_element_type=wide,
    )
    scores = scores.reshape(batch, heads, time, -1)
    visible = visible_pairs(
        rows,
        keys,
        mask,
        is_causal=rule.is_causal,
        mask_self=rule.mask_self,
        row_segments=row_segments,
        key_segments=key_segments,
    )
    if rule.length_base is not None:
        seen = jnp.full((1, 1, 1, 1), key.shape[2])
        if visible is not None:
            seen = visible.sum(axis=-1, keepdims=True)
        scores *= length_scale(seen, rule.length_base).astype(wide)
    if bias is not None:
        scores += bias.astype(wide)
    return scores, visible


def _along(axes: tuple, operands: Operands, function: Callable) -> Operands:
    """function(operand, axis) of each that has the axis; those broadcast stay."""
    return Operands._make(
        x if x is None or axis is None or jnp.shape(x)[axis] == 1 else function(x, axis)
        for x, axis in zip(operands, axes, strict=True)
    )


def _part(operands: Operands, axes: tuple, start: int | Array, size: int) -> Operands:
    """Rows or keys from `start` on, `size` of them."""

    def part(array: Array, axis: int) -> Array:
        return jax.lax.dynamic_slice_in_dim(array, start, size, axis)

    return _along(axes, operands, part)


def _pad(array: Array, axis: int, amount: int) -> Array:
    """Zeros at the end of an axis; the outputs of such rows are cut."""
    return jnp.pad(array, [(0, amount if i == axis else 0) for i in range(array.ndim)])


def check_shapes(query, key, value, bias, mask, segment_ids, is_causal) -> None:
    """Raise a ValueError that names both sides of the first thing that does not fit."""
    check_arrays(query=query, key=key, value=value)
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(
            "query and key must agree in batch and head size, got "
            f"{query.shape} and {key.shape}"
        )
    if key.shape[:2] != value.shape[:2] or key.shape[2] % value.shape[2]:
        raise ValueError(
            "key and value must agree in batch, length and heads, got "
            f"{key.shape} and {value.shape}"
        )
    if query.shape[2] % key.shape[2]:
        raise ValueError(
            "query heads must be a multiple of key heads, got "
            f"{query.shape} and {key.shape}"
        )
    if is_causal and key.shape[1] < query.shape[1]:
        raise ValueError(
            "causal attention aligns the last query with the last key and needs as "
            f"many keys as queries, got {query.shape} and {key.shape}"
        )
    full = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    for name, array in (("mask", mask), ("bias", bias)):
        if array is not None and not (
            array.ndim == 4
            and all(x in (1, y) for x, y in zip(array.shape, full, strict=True))
        ):
            raise ValueError(
                f"{name} must broadcast to [batch, heads, queries, keys] {full}, "
                f"got {array.shape}"
            )
    if mask is not None and mask.dtype != jnp.bool_:
        raise ValueError(f"mask must be boolean (True = attend), got {mask.dtype}")
    if segment_ids is not None and not (
        segment_ids.shape == query.shape[:2] == key.shape[:2]
    ):
        raise ValueError(
            "segment_ids must be [batch, time] of query and key alike, got "
            f"{segment_ids.shape} for {query.shape} and {key.shape}"
        )
