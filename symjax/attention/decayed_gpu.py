"""Causal linear attention with decays on kernels for NVIDIA GPUs."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from symjax.attention.chunks import Tokens
from symjax.attention.decayed_fused import log_decay_of, seen_decays
from symjax.attention.kernels import gpu_channels, gpu_heads
from symjax.attention.kernels.blocks import RESIDUAL
from symjax.attention.kernels.gpu_chunks import CHUNK

SIZES = 16, 32, 64, 128  # of heads and values


class GpuDecay(NamedTuple):
    """The kernels, as a `Kernel` of the engine, of bfloat16: they keep states in it,
    and their sums of log-decays have its digits. The log-decay is what all tokens
    share, or the operand of each.

    On an H200, 4 rows of 4096 tokens, 16 heads of 128, forward and backward: 2.8 ms
    with a decay a channel and 1.0 with one a head; XLA takes 24 and 2.4.
    """

    interpret: Any = False

    platform = "cuda"

    def serves(self, tokens: Tokens, parameters: Array | None) -> bool:
        _, key, value = tokens[:3]
        narrow = all(x.dtype == jnp.bfloat16 for x in tokens[:3])
        return narrow and key.shape[3] in SIZES and value.shape[3] in SIZES

    def attend(
        self, tokens: Tokens, parameters: Array | None = None
    ) -> Float[Array, "B T N V"]:
        given = seen_decays(tokens, log_decay_of(tokens.operands, parameters), None)
        length = tokens.query.shape[1]
        filled = [_filled(x, -length % CHUNK) for x in given[:4]]
        output: Array = _attend(self.interpret, *filled)
        return output[:, :length]


def _filled(x: Array, more: int) -> Array:
    """With zeros for tokens at the end: they add nothing, and do not decay."""
    return jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    interpret: Any,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    log_decay: Float[Array, "B T K *H"],
) -> Float[Array, "B T N V"]:
    return _forward(interpret, query, key, value, log_decay)[0]


def _form(log_decay: Float[Array, "B T K *H"]) -> Any:
    return gpu_heads if log_decay.ndim == 3 else gpu_channels


def _forward(
    interpret: Any, query: Array, key: Array, value: Array, log_decay: Array
) -> tuple[Array, tuple]:
    given = query, key, value, log_decay
    found = _form(log_decay).forward(interpret, *given)
    output, *kept = checkpoint_name(found, RESIDUAL)
    return output, (given, kept)


def _backward(
    interpret: Any, saved: tuple, change: Float[Array, "B T N V"]
) -> tuple[Array, ...]:
    given, kept = saved
    found = _form(given[3]).backward(interpret, given, kept, change)

    def of_key_heads(x: Array, like: Array) -> Array:
        apart = x.reshape(*like.shape[:3], -1, *like.shape[3:])
        return apart.sum(axis=3).astype(like.dtype)

    return tuple(map(of_key_heads, found, given))


_attend.defvjp(_forward, _backward)
