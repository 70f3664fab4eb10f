"""The row-block engine: every mechanism that scores pairs runs through it.

A score mechanism owns one function, its row weights: from the scores of some query
rows against the keys they may see to the weights of those keys. The engine walks
blocks of query rows, leaves out keys that no row of a block sees, and wraps the block
in `jax.checkpoint`. Autodiff through it is the backward pass, and no [T S] map is kept
for it: memory is linear in T.

Heads come in (head, branch) order. A key head may serve several query heads (grouped
heads) and a value head may belong to two key heads, the branches of a differential
head; the engine then subtracts the branches' weights before the product with the
values, so that it is computed once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from symjax.attention.core.devices import by_platform
from symjax.attention.core.meshes import on_any_mesh
from symjax.attention.core.operands import Operands, Rule, rows_spec
from symjax.attention.core.visibility import length_scale, part

KEPT = "rows of scores"  # what blocks keep for the backward pass, by checkpoint_name
BLOCK_ROWS = 128  # of a block: a tile of accelerators; on a CPU about so many
EXTENTS = 8  # different key lengths, each compiled on its own
FEW_KEYS = 2048  # `Rule.few_keys`


@on_any_mesh("rule", specs=rows_spec)  # outside jit it compiles once a shape
def attend_rows(rule: Rule, operands: Operands) -> Float[Array, "B N T V"]:
    """Values averaged by row weights, block by block of query rows.

    With `lam`, sub-heads 2n and 2n+1 are the branches of head n and the weights are
    w[2n] − lam[n]·w[2n+1].

    Time O(T S (H + V)) a head, half of it if causal; memory O(T + S) beside one block.
    Rows that see no key are zero.
    """
    batch, _, time, _ = operands.query.shape
    if rule.whole or time == 1:
        return _block(rule, operands, 0, size=time)
    if time > rule.block_rows:
        operands = widened(operands)
    blocks = partial(_blocks, rule, rows=min(time, rule.block_rows))
    return by_platform(
        operands, cpu=partial(_example_by_example, rule), default=_kept(blocks)
    )


def _example_by_example(rule: Rule, operands: Operands) -> Float[Array, "B N T V"]:
    """All rows on a CPU, one example after another, whose blocks stay in its cache.

    Axes are swapped inside the loop, since XLA would copy whole arrays outside it. The
    outer checkpoint keeps the keys and values once instead of once per extent.
    """
    batch = operands.query.shape[0]
    blocks = partial(_blocks, rule, rows=_rows_on_a_cpu(rule, operands))
    if batch == 1:
        return _kept(blocks)(operands)
    leaves, tree = jax.tree.flatten(operands.swapped())
    own = [x.shape[:1] == (batch,) for x in leaves]
    examples = [x for x, mine in zip(leaves, own, strict=True) if mine]

    def example(owned: list[Array]) -> Array:
        left = iter(owned)
        pairs = zip(leaves, own, strict=True)
        whole = tree.unflatten(next(left)[None] if mine else x for x, mine in pairs)
        return jnp.swapaxes(blocks(whole.swapped())[0], 0, 1)

    return jnp.swapaxes(jax.lax.map(_kept(example), examples), 1, 2)


def _rows_on_a_cpu(rule: Rule, operands: Operands) -> int:
    """Rows of a block, all blocks of about the same size.

    Products of more rows are faster on a CPU; in a window they would see more keys. Two
    blocks of few keys are a short program, which is compiled in a third of the time.
    """
    time, window = operands.query.shape[2], operands.visibility.window
    about = rule.block_rows
    if None in window:
        about = about * 3 // 2
    count = max(1, round(time / about))
    if (
        window != (None, None)
        and None in window
        and operands.key.shape[2] <= rule.few_keys
    ):
        count = min(count, 2)
    return -(-time // count)


def _kept(function: Callable, **options: Any) -> Callable:
    """`jax.checkpoint` that keeps of a block what it named, and its operands."""
    policy = jax.checkpoint_policies.save_only_these_names(KEPT)
    return jax.checkpoint(function, policy=policy, **options)


def widened(operands: Operands) -> Operands:
    """Keys, values and what else all rows share in float32 at least.

    Blocks round them back; the gradients of the blocks are then added in float32.
    """

    def wide(x: Array) -> Array:
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))

    operands = operands._replace(key=wide(operands.key), value=wide(operands.value))
    if operands.bias is not None and operands.bias.shape[2] == 1:
        operands = operands._replace(bias=wide(operands.bias))
    return operands


def _blocks(rule: Rule, operands: Operands, rows: int) -> Array:
    """All rows, in blocks of so many: few key extents outside, a loop inside."""
    time = operands.query.shape[2]
    count = -(-time // rows)
    bounded = operands.visibility.window != (None, None) and rule.offset is not None
    per_extent = -(-count // rule.extents) if bounded else count
    outputs = []
    for first in range(0, count, per_extent):
        start, stop = first * rows, min((first + per_extent) * rows, time)
        begin, end = _seen(rule, operands, start, stop)
        extent = operands.map_rows(partial(part, start=start, size=stop - start))
        extent = extent.map_keys(partial(part, start=begin, size=end - begin))
        if outputs:  # one extent after another: 0.7 of the memory of all at once
            extent, outputs[-1] = jax.lax.optimization_barrier((extent, outputs[-1]))
        length = stop - start
        if length <= rows:
            block = partial(_block, rule, start=0, size=length)
            outputs.append(_kept(block)(extent))
            continue
        steps = -(-length // rows)
        block = _kept(partial(_block, rule, extent, size=rows), prevent_cse=False)
        found = jax.lax.map(block, jnp.arange(steps) * rows)
        found = jnp.moveaxis(found, 0, 2)
        last = found[:, :, -1, steps * rows - length :]  # it starts that much earlier
        first_ones = found[:, :, :-1].reshape(*last.shape[:2], -1, last.shape[-1])
        outputs.append(jnp.concatenate([first_ones, last], axis=2))
    return jnp.concatenate(outputs, axis=2)


def _seen(rule: Rule, operands: Operands, start: int, stop: int) -> tuple[int, int]:
    """The keys that any of the rows from `start` to before `stop` may see."""
    keys, (left, right) = operands.key.shape[2], operands.visibility.window
    begin, end = 0, keys
    if rule.offset is not None and left is not None:
        begin = min(max(0, start + rule.offset - left), keys - 1)
    if rule.offset is not None and right is not None:
        end = min(max(begin + 1, stop + rule.offset + right), keys)
    return begin, end


def _block(rule: Rule, operands: Operands, start: int | Array, *, size: int) -> Array:
    """`size` rows against all keys: scores, weights, values."""
    operands = operands.map_rows(partial(part, start=start, size=size))
    lam, dtype = operands.lam, rule.dtypes[1]
    maps = []  # one after the other: both as one array would be copied to part them
    for own in [operands] if lam is None else map(operands.branch, range(2)):
        visible = own.visibility.pairs()
        found = rule.weights(scored(rule, own, visible), visible)
        maps.append(found if isinstance(found, tuple) else (found, None))
    weights, divisor = maps[0]
    if lam is not None:
        second, its_divisor = maps[1]
        factor = jnp.broadcast_to(lam.astype(weights.dtype), second.shape[:3])
        if divisor is not None and its_divisor is not None:
            # The second map over what divides the first.
            factor = factor * (divisor / its_divisor)[..., 0]
        # By einsum, so that the gradient of the factor is a product, too: XLA's CPU
        # compiler adds up a product 5 times as fast as a sum of products.
        exact = jax.lax.Precision.HIGHEST
        subtracted = jnp.einsum("bnt,bnts->bnts", factor, second, precision=exact)
        weights = weights - subtracted
    value = operands.value.astype(dtype)
    if divisor is None:
        return weighed(weights, value).astype(dtype)
    return _averaged(weights, divisor, value).astype(dtype)


@jax.custom_jvp
def _averaged(weights: Array, divisor: Array, value: Array) -> Array:
    """Values added up by weights, over what divides these."""
    return weighed(weights, value) / divisor


@_averaged.defjvp
def _averaged_change(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """It needs the quotient, which is kept, and no other rows.

    Softmax subtracts the mean change of a row's scores from each: both products in the
    weights' type, or what rounding left would not cancel.
    """
    (weights, divisor, value), (change, shift, moved) = primals, tangents
    output = checkpoint_name(weighed(weights, value) / divisor, KEPT)
    rows = weighed(change, value.astype(weights.dtype)) + weighed(weights, moved)
    exact = jax.lax.Precision.HIGHEST
    rows -= jnp.einsum("bntv,bnti->bntv", output, shift, precision=exact)
    return output, rows / divisor


def scored(
    rule: Rule, operands: Operands, visible: Bool[Array, "#B #N t s"] | None
) -> Float[Array, "B N t s"]:
    """The scores of rows and keys, `visible` the pairs that count."""
    query, key, value, bias, slopes, _, scale, visibility = operands
    wide = jnp.promote_types(jnp.result_type(query, *rule.dtypes), jnp.float32)
    batch, heads, time, size = query.shape
    kv_heads, branches = value.shape[1], key.shape[1] // value.shape[1]
    # One axis of rows a key head: XLA would copy maps to contract two.
    query = query.reshape(batch, kv_heads, -1, branches, time, size).swapaxes(2, 3)
    scores = scale * jnp.einsum(
        "bkrh,bksh->bkrs",
        query.reshape(batch, key.shape[1], -1, size),
        key.astype(rule.dtypes[0]),
        preferred_element_type=wide,
    )
    scores = scores.reshape(batch, kv_heads, branches, -1, time, key.shape[2])
    scores = scores.swapaxes(2, 3).reshape(batch, heads, time, -1)
    if rule.length_base is not None:
        count = visibility.count(visible)
        scores *= length_scale(count, rule.length_base).astype(wide)
    if bias is not None:
        scores += bias.astype(wide)
    if slopes is not None:
        scores -= slopes * jnp.abs(visibility.distance()).astype(wide)
    return scores


def weighed(
    weights: Float[Array, "B N t s"], value: Float[Array, "B K s V"]
) -> Float[Array, "B N t V"]:
    """The values, added up by weights; float16 has too few exponents for weights."""
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
