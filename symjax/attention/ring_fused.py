"""Ring attention on the fused kernel, for TPUs.

Keys and values go around as in `ring.py`; on each device the forward kernel gives its
rows' outputs and normalisers for the keys of one other, and two parts of a row are one
by their normalisers. In the backward pass the kernel takes each device's keys with the
normaliser of the whole row, so that its weights are those of the whole row, and the
gradients of keys and values, in float32, travel with them.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from symjax.attention.kernels.backward import row_sums
from symjax.attention.kernels.blocks import Operands, Plan
from symjax.attention.kernels.forward import EMPTY, forward
from symjax.attention.kernels.fused import (
    apart,
    by_bands,
    heads_in_lanes,
    prepared,
    restricted,
)
from symjax.attention.kernels.intervals import Seen, seen_by_rows
from symjax.attention.masks import part
from symjax.attention.meshes import vary_alike
from symjax.attention.rows import Operands as RowOperands
from symjax.attention.rows import Rule
from symjax.attention.shards import around, if_seen, pass_on


class Turn(NamedTuple):
    """The static half of a call."""

    plan: Plan
    axis_name: str
    branches: int  # that a value meets


class Keys(NamedTuple):
    """What travels: a device's own, as they are given."""

    key: Float[Array, "B S N H"]
    value: Float[Array, "B S K V"]


class Parts(NamedTuple):
    """Rows of the keys so far: their output, and log₂ Σ exp(score), −∞ of none."""

    output: Float[Array, "B T N V"]
    normaliser: Float[Array, "B T N 1"]


def attend(
    rule: Rule, operands: RowOperands, axis_name: str, interpret: Any = False
) -> Float[Array, "B N T V"]:
    """`attend_ring` for what the fused kernel serves.

    Maps of differential attention are heads of their own here, and meet the values
    once each.
    """
    query, key, value, _, _, lam, _, known = operands
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    heads = {"k": value.shape[2], "p": 2}
    branches = key.shape[2] // value.shape[2]
    order = "(k p g)" if branches == 2 else "(k g p)"
    if lam is not None:  # queries stand together at their key head
        query = rearrange(query, f"b t (k g p) h -> b t {order} h", **heads)
    mask = known.mask
    if mask is not None:
        mask = jnp.broadcast_to(mask[:, 0, 0], (mask.shape[0], known.length))
    left, right = known.window
    seen, count = seen_by_rows(
        query.shape[1],
        known.length,
        known.rows[0, 0],
        left=left,
        right=right,
        mask_self=known.mask_self,
        exists=mask,
        runs=known.key_segments,
    )
    met = jnp.repeat(value, branches if lam is not None else 1, axis=2)
    plan, given = prepared(
        query, key, met, None, rule.scale, known.window, interpret=interpret
    )
    by_row = known.mask_self or known.key_segments is not None
    given = restricted(given, seen, count, rule.length_base, by_row)
    turn = Turn(plan, axis_name, met.shape[2] // value.shape[2])
    own = Keys(key.astype(given.query.dtype), value)
    given = given._replace(key=None, value=None)  # those of all devices come by
    output: Array = _ring(turn, *vary_alike((given, own, seen)))
    output = apart(plan, output, met)
    if lam is not None:
        one, two = rearrange(output, f"b t {order} v -> p b t (k g) v", **heads)
        output = one - jnp.swapaxes(lam, 1, 2)[..., None].astype(one.dtype) * two
    return jnp.swapaxes(output, 1, 2).astype(rule.dtypes[1])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(
    turn: Turn, given: Operands, own: Keys, seen: Seen
) -> Float[Array, "B T N*V"]:
    return _forward(turn, given, own, seen)[0]


def _forward(turn: Turn, given: Operands, own: Keys, seen: Seen) -> tuple[Array, tuple]:
    plan, index = turn.plan, jax.lax.axis_index(turn.axis_name)
    shape = plan.batch, plan.length, plan.heads
    nothing = Parts(
        jnp.zeros((*shape, plan.value_size), jnp.float32),
        jnp.full((*shape, 1), -jnp.inf, jnp.float32),
    )
    nothing, _ = vary_alike((nothing, given.query))

    def meet(sums: Parts, keys: Keys, source: Array) -> tuple[Parts, Keys]:
        def visit(sums: Parts) -> Parts:
            here, who = _at(turn, given, seen, keys, source)
            output, _, normaliser = forward(plan, here, who)
            output = output.reshape(*shape, -1).astype(jnp.float32)
            normaliser = jnp.moveaxis(normaliser[:, :, 0], 1, 2)[..., None]
            none = normaliser == -EMPTY
            return _merged(sums, Parts(output, jnp.where(none, -jnp.inf, normaliser)))

        window = plan.left, plan.right
        return if_seen(window, plan.length, source - index, visit, sums), keys

    sums, _ = around(turn.axis_name, meet, nothing, own)
    output = sums.output.reshape(*shape[:2], -1)
    normaliser = jnp.moveaxis(sums.normaliser[..., 0], 2, 1)[:, :, None]
    normaliser = jnp.where(jnp.isneginf(normaliser), -EMPTY, normaliser)
    return output, (given, own, seen, output, normaliser)


def _backward(turn: Turn, saved: tuple, change: Array) -> tuple[Operands, Keys, None]:
    given, own, seen, output, normaliser = saved
    plan, index = turn.plan, jax.lax.axis_index(turn.axis_name)
    sums = row_sums(plan, change, output, None, None)
    narrow = change.astype(own.value.dtype)

    def meet(query: Array, moving: tuple, source: Array) -> tuple[Array, tuple]:
        keys, gradients = moving

        def visit(grown: tuple) -> tuple:
            here, who = _at(turn, given, seen, keys, source)
            wide = [jnp.float32] * 3
            query, *met = by_bands(plan, here, who, narrow, normaliser, sums, wide)
            (new,) = back(tuple(met))
            return tuple(map(jnp.add, grown, (query, *new)))

        window, grown = (plan.left, plan.right), (query, *gradients)
        query, *gradients = if_seen(window, plan.length, source - index, visit, grown)
        return query, (keys, tuple(gradients))

    zeros = (jnp.zeros(x.shape, jnp.float32) for x in (given.query, *own))
    query, *zeros = vary_alike((tuple(zeros), own))[0]
    back = jax.linear_transpose(partial(_met, turn), Keys(*zeros))
    start = query, (own, tuple(zeros))
    query, (_, gradients) = around(turn.axis_name, meet, *start)
    key, value = pass_on(gradients, turn.axis_name)  # back on their own device
    query, key, value = (
        x.astype(like.dtype)
        for x, like in zip((query, key, value), (given.query, *own), strict=True)
    )
    return Operands(query, None, None, None, None, None, None), Keys(key, value), None


_ring.defvjp(_forward, _backward)


def _met(turn: Turn, keys: Keys) -> tuple[Float[Array, "B S N*H"], Array]:
    """Keys and values as the kernel reads them, a value once for each branch."""
    value = jnp.repeat(keys.value, turn.branches, axis=2)
    return heads_in_lanes(keys.key, turn.plan.head_size), heads_in_lanes(
        value, turn.plan.value_size
    )


def _at(
    turn: Turn, given: Operands, seen: Seen, keys: Keys, source: Array
) -> tuple[Operands, Seen]:
    """The rows at the keys of one device, which are numbered from 0 there."""
    length = turn.plan.keys
    start = source * length
    begin, end, own = (seen.rows[:, i] for i in range(3))
    here = (own >= start) & (own < start + length)
    rows = jnp.stack(
        [
            jnp.clip(begin - start, 0, length),
            jnp.clip(end - start, 0, length),
            jnp.where(here, own - start, -1),
        ],
        axis=1,
    )
    own_keys = partial(part, start=start, size=length)
    exists = own_keys(given.exists, 2)
    key, value = _met(turn, keys)
    given = given._replace(
        key=key,
        value=value,
        rows=None if given.rows is None else rows,
        exists=exists,
    )
    return given, Seen(rows, own_keys(seen.exists, 1), seen.first - start)


def _merged(one: Parts, two: Parts) -> Parts:
    """Rows of the keys of both."""
    both = jnp.logaddexp2(one.normaliser, two.normaliser)
    finite = jnp.where(jnp.isneginf(both), 0, both)
    output = one.output * jnp.exp2(one.normaliser - finite)
    return Parts(output + two.output * jnp.exp2(two.normaliser - finite), both)
