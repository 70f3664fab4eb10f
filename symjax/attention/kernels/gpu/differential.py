"""Differential attention by kernels of this project for Hopper GPUs (H100, H200).

Both maps of a head are computed in one pass over the keys, forward
(`differential_forward`) and backward (`differential_gradients`). This file decides
whether the kernels support a call (`GpuDifferential`) and defines the derivative
(`differential`).

In one run on an H200 with B 4, T 4096, 16 heads with halves of 64 and values of 128,
causal, bfloat16, forward and backward, these kernels took 2.75 ms
(docs/performance.md has current figures). cuDNN, which computes two whole
attentions, took 4.26 ms in one call and 5.46 ms in two. PyTorch's SDPA on cuDNN took
6.55 ms in four calls. Softmax with 16 heads of 128 took 2.16 ms on cuDNN.

Gradients of queries are added up in no fixed order, so results of two runs differ by
rounding. There is no forward-mode derivative (`jax.jvp`) and no second derivative;
`implementation="rows"` has both. The kernels are written in Pallas' Mosaic GPU, which
some machines lack, so their files are imported when they run.
"""

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from symjax.attention.core.devices import on_hopper
from symjax.attention.core.meshes import on_any_mesh
from symjax.attention.core.operands import (
    ScoreArrays,
    ScoreSettings,
    spec_of_score_rows,
)
from symjax.attention.core.visibility import Visibility
from symjax.attention.kernels.intervals import RowIntervals, seen_by_rows
from symjax.attention.kernels.operands import RESIDUAL

HEAD, VALUE = 64, 128  # sizes of keys and values that the kernels support
# Causal calls need no `RowIntervals` if S − T is a multiple of this.
OFFSET = 64
# Least and largest scale. Hidden keys have the score −2¹⁰⁰, which kernels multiply by
# the scale like all other scores. A smaller scale would move this score too near to
# visible scores, and a larger scale could make it overflow.
SCALES = 2.0**-60, 2.0**20


class GpuDifferential(NamedTuple):
    """Adapter of the kernels, for differential attention V1."""

    settings: ScoreSettings
    interpret: Any = None

    def refusal(self, arrays: ScoreArrays) -> str | None:
        """Return why the kernel does not support a call; None if it does."""
        query, key, value, bias, slopes, lam, _, visibility, adjustment = arrays
        settings = self.settings
        if not on_hopper():
            return "it needs a Hopper GPU, jax 0.11 or later, and jax_enable_x64 off"
        if lam is None:
            return "it computes two maps: it needs lam"
        if key.shape[1] != 2 * value.shape[1]:
            return (
                "it takes two key heads for each value head (V1), got "
                f"{key.shape[1]} key heads and {value.shape[1]} value heads"
            )
        dtypes = {jnp.dtype(x).name for x in (query.dtype, *settings.dtypes)}
        if dtypes != {"bfloat16"}:
            return f"it takes bfloat16, got {', '.join(sorted(dtypes))}"
        if (key.shape[3], value.shape[3]) != (HEAD, VALUE):
            return (
                f"it takes key heads of {HEAD} and value heads of {VALUE}, got key "
                f"{key.shape[3]} and value {value.shape[3]}"
            )
        if bias is not None or slopes is not None:
            return "it takes no bias and no alibi"
        if adjustment is not None:
            return "it takes no log_decay and no sink"
        if settings.length_scale is not None:
            return "it takes no length_scale"
        if visibility.mask is not None or visibility.mask_self:
            return "it takes no mask and no mask_self"
        least, most = SCALES
        if (
            settings.length_base is not None
            or not least <= (settings.scale or 0) <= most
        ):
            return (
                "it takes a scale that is one number for all rows, from "
                f"{least:.0e} to {most:.0e}"
            )
        bounded = (
            visibility.window != (None, None) or visibility.key_segments is not None
        )
        if bounded and settings.offset is None:
            return (
                "it takes no positions and no axis_name in calls that are causal, have "
                "a window or segments"
            )
        if bounded and query.shape[2] > visibility.length:
            return (
                "in calls that are causal, have a window or segments it takes at most "
                f"as many queries as keys, got {query.shape[2]} and {visibility.length}"
            )
        return None

    def attend(self, arrays: ScoreArrays, _: Any) -> Float[Array, "B N T V"]:
        return _attend_differential(self.interpret, self.settings, arrays)


@on_any_mesh("interpret", "settings", specs=spec_of_score_rows, inline=True)
def _attend_differential(
    interpret: Any, settings: ScoreSettings, arrays: ScoreArrays
) -> Float[Array, "B N T V"]:
    """Return the rows that `scores.rows.attend_rows` returns for two softmax maps."""
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in arrays[:3])
    batch, length, heads, _ = query.shape
    lam = jnp.broadcast_to(cast(Array, arrays.lam), (batch, heads // 2, length))
    intervals = _row_intervals(length, settings.offset or 0, arrays.visibility)
    static = interpret, settings.scale, arrays.visibility.window[1] == 0
    return jnp.swapaxes(differential(static, query, key, value, lam, intervals), 1, 2)


def _row_intervals(
    length: int, offset: int, visibility: Visibility
) -> RowIntervals | None:
    """Return the interval of keys that each row sees, or None if the kernel needs none.

    It needs none if rows see all keys, or all keys up to their own position and the
    offset is a multiple of `OFFSET`.
    """
    (left, right), runs = visibility.window, visibility.key_segments
    if runs is None and left is None:
        if right is None or (right == 0 and offset % OFFSET == 0):
            return None
    intervals, _ = seen_by_rows(
        length,
        visibility.length,
        offset,
        left=left,
        right=right,
        mask_self=False,
        exists=None,
        runs=runs,
    )
    return intervals


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def differential(
    static: tuple[Any, float, bool],
    query: Float[Array, "B T 2N 64"],
    key: Float[Array, "B S 2K 64"],
    value: Float[Array, "B S K 128"],
    lam: Float[Array, "B N T"],
    intervals: RowIntervals | None,
) -> Float[Array, "B T N 128"]:
    """Return softmax(q₁ k₁ᵀ) v − λ softmax(q₂ k₂ᵀ) v.

    Query head 2n is q₁ of head n, and 2n + 1 is q₂. Blocks of keys that no row of a
    tile sees are skipped.

    Args:
        static: how to interpret the kernels (None: not at all), the scale of scores,
            and whether attention is causal. If it is causal and there are no intervals,
            the last row sees the last key, and S − T is a multiple of 64.
        intervals: the keys that each row sees, at least one.
    """
    return _differential_forward(static, query, key, value, lam, intervals)[0]


def _differential_forward(static: tuple, *operands: Any) -> tuple[Array, tuple]:
    from symjax.attention.kernels.gpu.differential_forward import forward

    interpret, scale, causal = static
    results = forward(interpret, *operands, scale=scale, causal=causal)
    output, second, normaliser = checkpoint_name(results, RESIDUAL)
    return output, (operands, output, second, normaliser)


def _differential_backward(
    static: tuple, residuals: tuple, output_gradient: Array
) -> tuple[Array | None, ...]:
    from symjax.attention.kernels.gpu.differential_gradients import backward

    interpret, scale, causal = static
    (query, key, value, lam, intervals), output, second, normaliser = residuals
    # The barrier makes all kernels read this array in bfloat16, and not the wider array
    # that it was rounded from.
    output_gradient = jax.lax.optimization_barrier(output_gradient)

    def row_sums(output: Array) -> Float[Array, "B N T"]:
        """Return Σ output · output gradient of each row."""
        products = output_gradient.astype(jnp.float32) * output.astype(jnp.float32)
        return jnp.swapaxes(products.sum(axis=3), 1, 2)

    # If all rows share one λ, the gradient of λ is minus the sum of this array. Without
    # the barrier XLA would compute the array again for that sum.
    second_sums = jax.lax.optimization_barrier(row_sums(second))
    first_sums = row_sums(output) + lam * second_sums
    deltas = jnp.stack([first_sums, second_sums], axis=2).reshape(normaliser.shape)
    gradients = backward(
        interpret,
        *(query, key, value, lam, normaliser, deltas, output_gradient, intervals),
        scale=scale,
        causal=causal,
    )
    return *gradients, -second_sums, None


differential.defvjp(_differential_forward, _differential_backward)
