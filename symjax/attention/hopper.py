"""Differential attention on a kernel of this project, for Hopper GPUs (H100, H200).

Gradients of queries are added up in no fixed order: two runs differ by rounding. There
is no forward-mode derivative (`jax.jvp`), and no second one; `implementation="rows"`
has both. Mosaic GPU, which the kernel is written in, is imported where it runs: not
every machine has it.
"""

from functools import partial
from typing import Any, cast

import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.kernels.intervals import Seen, seen_by_rows
from symjax.attention.masks import Visibility
from symjax.attention.meshes import on_any_mesh, on_hopper
from symjax.attention.rows import Operands, Rule, rows_spec

HEAD, VALUE = 64, 128  # numbers that registers and shared memory are laid out for
OFFSET = 64  # rows of a warpgroup
SCALES = 2.0**-60, 2.0**20  # between them hidden scores are below all others


def refusal(rule: Rule, operands: Operands) -> str | None:
    """Why the kernel does not serve a call; None if it does."""
    query, key, value, bias, slopes, lam, _, known = operands
    if not on_hopper():
        return "it needs a Hopper GPU, and jax 0.11 without types of 64 bits"
    if lam is None:
        return "it computes two maps, and not one"
    dtypes = {jnp.dtype(x).name for x in (query.dtype, *rule.dtypes)}
    if dtypes != {"bfloat16"}:
        return f"it takes bfloat16, got {', '.join(sorted(dtypes))}"
    if (key.shape[3], value.shape[3]) != (HEAD, VALUE):
        return (
            f"its keys have {HEAD} numbers and values {VALUE}, got key {key.shape[3]} "
            f"and value {value.shape[3]}"
        )
    if bias is not None or slopes is not None:
        return "it takes no bias and no alibi"
    if known.mask is not None or known.mask_self:
        return "it takes no mask and no mask_self"
    least, most = SCALES
    if rule.length_base is not None or not least <= (rule.scale or 0) <= most:
        return f"its scale is one number for all rows, from {least:.0e} to {most:.0e}"
    bounded = known.window != (None, None) or known.key_segments is not None
    if bounded and rule.offset is None:
        return "causal, in a window and with segments it takes no positions and no axis"
    if bounded and query.shape[2] > known.length:
        return (
            "causal, in a window and with segments it takes no more queries than keys, "
            f"got {query.shape[2]} and {known.length}"
        )
    return None


@on_any_mesh(static=2, specs=rows_spec, inline=True)
def _attend(interpret: Any, rule: Rule, operands: Operands) -> Float[Array, "B N T V"]:
    """`attend_rows` for the weights of softmax, by the kernel."""
    from symjax.attention.kernels.hopper import differential

    query, key, value = (jnp.swapaxes(x, 1, 2) for x in operands[:3])
    batch, length, heads, _ = query.shape
    lam = jnp.broadcast_to(cast(Array, operands.lam), (batch, heads // 2, length))
    seen = _seen(length, rule.offset or 0, operands.visibility)
    static = interpret, rule.scale, operands.visibility.window[1] == 0
    return jnp.swapaxes(differential(static, query, key, value, lam, seen), 1, 2)


def _seen(length: int, offset: int, known: Visibility) -> Seen | None:
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


attend_hopper = partial(_attend, None)
