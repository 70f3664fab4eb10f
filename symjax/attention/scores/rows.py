"""The row-block engine: it computes score mechanisms in XLA, in blocks of query rows.

A score mechanism provides one function, its row weights, which turns scores of query
rows into weights. The engine

1. divides the query rows into blocks,
2. leaves out the keys that causality or the window hides from all rows of an extent,
   which is a group of consecutive blocks,
3. computes scores, weights and the weighted sum of the values, block by block,
4. wraps each block in `jax.checkpoint`: the backward pass computes a block again, and
   no [T S] map is saved. Memory is linear in T.

In differential attention the engine subtracts λ times the weights of a noise head from
those of its signal heads, and then multiplies by the values once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from symjax.attention.core import lengths
from symjax.attention.core.devices import by_platform
from symjax.attention.core.meshes import on_any_mesh
from symjax.attention.core.operands import (
    ScoreArrays,
    ScoreSettings,
    spec_of_score_rows,
)
from symjax.attention.core.visibility import slice_axis

KEPT = "row statistics"  # `checkpoint_name` of what a block saves for its gradient
# Rows of a block on accelerators, whose matrix units have this size. On a CPU
# `_rows_on_a_cpu` computes the number of rows of a block from it.
BLOCK_ROWS = 128
EXTENTS = 8  # largest number of extents (`_blocks`)
FEW_KEYS = 2048  # up to this number of keys, causal rows have at most two extents


@on_any_mesh("settings", specs=spec_of_score_rows)
def attend_rows(
    settings: ScoreSettings, arrays: ScoreArrays
) -> Float[Array, "B N T V"]:
    """Return the values summed by row weights, computed in blocks of query rows.

    With `lam`, query heads form groups: r = settings.signals signal heads, then their
    noise head. Output head n has the weights signal[n] − lam[n]·noise[n // r].

    Time O(T S (H + V)) per head. Causal rows take about 3/4 of this time with up to
    `FEW_KEYS` keys, and 9/16 with more. Memory O(T + S) and one block of scores; O(T S)
    with `settings.whole`. Rows that see no key are zero.
    """
    batch, _, time, _ = arrays.query.shape
    if settings.whole or time == 1:
        return _block(settings, arrays, 0, size=time)
    if time > settings.block_rows:
        arrays = widened(arrays)
    blocks = partial(_blocks, settings, rows=min(time, settings.block_rows))
    return by_platform(
        arrays,
        cpu=partial(_example_by_example, settings),
        default=_checkpoint(blocks),
    )


def _example_by_example(
    settings: ScoreSettings, arrays: ScoreArrays
) -> Float[Array, "B N T V"]:
    """Return all rows, one example after the other, so that blocks fit a CPU's cache.

    Heads and time are swapped inside the loop over examples: outside it XLA would copy
    whole arrays. The outer checkpoint saves keys and values once instead of once per
    extent.
    """
    batch = arrays.query.shape[0]
    blocks = partial(_blocks, settings, rows=_rows_on_a_cpu(settings, arrays))
    if batch == 1:
        return _checkpoint(blocks)(arrays)
    leaves, tree = jax.tree.flatten(arrays.swapped())
    batched = [x.shape[:1] == (batch,) for x in leaves]
    examples = [x for x, has_batch in zip(leaves, batched, strict=True) if has_batch]

    def attend_example(example: list[Array]) -> Array:
        remaining = iter(example)
        whole = [
            next(remaining)[None] if has_batch else x
            for x, has_batch in zip(leaves, batched, strict=True)
        ]
        return jnp.swapaxes(blocks(tree.unflatten(whole).swapped())[0], 0, 1)

    return jnp.swapaxes(jax.lax.map(_checkpoint(attend_example), examples), 1, 2)


def _rows_on_a_cpu(settings: ScoreSettings, arrays: ScoreArrays) -> int:
    """Return the number of rows of a block, for blocks of about the same size.

    Products of 192 rows are faster on a CPU than those of 128. In a window with two
    bounds 128 rows are faster, because they see fewer keys.
    """
    time, about = arrays.query.shape[2], settings.block_rows
    if None in arrays.visibility.window:
        about = about * 3 // 2
    count = max(1, round(time / about))
    if _two_suffice(settings, arrays):
        count = min(count, 2)
    return -(-time // count)


def _two_suffice(settings: ScoreSettings, arrays: ScoreArrays) -> bool:
    """Return whether keys are few and only one side of the window has a bound.

    Causal attention has such a window. Then two blocks or extents are enough. With two
    extents causal attention computes 3/4 of all pairs, with eight 9/16. But two compile
    faster: compiling the gradient of sparsemax with 1,024 keys for a TPU v5e takes 12
    seconds of processor time with two extents, and 39 with eight.
    """
    window = arrays.visibility.window
    few = arrays.key.shape[2] <= settings.few_keys
    return few and None in window and window != (None, None)


def _checkpoint(function: Callable, **options: Any) -> Callable:
    """Apply `jax.checkpoint`, saving only the arguments and the arrays named KEPT."""
    policy = jax.checkpoint_policies.save_only_these_names(KEPT)
    return jax.checkpoint(function, policy=policy, **options)


def widened(arrays: ScoreArrays) -> ScoreArrays:
    """Return the arrays with keys and values in float32 at least.

    A bias that all rows share is converted too. The gradients of the blocks are then
    added in float32. Each block rounds keys and values back to their own types.
    """

    def wide(x: Array) -> Array:
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))

    arrays = arrays._replace(key=wide(arrays.key), value=wide(arrays.value))
    if arrays.bias is not None and arrays.bias.shape[2] == 1:
        arrays = arrays._replace(bias=wide(arrays.bias))
    return arrays


def _blocks(settings: ScoreSettings, arrays: ScoreArrays, rows: int) -> Array:
    """Return all rows, in blocks of `rows`.

    Consecutive blocks form an extent and take the same keys: those that causality and
    the window leave to any of their rows. Each extent is a loop over its blocks,
    compiled separately. There are at most `settings.extents` extents, and at most two
    if `_two_suffice`. There is one if the window has no bound, or if the position of
    row 0 is known only at run time.
    """
    time = arrays.query.shape[2]
    count = -(-time // rows)
    window = arrays.visibility.window
    cuts_keys = window != (None, None) and settings.offset is not None
    extents = settings.extents
    if _two_suffice(settings, arrays):
        extents = min(extents, 2)
    per_extent = -(-count // extents) if cuts_keys else count
    outputs = []
    for first in range(0, count, per_extent):
        start, stop = first * rows, min((first + per_extent) * rows, time)
        begin, end = _seen(settings, arrays, start, stop)
        extent = arrays.map_rows(partial(slice_axis, start=start, size=stop - start))
        extent = extent.map_keys(partial(slice_axis, start=begin, size=end - begin))
        if outputs:  # XLA must not run extents at once: that takes 1.4× the memory
            extent, outputs[-1] = jax.lax.optimization_barrier((extent, outputs[-1]))
        length = stop - start
        if length <= rows:
            block = partial(_block, settings, start=0, size=length)
            outputs.append(_checkpoint(block)(extent))
            continue
        steps = -(-length // rows)
        block = _checkpoint(
            partial(_block, settings, extent, size=rows), prevent_cse=False
        )
        found = jax.lax.map(block, jnp.arange(steps) * rows)
        found = jnp.moveaxis(found, 0, 2)
        # `dynamic_slice` moves a slice that would end after the last row, so the last
        # block has `rows` rows too. Its first rows are also in the block before: drop
        # them.
        last = found[:, :, -1, steps * rows - length :]
        others = found[:, :, :-1].reshape(*last.shape[:2], -1, last.shape[-1])
        outputs.append(jnp.concatenate([others, last], axis=2))
    return jnp.concatenate(outputs, axis=2)


def _seen(
    settings: ScoreSettings, arrays: ScoreArrays, start: int, stop: int
) -> tuple[int, int]:
    """Return the range of keys that rows `start` to `stop` − 1 see, by the window."""
    keys, (left, right) = arrays.key.shape[2], arrays.visibility.window
    begin, end = 0, keys
    if settings.offset is not None and left is not None:
        begin = min(max(0, start + settings.offset - left), keys - 1)
    if settings.offset is not None and right is not None:
        end = min(max(begin + 1, stop + settings.offset + right), keys)
    return begin, end


def _block(
    settings: ScoreSettings, arrays: ScoreArrays, start: int | Array, *, size: int
) -> Array:
    """Return `size` rows from `start` on, computed from all keys of the arrays."""
    arrays = arrays.map_rows(partial(slice_axis, start=start, size=size))
    lam, dtype = arrays.lam, settings.dtypes[1]
    signals = settings.signals
    branches = [arrays]
    if lam is not None:
        branches = [arrays.branch(index, signals) for index in range(2)]
    maps = []  # an array per branch: XLA would copy an array of both to split it
    for branch in branches:
        visible = branch.visibility.pairs()
        found = row_weights(
            settings, branch, scored(settings, branch, visible), visible
        )
        maps.append(found if isinstance(found, tuple) else (found, None))
    weights, divisor = maps[0]
    if lam is not None:
        second, second_divisor = maps[1]
        factor = jnp.broadcast_to(lam.astype(weights.dtype), weights.shape[:3])
        factor = factor.reshape(second.shape[0], -1, signals, second.shape[2])
        if divisor is not None and second_divisor is not None:
            # w₁/d₁ − λ w₂/d₂ = (w₁ − λ (d₁/d₂) w₂) / d₁: one division, of the output.
            divisors = divisor.reshape(factor.shape)
            factor = factor * (divisors / second_divisor[:, :, None, :, 0])
        # An einsum makes the gradient of the factor a matrix product, which XLA's CPU
        # compiler sums up 5 times as fast as an elementwise product.
        exact = jax.lax.Precision.HIGHEST
        subtracted = jnp.einsum("bgrt,bgts->bgrts", factor, second, precision=exact)
        weights = weights - subtracted.reshape(weights.shape)
    value = arrays.value.astype(dtype)
    if divisor is None:
        return weighted_sum(weights, value).astype(dtype)
    return _averaged(weights, divisor, value).astype(dtype)


@jax.custom_jvp
def _averaged(weights: Array, divisor: Array, value: Array) -> Array:
    """Return the sum of the values by weights, divided by the divisor."""
    return weighted_sum(weights, value) / divisor


@_averaged.defjvp
def _averaged_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """Return the output and its derivative, (dw·v + w·dv − output·dd) / d.

    This derivative reads the output, which is saved. Autodiff would also save the
    undivided sum. In softmax the terms with dw and dd cancel. They are computed in the
    type of the weights, since the rounding errors of a narrower type would not cancel.
    """
    weights, divisor, value = primals
    weights_change, divisor_change, value_change = tangents
    output = checkpoint_name(weighted_sum(weights, value) / divisor, KEPT)
    change = weighted_sum(weights_change, value.astype(weights.dtype))
    change += weighted_sum(weights, value_change)
    exact = jax.lax.Precision.HIGHEST
    change -= jnp.einsum("bntv,bnti->bntv", output, divisor_change, precision=exact)
    return output, change / divisor


def scored(
    settings: ScoreSettings,
    arrays: ScoreArrays,
    visible: Bool[Array, "#B #N t s"] | None,
) -> Float[Array, "B N t s"]:
    """Return the scores of all pairs of a row and a key, also of hidden ones.

    Args:
        visible: the pairs in which the row sees the key. Laws of length count them.
    """
    query, key, value, bias, slopes, _, scale, visibility, adjustment = arrays
    wide = jnp.promote_types(jnp.result_type(query, *settings.dtypes), jnp.float32)
    batch, heads, time, size = query.shape
    # The noise branch may have fewer key heads than there are value heads.
    kv_heads = min(key.shape[1], value.shape[1])
    branches = key.shape[1] // kv_heads
    # The query heads of a key head and their rows become one axis. The gradient of the
    # keys sums over it. With two axes XLA would copy the [t s] arrays for this sum.
    query = query.reshape(batch, kv_heads, -1, branches, time, size).swapaxes(2, 3)
    scores = scale * jnp.einsum(
        "bkrh,bksh->bkrs",
        query.reshape(batch, key.shape[1], -1, size),
        key.astype(settings.dtypes[0]),
        preferred_element_type=wide,
    )
    scores = scores.reshape(batch, kv_heads, branches, -1, time, key.shape[2])
    scores = scores.swapaxes(2, 3).reshape(batch, heads, time, -1)
    if settings.length_scale == "distance":
        factor, shift = lengths.distance_scale(visibility.distance(), wide)
        scores = scores * factor + shift
    elif (factor := _factor(settings, arrays, visible)) is not None:
        scores *= factor.astype(wide)
    if bias is not None:
        scores += bias.astype(wide)
    if slopes is not None:
        scores -= slopes * jnp.abs(visibility.distance()).astype(wide)
    if adjustment is not None:
        of_rows, of_keys = adjustment.row_decay, adjustment.key_decay
        if of_rows is not None and of_keys is not None:
            scores -= jnp.abs(of_rows - of_keys)
    return scores


def _factor(
    settings: ScoreSettings,
    arrays: ScoreArrays,
    visible: Bool[Array, "#B #N t s"] | None,
) -> Array | None:
    """Return the factor of each row by the number of its keys; None means 1."""
    base = settings.length_base
    if settings.length_scale is None and base is None:
        return None
    count = arrays.visibility.count(visible)
    adjustment = arrays.adjustment
    if adjustment is not None and adjustment.law is not None:
        return lengths.adaptive_scale(count, *adjustment.law)
    if base is not None:
        return lengths.log_scale(count, base)
    return lengths.floor_scale(count)


def row_weights(
    settings: ScoreSettings,
    arrays: ScoreArrays,
    scores: Float[Array, "B N t s"],
    visible: Bool[Array, "#B #N t s"] | None,
) -> Array | tuple[Array, Array]:
    """Return the weights of rows, or their weights and divisors.

    A sink is one more key that every row sees. It has no value, so its weight is left
    out of the result.
    """
    adjustment = arrays.adjustment
    if adjustment is None or adjustment.sink is None:
        return settings.weights(scores, visible)
    sink = adjustment.sink.astype(scores.dtype)
    sink = jnp.broadcast_to(sink, (*scores.shape[:3], 1))
    scores = jnp.concatenate([scores, sink], axis=-1)
    if visible is not None:
        sees_sink = jnp.ones((*visible.shape[:3], 1), bool)
        visible = jnp.concatenate([visible, sees_sink], axis=-1)
    found = settings.weights(scores, visible)
    if isinstance(found, tuple):
        return found[0][..., :-1], found[1]
    return found[..., :-1]


def weighted_sum(
    weights: Float[Array, "B N t s"], value: Float[Array, "B K s V"]
) -> Float[Array, "B N t V"]:
    """Return the sums of the values by weights.

    float16 values are converted to the type of the weights: float16 underflows for
    weights below 6e-8.
    """
    batch, kv_heads, _, size = value.shape
    if value.dtype == jnp.float16:
        value = value.astype(weights.dtype)
    values = jnp.einsum(
        "bkrs,bksv->bkrv",
        weights.reshape(batch, kv_heads, -1, weights.shape[3]).astype(value.dtype),
        value,
        preferred_element_type=weights.dtype,
    )
    return values.reshape(*weights.shape[:3], size)
