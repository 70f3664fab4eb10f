"""Score mechanisms on cuDNN's flash attention, for NVIDIA GPUs.

`jax.nn.dot_product_attention` calls it, and knows which GPUs, cuDNN versions and head
sizes it serves. It keeps no scores in memory. Both maps of a differential head are
heads of one call, and λ subtracts their outputs. Its values are as wide as its keys:
where they are wider, as those of differential attention V1, up to `TILE` numbers,
queries and keys are filled up with zeros, and wider ones take one call for each width
of a key. The operations are as many, but the exponentials fewer: on an H200 an
attention of 16 heads, halves of 64, values of 128, takes 4.26 ms forward and backward
filled up and 5.46 in two calls (4 rows of 4096 tokens). There `hopper` takes 2.75: this
is for what it does not serve, and for other GPUs.

Segments reach it as a mask of all pairs, two bytes each: memory is no longer linear in
T, so that long rows of many examples go by blocks of rows. Not served are other masks,
biases and length scales. Its forward pass runs again where `jax.checkpoint` drops its
output: cuDNN's residuals have no names to save.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange, repeat
from jaxtyping import Array, Float

from symjax.attention.core.meshes import on_any_mesh
from symjax.attention.core.operands import Operands, ScoreSettings, rows_spec
from symjax.attention.core.visibility import Visibility

DTYPES = "bfloat16", "float16"
TILE = 128  # numbers of a head that its kernels are made for
MOST_PAIRS = 2**29  # of a mask of segments: 1 GiB
LIBRARY = "cudnn"  # jax.nn's own name; its "xla" has the same semantics anywhere


class CudnnSoftmax(NamedTuple):
    """Softmax attention and its differential forms."""

    settings: ScoreSettings

    name = "cudnn"

    def refusal(self, operands: Operands) -> str | None:
        """Return why cuDNN does not support a call; None if it does."""
        query, key, value, bias, slopes, _, _, known = operands
        settings = self.settings
        dtypes = {jnp.dtype(x).name for x in (query.dtype, *settings.dtypes)}
        if len(dtypes) > 1 or not dtypes <= set(DTYPES):
            return f"it takes {' or '.join(DTYPES)}, got {', '.join(sorted(dtypes))}"
        if bias is not None or slopes is not None:
            return "it takes no bias and no alibi"
        if known.mask is not None or known.mask_self:
            return "it takes no mask and no mask_self"
        pairs = query.shape[0] * query.shape[2] * known.length
        if known.key_segments is not None and pairs > MOST_PAIRS:
            return f"it takes segments of at most {MOST_PAIRS:,} pairs, got {pairs:,}"
        if settings.length_base is not None or settings.scale is None:
            return "its scale is one number for all rows"
        if value.shape[3] % key.shape[3]:
            return (
                "its values are as wide as a key, or a multiple of that, got key "
                f"{key.shape[3]} and value {value.shape[3]}"
            )
        left, right = known.window
        if known.window != (None, None) and (settings.offset != 0 or right != 0):
            return (
                "it takes windows that end at the row's own position, for as many "
                f"queries as keys, got ({left}, {right}), {query.shape[2]} and "
                f"{known.length}"
            )
        try:  # as in training, where it serves less
            attend = partial(_attend, settings, known)
            jax.eval_shape(lambda *arrays: jax.vjp(attend, *arrays)[0], *operands[:3])
        except RuntimeError as error:  # what cuDNN lacks, or that there is none
            if not isinstance(error, NotImplementedError) and "cuDNN" not in str(error):
                raise
            return str(error).splitlines()[0]
        return None

    def attend(self, operands: Operands, _: Any) -> Float[Array, "B N T V"]:
        return _with_lam(self.settings, operands)


@on_any_mesh("settings", specs=rows_spec, inline=True)
def _with_lam(settings: ScoreSettings, operands: Operands) -> Float[Array, "B N T V"]:
    """`attend_rows` for the weights of softmax, by cuDNN."""
    lam = operands.lam
    output = _attend(settings, operands.visibility, *operands[:3])
    if lam is not None:
        pairs = output.astype(lam.dtype)
        output = pairs[:, 0::2] - lam[..., None] * pairs[:, 1::2]
    return output.astype(operands.value.dtype)


def _attend(
    settings: ScoreSettings,
    known: Visibility,
    query: Float[Array, "B Nq T H"],
    key: Float[Array, "B Nk S H"],
    value: Float[Array, "B K S V"],
) -> Float[Array, "B Nq T V"]:
    """The outputs of all query heads, before λ. A key head serves queries side by side,
    so that those of one branch must stand together."""
    kv_heads, branches = value.shape[1], key.shape[1] // value.shape[1]
    (left, right), heads = known.window, {"k": kv_heads, "p": branches}
    mask = None
    if known.row_segments is not None and known.key_segments is not None:
        rows, keys = known.row_segments, known.key_segments
        mask = rows[:, None, :, None] == keys[:, None, None, :]
    query = rearrange(query, "b (k g p) t h -> b t (k p g) h", **heads)
    key = jnp.swapaxes(key, 1, 2)
    if (wider := value.shape[3] - key.shape[3]) and value.shape[3] <= TILE:
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
    parts = jnp.split(value, value.shape[3] // key.shape[3], axis=3)
    output = jnp.concatenate([attend(value=part) for part in parts], axis=3)
    return rearrange(output, "b t (k p g) v -> b (k g p) t v", **heads)
