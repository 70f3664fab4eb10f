"""Causal Performer and linear attention on NVIDIA GPUs' kernels."""

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from symjax.attention.chunks import TILE, Tokens, heads_joined, layout, scan
from symjax.attention.features import Features, LogFeatures
from symjax.attention.kernels.blocks import RESIDUAL
from symjax.attention.kernels.gpu_chunks import BLOCK, SIZES, filled, of_key_heads
from symjax.attention.kernels.gpu_features import Kept, backward, forward
from symjax.attention.kernels.gpu_states import Form, Ids
from symjax.attention.kernels.seen import Shown
from symjax.attention.meshes import vary_alike
from symjax.attention.normalised import LOST, Normalised
from symjax.attention.performer_fused import MOST_FEATURES
from symjax.attention.plain_features import ELEMENTWISE
from symjax.attention.rescue import rescued
from symjax.attention.segments import starts
from symjax.attention.stretches import in_one


def _exponents(x: Array, _: None) -> LogFeatures:
    return LogFeatures(None, x)


_BY_EXPONENTS = Normalised(Features(_exponents, _exponents))


class GpuFeatures(NamedTuple):
    """The kernels, as a `Kernel` of the engine, of bfloat16 and of features that are
    never negative. XLA makes them in float32, but for those of single numbers."""

    recurrence: Normalised
    interpret: Any = False

    platform = "cuda"

    def serves(self, tokens: Tokens, parameters: Any) -> bool:
        maps, (_, key, value) = self.recurrence.features, tokens[:3]
        narrow = all(x.dtype == jnp.bfloat16 for x in tokens[:3])
        if not narrow or maps.signed or maps.pairs or value.shape[3] not in SIZES:
            return False
        like = jax.ShapeDtypeStruct(key.shape, jnp.float32)
        made = jax.tree.leaves(jax.eval_shape(maps.key, like, parameters))
        return len(made) == 1 and made[0].shape[3] <= MOST_FEATURES

    def attend(self, tokens: Tokens, parameters: Any) -> Float[Array, "B T N V"]:
        query, key, value, visible, segment = Shown.of(tokens)
        batch, length = query.shape[:2]
        if visible is None:
            visible = jnp.ones((batch, length), bool)
        if segment is None:
            segment = jnp.zeros((batch, length), jnp.int32)
        query, key, value, visible, segment = (
            filled(x) for x in (query, key, value, visible, segment)
        )
        ids = Ids(segment, jnp.where(visible, segment, -1))
        maps = self.recurrence.features
        if maps in ELEMENTWISE and query.shape[3] == _whole_blocks(query.shape[3]):
            form = Form(False, maps, self.interpret)
        else:
            query, key = (x.astype(jnp.float32) for x in (query, key))
            asking = maps.query(query, parameters)
            asked = maps.key(key, parameters).where(visible[..., None])
            form = Form(asked.exponent is not None, None, self.interpret)
            query, key = (
                _in_blocks(x.exponent if form.exponents else x.amplitude, form.nothing)
                for x in (asking, asked)
            )
        if form.exponents:
            given = query, key, value
            rows: Array = rescued(partial(_quick, form), _exactly, ids, given)
        else:
            rows = cast(tuple, _attend(form, ids, query, key, value))[0]
        return rows[:, :length]


def _quick(
    form: Form, ids: Ids, given: tuple[Array, Array, Array]
) -> tuple[Float[Array, "B T N V"], Bool[Array, "B T N"]]:
    """Rows, and which of them see a key but have lost all of them to rounding."""
    rows, denominator = cast(tuple, _attend(form, ids, *given))
    time = jnp.arange(rows.shape[1])
    first = jax.lax.cummax(jnp.where(starts(ids.query), time, 0), axis=1)
    latest = jax.lax.cummax(jnp.where(ids.key >= 0, time, -1), axis=1)
    small = jax.lax.stop_gradient(denominator) < LOST
    return rows, (latest >= first)[..., None] & jnp.swapaxes(small, 1, 2)


def _exactly(ids: Ids, given: tuple[Array, Array, Array]) -> Float[Array, "B T N V"]:
    """By one chunk after the other in XLA, which takes least memory."""
    key, value = given[1:]
    mask = (ids.key >= 0)[:, None, None]
    stretch = layout(Tokens(*given, mask=mask, segment_ids=ids.query))
    sizes = *key.shape[::2], key.shape[3], value.shape[3]
    empty = _BY_EXPONENTS.empty(None, sizes, jnp.float32)
    state, stretch = vary_alike((empty, stretch))
    _, rows = scan(partial(in_one, _BY_EXPONENTS), TILE, None, state, stretch)
    return heads_joined(rows, value.dtype)


def _whole_blocks(size: int) -> int:
    """So many features at least that blocks divide them."""
    block = min(BLOCK, max(SIZES[0], 1 << (size - 1).bit_length()))
    return -(-size // block) * block


def _in_blocks(x: Float[Array, "B T N M"], nothing: float) -> Array:
    missing = [(0, 0)] * 3 + [(0, _whole_blocks(x.shape[3]) - x.shape[3])]
    return jnp.pad(x, missing, constant_values=nothing)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    form: Form,
    ids: Ids,
    query: Float[Array, "B T N M"],
    key: Float[Array, "B T K M"],
    value: Float[Array, "B T K V"],
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N T"]]:
    """The output, and its denominators, which have no gradient."""
    return forward(form, query, key, value, ids, keep=False)[:2]


def _forward(
    form: Form, ids: Ids, query: Array, key: Array, value: Array
) -> tuple[tuple, tuple]:
    output, _, kept = forward(form, query, key, value, ids, keep=True)
    states, *rows = cast(Kept, kept)
    output, *rows = checkpoint_name((output, *rows), RESIDUAL)
    kept = Kept(states, *rows)
    return (output, kept.denominator), (ids, (query, key, value), kept)


def _backward(form: Form, saved: tuple, changes: tuple[Array, Array]) -> tuple:
    ids, given, kept = saved
    query, key, value = given
    found = backward(form, query, key, value, ids, kept, changes[0])
    return None, *map(of_key_heads, found, given)


_attend.defvjp(_forward, _backward)
