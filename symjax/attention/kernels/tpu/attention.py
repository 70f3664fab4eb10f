"""Adapter of the TPU kernels for softmax and differential attention.

On a machine without a TPU, `implementation="tpu"` interprets the kernels. That is slow,
and meant for tests. The kernels have no forward-mode derivative (`jax.jvp`) and no
second derivative; `implementation="rows"` has both.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.core.devices import backend, on_tpu, split_by_xla
from symjax.attention.core.meshes import on_any_mesh, varying
from symjax.attention.core.operands import (
    ScoreArrays,
    ScoreSettings,
    spec_of_score_rows,
)
from symjax.attention.kernels.tpu.attention_gradient import attend_in_tiles
from symjax.attention.kernels.tpu.tiles import LANES

LARGEST_HEAD = 512
# Most lanes of the query heads of one key head, added up. The backward kernel keeps
# their gradients in VMEM, which has no room for more.
MOST_LANES = 2**14


class TpuSoftmax(NamedTuple):
    """The kernels of softmax and differential attention, with a call's settings."""

    settings: ScoreSettings
    interpret: Any = False

    def refusal(self, arrays: ScoreArrays) -> str | None:
        """Return why the kernel does not support a call; None if it does."""
        query, _, value, bias, slopes, _, _, visibility, adjustment = arrays
        settings = self.settings
        if backend() == "tpu" and not on_tpu():
            return "it needs a TPU of v4 or later, and jax_enable_x64 off"
        if backend() == "tpu" and split_by_xla():
            return "XLA cannot split it over devices: call it in a jax.shard_map"
        if backend() != "tpu" and varying(arrays[:3]):
            return "interpreted, it needs a jax.shard_map with check_vma=False"
        dtypes = {jnp.dtype(x).name for x in (query.dtype, *settings.dtypes)}
        if not dtypes <= {"bfloat16", "float32"}:
            return f"it takes bfloat16 and float32, got {', '.join(sorted(dtypes))}"
        if bias is not None or slopes is not None:
            return "it takes no bias and no alibi"
        if adjustment is not None:
            return "it takes no log_decay and no sink"
        if visibility.mask is not None and visibility.mask.shape[1:3] != (1, 1):
            return (
                f"it takes a mask of keys alone, [B 1 1 S], got {visibility.mask.shape}"
            )
        if not visibility.consecutive:
            return "it takes rows that follow each other, without positions"
        if settings.scale is None:
            return "it takes a scale that is a number, not an array"
        if settings.length_scale is not None:
            return "it takes no length_scale"
        if (size := max(query.shape[3], value.shape[3])) > LARGEST_HEAD:
            return f"it takes heads of at most {LARGEST_HEAD} dimensions, got {size}"
        lanes = -(-query.shape[3] // LANES) * LANES * (query.shape[1] // value.shape[1])
        if lanes > MOST_LANES:
            return (
                f"query heads that share a key head, each padded to a multiple of "
                f"{LANES} dimensions, have at most {MOST_LANES} lanes, got {lanes}"
            )
        return None

    def attend(self, arrays: ScoreArrays, _: Any) -> Float[Array, "B N T V"]:
        return _attend(self.interpret or backend() != "tpu", self.settings, arrays)


@on_any_mesh("interpret", "settings", specs=spec_of_score_rows)
def _attend(
    interpret: Any, settings: ScoreSettings, arrays: ScoreArrays
) -> Float[Array, "B N T V"]:
    """Return the rows that `scores.rows.attend_rows` returns for softmax."""
    visibility, lam = arrays.visibility, arrays.lam
    mask = visibility.mask
    if mask is not None:
        mask = jnp.broadcast_to(mask[:, 0, 0], (mask.shape[0], visibility.length))
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in arrays[:3])
    output = attend_in_tiles(
        query,
        key,
        value,
        None if lam is None else jnp.swapaxes(lam, 1, 2),
        scale=settings.scale,
        window=visibility.window,
        mask=mask,
        mask_self=visibility.mask_self,
        runs=visibility.key_segments,
        length_base=settings.length_base,
        first=visibility.row_positions[0, 0]
        if settings.offset is None
        else settings.offset,
        interpret=interpret,
    )
    return jnp.swapaxes(output, 1, 2)
