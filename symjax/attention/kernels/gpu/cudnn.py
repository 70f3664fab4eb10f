"""Softmax and differential attention on cuDNN's flash attention, for NVIDIA GPUs.

`jax.nn.dot_product_attention` calls cuDNN, and raises if the GPU, the cuDNN version or
the head size is unsupported. No scores are stored.

Both maps of a differential head are heads of one call. The second output times λ is
then subtracted from the first. cuDNN requires values as wide as keys. In differential
attention V1 values are wider:

- Values up to `KERNEL_WIDTH` wide: queries and keys are padded with zeros; one call.
- Wider values: they are cut into slices as wide as a key, with one call each.

On an H200, 4 rows of 4096 tokens with 16 heads, key branches of 64 and values of 128
took 4.26 ms forward and backward padded, and 5.46 ms in two calls. `GpuDifferential`
took 2.75 ms in the same run, so dispatch tries it before cuDNN.

Segments become a mask of all pairs, which `jax.nn` makes a bias of two bytes per pair,
so that memory is quadratic in T. A batch of more than `MOST_PAIRS` pairs runs as groups
of examples, one after the other, so that only the bias of one group is in memory. An
example of more pairs is refused, and runs by blocks of rows. `CudnnSoftmax.refusal`
lists the other arguments that are refused, such as masks.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange, repeat
from jaxtyping import Array, Float

from symjax.attention.core.devices import xla_keeps_arrays_whole
from symjax.attention.core.meshes import on_any_mesh
from symjax.attention.core.operands import (
    ScoreArrays,
    ScoreSettings,
    spec_of_score_rows,
)
from symjax.attention.core.visibility import Visibility

DTYPES = "bfloat16", "float16"
KERNEL_WIDTH = 128  # head size that cuDNN's kernels are made for
MOST_PAIRS = 2**30  # pairs in a mask of segments, which then takes 2 GiB
# The implementation of jax.nn.dot_product_attention. Tests set "xla", which runs on all
# platforms.
LIBRARY = "cudnn"


class CudnnSoftmax(NamedTuple):
    """Adapter of cuDNN for softmax attention and its differential forms."""

    settings: ScoreSettings

    def refusal(self, arrays: ScoreArrays) -> str | None:
        """Return why cuDNN does not support a call; None if it does."""
        query, key, value, bias, slopes, _, _, visibility, adjustment = arrays
        settings = self.settings
        dtypes = {jnp.dtype(x).name for x in (query.dtype, *settings.dtypes)}
        if len(dtypes) > 1 or not dtypes <= set(DTYPES):
            return f"it takes {' or '.join(DTYPES)}, got {', '.join(sorted(dtypes))}"
        if bias is not None or slopes is not None:
            return "it takes no bias and no alibi"
        if adjustment is not None:
            return "it takes no log_decay and no sink"
        if visibility.mask is not None or visibility.mask_self:
            return "it takes no mask and no mask_self"
        if visibility.key_segments is not None:
            pairs = query.shape[2] * visibility.length
            if pairs > MOST_PAIRS:
                return (
                    f"with segments it takes examples of at most {MOST_PAIRS:,} pairs, "
                    f"got {pairs:,}"
                )
            if query.shape[0] * pairs > MOST_PAIRS and not xla_keeps_arrays_whole():
                return (
                    f"a batch with segments of more than {MOST_PAIRS:,} pairs runs in "
                    "groups, which XLA cannot split over devices: use jax.shard_map"
                )
        if settings.length_base or settings.length_scale or settings.scale is None:
            return "it takes a scale that is one number for all rows"
        if value.shape[3] % key.shape[3]:
            return (
                "it takes values as wide as a key, or a multiple of that, got key "
                f"{key.shape[3]} and value {value.shape[3]}"
            )
        left, right = visibility.window
        if visibility.window != (None, None) and (settings.offset != 0 or right != 0):
            return (
                "it takes windows that end at the row's own position, for as many "
                f"queries as keys, got ({left}, {right}), {query.shape[2]} and "
                f"{visibility.length}"
            )
        try:  # trace a gradient too, since cuDNN supports fewer sizes in training
            attend = partial(_outputs_of_maps, settings, visibility)
            jax.eval_shape(lambda *x: jax.vjp(attend, *x)[0], *arrays[:3])
        except RuntimeError as error:  # the size is unsupported, or cuDNN is missing
            if not isinstance(error, NotImplementedError) and "cuDNN" not in str(error):
                raise
            return str(error).splitlines()[0]
        return None

    def attend(self, arrays: ScoreArrays, _: Any) -> Float[Array, "B N T V"]:
        return _attend_cudnn(self.settings, arrays)


@on_any_mesh("settings", specs=spec_of_score_rows, inline=True)
def _attend_cudnn(
    settings: ScoreSettings, arrays: ScoreArrays
) -> Float[Array, "B N T V"]:
    """Return the rows that `scores.rows.attend_rows` returns for softmax."""
    lam = arrays.lam
    output = _outputs_by_groups(settings, arrays)
    if lam is not None:
        pairs = output.astype(lam.dtype)
        output = pairs[:, 0::2] - lam[..., None] * pairs[:, 1::2]
    return output.astype(arrays.value.dtype)


def _outputs_by_groups(
    settings: ScoreSettings, arrays: ScoreArrays
) -> Float[Array, "B Nq T V"]:
    """Return `_outputs_of_maps`, computed in groups of examples if there are segments.

    The backward pass keeps the outputs of cuDNN's forward pass, and makes the mask of a
    group again.
    """
    query, visibility = arrays.query, arrays.visibility
    batch, most = query.shape[0], MOST_PAIRS // (query.shape[2] * visibility.length)
    if visibility.key_segments is None or batch <= most:
        return _outputs_of_maps(settings, visibility, *arrays[:3])
    segments = visibility.row_segments, visibility.key_segments
    count = -(-batch // most)
    size = -(-batch // count)

    def attend(group: tuple) -> Array:
        (rows, keys), operands = group
        visible = replace(visibility, row_segments=rows, key_segments=keys)
        return _outputs_of_maps(settings, visible, *operands)

    def split(x: Array) -> Array:
        if missing := count * size - batch:
            x = jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(count, size, *x.shape[1:])

    groups = jax.tree.map(split, (segments, arrays[:3]))
    outputs = jax.lax.map(jax.checkpoint(attend, policy=_is_forward_of_cudnn), groups)
    return jax.lax.collapse(outputs, 0, 2)[:batch]


def _is_forward_of_cudnn(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name.startswith("dot_product_attention_fwd")


def _outputs_of_maps(
    settings: ScoreSettings,
    visibility: Visibility,
    query: Float[Array, "B Nq T H"],
    key: Float[Array, "B Nk S H"],
    value: Float[Array, "B K S V"],
) -> Float[Array, "B Nq T V"]:
    """Return the outputs of all query heads, before λ is applied.

    jax.nn needs the query heads of a key head next to each other, so query heads are
    sorted by value head k, branch p and group g.
    """
    kv_heads, branches = value.shape[1], key.shape[1] // value.shape[1]
    (left, right), heads = visibility.window, {"k": kv_heads, "p": branches}
    mask = None
    if visibility.row_segments is not None and visibility.key_segments is not None:
        rows, keys = visibility.row_segments, visibility.key_segments
        mask = rows[:, None, :, None] == keys[:, None, None, :]
    query = rearrange(query, "b (k g p) t h -> b t (k p g) h", **heads)
    key = jnp.swapaxes(key, 1, 2)
    if (wider := value.shape[3] - key.shape[3]) and value.shape[3] <= KERNEL_WIDTH:
        query, key = (jnp.pad(x, [(0, 0)] * 3 + [(0, wider)]) for x in (query, key))
    attend = partial(
        jax.nn.dot_product_attention,
        query,
        key,
        mask=mask,
        scale=settings.scale,
        is_causal=right == 0,
        local_window_size=None if left is None else (left, 0),
        implementation=LIBRARY,
    )
    value = repeat(value, "b k s v -> b s (k p) v", p=branches)
    slices = jnp.split(value, value.shape[3] // key.shape[3], axis=3)
    output = jnp.concatenate([attend(value=x) for x in slices], axis=3)
    return rearrange(output, "b t (k p g) v -> b (k g p) t v", **heads)
