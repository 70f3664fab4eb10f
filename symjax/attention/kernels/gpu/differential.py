"""Differential attention on a kernel of this project, for Hopper GPUs (H100, H200).

Gradients of queries are added up in no fixed order: two runs differ by rounding. There
is no forward-mode derivative (`jax.jvp`), and no second one; `implementation="rows"`
has both. Mosaic GPU, which the kernel is written in, is imported where it runs: not
every machine has it.

Differential attention of one pass over keys, forward and backward, on Hopper GPUs.

Compared on an H200, B 4, T 4096, 16 heads of halves of 64 and values of 128, causal,
bfloat16, forward and backward: these kernels take 2.75 ms; cuDNN, which computes two
whole attentions, 4.26 in one call and 5.46 in two; PyTorch's SDPA by cuDNN in four
calls 6.55. Softmax with 16 heads of 128 takes 2.16 by cuDNN.
"""

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from symjax.attention.core.devices import on_hopper
from symjax.attention.core.meshes import on_any_mesh
from symjax.attention.core.operands import Operands, ScoreSettings, rows_spec
from symjax.attention.core.visibility import Visibility
from symjax.attention.kernels.gpu.differential_forward import forward
from symjax.attention.kernels.gpu.differential_gradients import backward
from symjax.attention.kernels.intervals import RowIntervals, seen_by_rows
from symjax.attention.kernels.operands import RESIDUAL

HEAD, VALUE = 64, 128  # numbers that registers and shared memory are laid out for
OFFSET = 64  # rows of a warpgroup
SCALES = 2.0**-60, 2.0**20  # between them hidden scores are below all others


class GpuDifferential(NamedTuple):
    """Differential attention V1."""

    settings: ScoreSettings
    interpret: Any = None

    name = "gpu_differential"

    def refusal(self, operands: Operands) -> str | None:
        """Return why the kernel does not support a call; None if it does."""
        query, key, value, bias, slopes, lam, _, known = operands
        settings = self.settings
        if not on_hopper():
            return "it needs a Hopper GPU, and jax 0.11 without types of 64 bits"
        if lam is None:
            return "it computes two maps, and not one"
        dtypes = {jnp.dtype(x).name for x in (query.dtype, *settings.dtypes)}
        if dtypes != {"bfloat16"}:
            return f"it takes bfloat16, got {', '.join(sorted(dtypes))}"
        if (key.shape[3], value.shape[3]) != (HEAD, VALUE):
            return (
                f"its keys have {HEAD} numbers and values {VALUE}, got key "
                f"{key.shape[3]} and value {value.shape[3]}"
            )
        if bias is not None or slopes is not None:
            return "it takes no bias and no alibi"
        if known.mask is not None or known.mask_self:
            return "it takes no mask and no mask_self"
        least, most = SCALES
        if (
            settings.length_base is not None
            or not least <= (settings.scale or 0) <= most
        ):
            return (
                f"its scale is one number for all rows, from {least:.0e} to {most:.0e}"
            )
        bounded = known.window != (None, None) or known.key_segments is not None
        if bounded and settings.offset is None:
            return (
                "causal, in a window and with segments it takes no positions and no "
                "axis"
            )
        if bounded and query.shape[2] > known.length:
            return (
                "causal, in a window and with segments it takes no more queries than "
                f"keys, got {query.shape[2]} and {known.length}"
            )
        return None

    def attend(self, operands: Operands, _: Any) -> Float[Array, "B N T V"]:
        return _attend(self.interpret, self.settings, operands)


@on_any_mesh("interpret", "settings", specs=rows_spec, inline=True)
def _attend(
    interpret: Any, settings: ScoreSettings, operands: Operands
) -> Float[Array, "B N T V"]:
    """`attend_rows` for the weights of softmax, by the kernel."""
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in operands[:3])
    batch, length, heads, _ = query.shape
    lam = jnp.broadcast_to(cast(Array, operands.lam), (batch, heads // 2, length))
    seen = _seen(length, settings.offset or 0, operands.visibility)
    static = interpret, settings.scale, operands.visibility.window[1] == 0
    return jnp.swapaxes(differential(static, query, key, value, lam, seen), 1, 2)


def _seen(length: int, offset: int, known: Visibility) -> RowIntervals | None:
    """Which keys rows see; None: all, or those up to their own where all rows of a
    warpgroup see whole blocks before the diagonal ones."""
    (left, right), runs = known.window, known.key_segments
    if runs is None and left is None:
        if right is None or (right == 0 and offset % OFFSET == 0):
            return None
    seen, _ = seen_by_rows(
        length,
        known.length,
        offset,
        left=left,
        right=right,
        mask_self=False,
        exists=None,
        runs=runs,
    )
    return seen


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def differential(
    static: tuple[Any, float, bool],
    query: Float[Array, "B T 2N 64"],
    key: Float[Array, "B S 2K 64"],
    value: Float[Array, "B S K 128"],
    lam: Float[Array, "B N T"],
    seen: RowIntervals | None,
) -> Float[Array, "B T N 128"]:
    """softmax(q₁ k₁ᵀ) v − λ softmax(q₂ k₂ᵀ) v of heads side by side.

    Blocks of keys that no row of a block sees cost nothing.

    Gradients of queries are added up in the order in which programs come to them.

    Args:
        static: whether to interpret, the scale of scores, whether a row sees no later
            (the last one sees all, and S − T is a multiple of 64).
        seen: which keys each row sees, in place of that; one at least.
    """
    return _forward(static, query, key, value, lam, seen)[0]


def _forward(static: tuple, *given: Any) -> tuple[Array, tuple]:
    interpret, scale, causal = static
    found = forward(interpret, *given, scale=scale, causal=causal)
    output, second, normaliser = checkpoint_name(found, RESIDUAL)
    return output, (given, output, second, normaliser)


def _backward(static: tuple, saved: tuple, change: Array) -> tuple[Array | None, ...]:
    interpret, scale, causal = static
    (query, key, value, lam, seen), output, second, normaliser = saved
    # Read more than once, and so as bfloat16, and not as what it was rounded from.
    change = jax.lax.optimization_barrier(change)

    def by_rows(found: Array) -> Float[Array, "B N T"]:
        """Σ change · output of each row."""
        products = change.astype(jnp.float32) * found.astype(jnp.float32)
        return jnp.swapaxes(products.sum(axis=3), 1, 2)

    # Else its sum, the gradient of one λ for all rows, would read both arrays again.
    of_second = jax.lax.optimization_barrier(by_rows(second))
    of_first = by_rows(output) + lam * of_second
    deltas = jnp.stack([of_first, of_second], axis=2).reshape(normaliser.shape)
    given = query, key, value, lam, normaliser, deltas, change, seen
    gradients = backward(interpret, *given, scale=scale, causal=causal)
    return *gradients, -of_second, None


differential.defvjp(_forward, _backward)
