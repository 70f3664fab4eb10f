"""Softmax and differential attention as TPU kernels, which store no scores.

Forward kernel: one program handles a block of rows and visits the blocks of keys that
the rows see. It keeps a running maximum m of the scores, the sum of exp(score − m) and
the values weighted by exp(score − m); both sums are rescaled when m grows (online
softmax, Milakov & Gimelshein 2018, arXiv:1805.02867). It saves the output and the
normaliser log₂ Σ exp(score) of every row.

Backward kernel: one program handles a block of keys and visits the blocks of rows that
see them. It computes the weights again from the normaliser (Dao et al. 2022,
arXiv:2205.14135, algorithm 4). VMEM holds the sums over rows of the gradients of keys
and values, and the sums over keys of the gradients of queries. The row sums
Σ gradient · output use the rounded output, as in FlashAttention-2 (Dao 2023,
arXiv:2307.08691). So in bfloat16, if all values share a large mean, the gradients of
queries and keys lose digits (docs/performance/gpu.md has figures).

One pass over the keys computes both maps of differential attention. Heads that are
whole tiles of 128 lanes are read in the layout [B T N·H], in which products with
weights write them. So they are neither transposed nor repeated.

Costs in millions of cycles, for B 4, T 4096, N 16 on a v5e, causal, bfloat16. Softmax
has heads of 128; differential V1 has halves of 64 and values of 128. The costs of these
kernels are forward + backward, counted from the instruction bundles of the compiler.
The FLOPs of softmax at peak speed take 7.3.

|                              | softmax   | differential V1             |
|------------------------------|-----------|-----------------------------|
| these kernels                | 3.2 + 7.0 | 6.2 + 10.9                  |
| jax's splash kernel          | 12.2      | 24.9, with repeated values  |
| rows in XLA (`attend_rows`)  | 41 to 118 | 166 to 335                  |

Splash computes one map per call and has no length scale. The TPU attention of tokamax
is a splash kernel. Tokamax chooses it by the default device, not at lowering, and needs
Python 3.12.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.lengths import log_scale
from symjax.attention.core.meshes import vary_alike
from symjax.attention.kernels.intervals import (
    RowIntervals,
    pairs_in_window,
    seen_by_rows,
)
from symjax.attention.kernels.operands import RESIDUAL
from symjax.attention.kernels.tpu.attention_backward import backward, row_sums
from symjax.attention.kernels.tpu.attention_forward import forward
from symjax.attention.kernels.tpu.attention_plan import AttentionOperands, AttentionPlan
from symjax.attention.kernels.tpu.tiles import LANES


def attend_in_tiles(
    query: Float[Array, "B T Nq H"],
    key: Float[Array, "B S Nk H"],
    value: Float[Array, "B S K V"],
    lam: Float[Array, "#B #T N"] | None = None,
    *,
    scale: float | None = None,
    window: tuple[int | None, int | None] = (None, None),
    mask: Bool[Array, "#B S"] | None = None,
    mask_self: bool = False,
    runs: Int[Array, "#B S"] | None = None,
    length_base: float | None = None,
    first: int | Int[Array, ""] | None = None,
    block: int = 512,
    resident: int = 8192,
    gradients: int = 2**25,
    interpret: Any = False,
) -> Float[Array, "B T N V"]:
    """Return the rows that `attend_rows` returns for softmax, from the TPU kernels.

    With `lam`, query heads 2n and 2n+1 are the branches of output head n, whose weights
    are w[2n] − lam[n]·w[2n+1]. There are 2K key heads (V1) or K (V2). Operands of
    products keep their dtype, and float32 products keep all bits. Scores and sums are
    float32. A key with a score below −7e29 counts as hidden. Blocks of keys that no row
    of a block sees cost nothing.

    Time O(T S (H + V)) per head, half of it if causal; memory O(T + S) per head.

    Args:
        window: how many keys before and after its own position a row may see.
        mask: whether each key is visible. Hidden keys and values have to be finite.
        runs: the number of each key's segment, non-decreasing. A row is in the segment
            of the key at its position.
        first: the position of row 0, S − T by default.
        block: rows and keys of a block, at most. 512 × 512 keep the MXU of a v5e busy
            for 81 to 95 % of a step.
        resident: rows or keys in VMEM at once, at most.
        gradients: bytes of the queries' gradients in VMEM, at most.
        interpret: run on any machine, slowly: True, or pltpu.InterpretParams.
    """
    length, keys = query.shape[1], key.shape[1]
    intervals, count = seen_by_rows(
        length,
        keys,
        keys - length if first is None else first,
        left=window[0],
        right=window[1],
        mask_self=mask_self,
        exists=mask,
        runs=runs,
    )
    sizes = block, resident, gradients
    plan, operands = plan_of_window(
        query, key, value, lam, scale, window, sizes, interpret
    )
    by_row = mask_self or runs is not None
    operands = with_limits(operands, intervals, count, length_base, by_row)
    output: Array = _attend(plan, *vary_alike((operands, intervals)))
    return split_heads(plan, output, value)


def plan_of_window(
    query: Float[Array, "B T Nq H"],
    key: Float[Array, "B S Nk H"],
    value: Float[Array, "B S K V"],
    lam: Float[Array, "#B #T N"] | None,
    scale: float | None,
    window: tuple[int | None, int | None],
    sizes: tuple[int, int, int] = (512, 8192, 2**25),
    interpret: Any = False,
) -> tuple[AttentionPlan, AttentionOperands]:
    """Return the plan and the operands for rows that see all keys in the window.

    Args:
        sizes: `block`, `resident` and `gradients` of the plan.
    """
    (batch, length, queries, size), (keys, kv_heads, value_size) = (
        query.shape,
        value.shape[1:],
    )
    heads, key_maps = queries // (1 if lam is None else 2), key.shape[2] // kv_heads
    block, resident, gradients = sizes
    left, right = window
    plan = AttentionPlan(
        batch=batch,
        kv_heads=kv_heads,
        groups=heads // kv_heads,
        maps=queries // heads,
        key_maps=key_maps,
        length=length,
        keys=keys,
        head_size=-(-size * key_maps // LANES) * LANES // key_maps,
        value_size=-(-value_size // LANES) * LANES,
        scale=float(size**-0.5 if scale is None else scale),
        left=left,
        right=right,
        pairs=pairs_in_window(length, keys, left, right),
        block=block,
        resident=resident,
        gradients=gradients,
        interpret=interpret,
    )
    common = jnp.promote_types(query.dtype, key.dtype)
    return plan, AttentionOperands(
        heads_in_lanes(query.astype(common), plan.head_size),
        heads_in_lanes(key.astype(common), plan.head_size),
        heads_in_lanes(value, plan.value_size),
        None if lam is None else _by_row(lam, (batch, length, heads)),
        None,
        None,
        None,
    )


def with_limits(
    operands: AttentionOperands,
    intervals: RowIntervals,
    count: Int[Array, "b T"],
    length_base: float | None,
    by_row: bool,
) -> AttentionOperands:
    """Return the operands for rows that do not see all keys in the window.

    Args:
        by_row: whether kernels need the interval of keys of every row.
    """
    factor = None
    if length_base:  # may be float64, which kernels do not have
        factor = log_scale(count, length_base)[:, None].astype(jnp.float32)
    return operands._replace(
        factor=factor,
        rows=intervals.rows if by_row else None,
        exists=None
        if intervals.exists is None
        else intervals.exists[:, None].astype(jnp.int32),
    )


def split_heads(
    plan: AttentionPlan, output: Float[Array, "B T N*V"], value: Float[Array, "B S K V"]
) -> Float[Array, "B T N V"]:
    """Return the heads of an output that are joined along lanes, without padding."""
    output = output.reshape(plan.batch, plan.length, plan.heads, -1)
    return output[..., : value.shape[-1]]


def heads_in_lanes(x: Float[Array, "B T n h"], size: int) -> Float[Array, "B T n*size"]:
    """Pad heads to `size`, and join them along lanes."""
    filling = [(0, 0)] * 3 + [(0, size - x.shape[-1])]
    return jnp.pad(x, filling).reshape(*x.shape[:2], -1)


def _by_row(lam: Float[Array, "#B #T N"], shape: tuple) -> Float[Array, "B N 1 T"]:
    return jnp.swapaxes(jnp.broadcast_to(lam, shape), 1, 2)[:, :, None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    plan: AttentionPlan, operands: AttentionOperands, intervals: RowIntervals
) -> Float[Array, "B T N*V"]:
    return forward(plan, operands, intervals)[0]


def _forward(
    plan: AttentionPlan, operands: AttentionOperands, intervals: RowIntervals
) -> tuple[Array, tuple]:
    found = checkpoint_name(forward(plan, operands, intervals), RESIDUAL)
    output, second, normaliser = found
    return output, (operands, intervals, output, second, normaliser)


def _backward(
    plan: AttentionPlan, residuals: tuple, change: Array
) -> tuple[AttentionOperands, None]:
    operands, intervals, output, second, normaliser = residuals
    sums = row_sums(plan, change, output, second, operands.lam)
    query, key, value = by_bands(plan, operands, intervals, change, normaliser, sums)
    lam = None if second is None else -sums[:, :, 1:]
    return AttentionOperands(query, key, value, lam, None, None, None), None


_attend.defvjp(_forward, _backward)


def by_bands(
    plan: AttentionPlan,
    operands: AttentionOperands,
    intervals: RowIntervals,
    change: Array,
    normaliser: Array,
    sums: Array,
) -> list[Array]:
    """Return the gradients of query, key and value, in the dtypes of the operands.

    The backward kernel keeps the gradients of queries in VMEM. If they do not fit, it
    runs once for each band of rows.
    """
    dtypes = [x.dtype for x in operands[:3]]
    limit = plan.gradients // (4 * plan.query_width * plan.groups)
    limit = max(limit // plan.block, 1) * plan.block
    if plan.length <= limit:
        return backward(plan, operands, intervals, change, normaliser, sums, dtypes)
    queries, keys, values = [], 0, 0
    for start in range(0, plan.length, limit):
        stop = min(start + limit, plan.length)

        def band(x: Any, axis: int, start=start, stop=stop) -> Any:
            if x is None:
                return None
            return jax.lax.slice_in_dim(x, start, stop, axis=axis)

        query, key, value = backward(
            plan._replace(
                length=stop - start,
                pairs=plan.pairs * (stop - start) // plan.length,
            ),
            operands._replace(
                query=band(operands.query, 1),
                lam=band(operands.lam, 3),
                factor=band(operands.factor, 2),
                rows=band(operands.rows, 2),
            ),
            intervals._replace(
                rows=band(intervals.rows, 2), first=intervals.first + start
            ),
            band(change, 1),
            band(normaliser, 3),
            band(sums, 3),
            [dtypes[0], jnp.float32, jnp.float32],
        )
        queries.append(query)
        keys, values = keys + key, values + value
    return [
        jnp.concatenate(queries, axis=1),
        jnp.asarray(keys, dtypes[1]),
        jnp.asarray(values, dtypes[2]),
    ]
