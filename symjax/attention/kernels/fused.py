"""Softmax and differential attention as TPU kernels, which keep no scores in memory."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.kernels.backward import backward, row_sums
from symjax.attention.kernels.forward import forward
from symjax.attention.kernels.intervals import Seen, seen_by_rows
from symjax.attention.kernels.plan import Plan, Sizes, arranged, restored
from symjax.attention.masks import only_seen
from symjax.attention.scaling import head_scale, length_scale

OUTPUT, NORMALISER = "attention_output", "attention_normaliser"


def fused(
    query: Float[Array, "B T Nq H"],
    key: Float[Array, "B S Nk H"],
    value: Float[Array, "B S K V"],
    lam: Float[Array, "#B #T N"] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    mask: Bool[Array, "#B S"] | None = None,
    mask_self: bool = False,
    runs: Int[Array, "#B S"] | None = None,
    length_base: float | None = None,
    first: int | Int[Array, ""] | None = None,
    sizes: Sizes = Sizes(),
    interpret: Any = False,
) -> Float[Array, "B T N V"]:
    heads = query.shape[2] // (1 if lam is None else 2)
    left, right = window
    if is_causal:
        right = 0 if right is None else min(right, 0)
    if first is None:
        first = key.shape[1] - query.shape[1]
    seen, count = seen_by_rows(
        query.shape[1],
        key.shape[1],
        first=first,
        left=left,
        right=right,
        mask_self=mask_self,
        mask=mask,
        runs=runs,
    )
    if mask is not None:
        key, value = only_seen(mask, key, value)
    factor = None
    if length_base:
        factor = length_scale(count, length_base).astype(jnp.float32)
    plan = Plan(
        batch=query.shape[0],
        kv_heads=value.shape[2],
        groups=heads // value.shape[2],
        maps=query.shape[2] // heads,
        key_maps=key.shape[2] // value.shape[2],
        length=query.shape[1],
        keys=key.shape[1],
        head_size=query.shape[3],
        value_size=value.shape[3],
        scale=head_scale(query.shape[3]) if scale is None else float(scale),
        left=left,
        right=right,
        by_row=mask_self or runs is not None,
        sizes=sizes,
        interpret=interpret,
    )
    if lam is not None:
        lam = jnp.broadcast_to(lam, (*query.shape[:2], heads)).astype(jnp.float32)
    return _attend(plan, query, key, value, lam, factor, seen)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan, query, key, value, lam, factor, seen):
    return _forward(plan, query, key, value, lam, factor, seen)[0]


def _forward(plan, query, key, value, lam, factor, seen):
    output, second, normaliser = forward(plan, query, key, value, lam, factor, seen)
    output, second = checkpoint_name((output, second), OUTPUT)
    normaliser = checkpoint_name(normaliser, NORMALISER)
    shape = plan.batch, plan.length, plan.heads, plan.value_size
    saved = query, key, value, lam, factor, seen, output, second, normaliser
    return restored(output, shape), saved


def _backward(plan, saved, change):
    query, key, value, lam, factor, seen, output, second, normaliser = saved
    change = arranged(change, plan.heads)
    sums = row_sums(plan, change, output, second, lam)
    rows = query, change, normaliser, sums, lam, factor
    grown = _bands(plan, key, value, seen, *rows)
    found = [
        restored(x, y.shape)
        for x, y in zip(grown, (query, key, value), strict=True)
    ]
    lam_change = None if lam is None else -jnp.swapaxes(sums[:, :, 1], 1, 2)
    return *found, lam_change, None, None


def _bands(plan, key, value, seen, query, change, normaliser, sums, lam, factor):
    """Gradients of query, key and value; rows by bands whose gradients fit in VMEM."""
    width = -(-plan.query_width // 128) * 128
    limit = plan.sizes.gradient_bytes // (4 * width * plan.groups)
    limit = max(limit // 512, 1) * 512
    dtypes = key.dtype, value.dtype
    if plan.length <= limit:
        return backward(
            *(plan, query, key, value, lam, factor, seen),
            *(change, normaliser, sums, dtypes),
        )
    queries, keys, values = [], 0, 0
    for start in range(0, plan.length, limit):
        stop = min(start + limit, plan.length)

        def cut(x, axis):
            return None if x is None else jax.lax.slice_in_dim(x, start, stop, axis=axis)

        band = seen._replace(rows=cut(seen.rows, 2), first=seen.first + start)
        found = backward(
            plan._replace(length=stop - start),
            cut(query, 1),
            key,
            value,
            cut(lam, 1),
            cut(factor, 1),
            band,
            cut(change, change.ndim - 2),
            cut(normaliser, 3),
            cut(sums, 3),
            (jnp.float32, jnp.float32),
        )
        queries.append(found[0])
        keys, values = keys + found[1], values + found[2]
    query = jnp.concatenate(queries, axis=queries[0].ndim - 2)
    return query, keys.astype(dtypes[0]), values.astype(dtypes[1])


_attend.defvjp(_forward, _backward)
