"""Causal cosine attention on NVIDIA GPUs' kernels."""

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from symjax.attention.chunks import Tokens
from symjax.attention.kernels.blocks import RESIDUAL
from symjax.attention.kernels.cosine import EPSILON
from symjax.attention.kernels.gpu_chunks import SIZES, of_key_heads
from symjax.attention.kernels.gpu_cosine import Given, Kept, forward
from symjax.attention.kernels.gpu_cosine_gradients import backward
from symjax.attention.kernels.gpu_normalised import Ids, in_blocks


class GpuCosine(NamedTuple):
    """The kernels, as a `Kernel` of the engine, of bfloat16."""

    interpret: Any = False

    platform = "cuda"

    def serves(self, tokens: Tokens, parameters: None) -> bool:
        narrow = all(x.dtype == jnp.bfloat16 for x in tokens[:3])
        return narrow and tokens.value.shape[3] in SIZES

    def attend(
        self, tokens: Tokens, parameters: None = None
    ) -> Float[Array, "B T N V"]:
        *given, ids = Ids.of(tokens)
        query, key = (in_blocks(x, 0) for x in given[:2])
        rows: Array = _attend(self.interpret, ids, query, key, given[2])
        return rows[:, : tokens.query.shape[1]]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    interpret: Any,
    ids: Ids,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
) -> Float[Array, "B T N V"]:
    given = _given(ids, query, key, value)
    return forward(given, keep=False, interpret=interpret)[0]


def _forward(
    interpret: Any, ids: Ids, query: Array, key: Array, value: Array
) -> tuple[Array, tuple]:
    given = _given(ids, query, key, value)
    output, kept = forward(given, keep=True, interpret=interpret)
    states, *rows = cast(Kept, kept)
    output, *rows = checkpoint_name((output, *rows), RESIDUAL)
    return output, (given, Kept(states, *rows))


def _backward(interpret: Any, saved: tuple, change: Array) -> tuple:
    given, kept = saved
    query, key, value = given[:3]
    found = backward(given, kept, change, interpret=interpret)
    of_query, of_key, of_value, by_row, by_key = found
    of_key = of_key_heads(of_key, key.astype(jnp.float32))
    by_key = by_key.reshape(*given.asked.shape[:2], -1, by_key.shape[2]).sum(axis=2)
    return (
        None,
        _from_direction(query, given.asking, of_query, by_row),
        _from_direction(key, given.asked, of_key, by_key),
        of_key_heads(of_value, value),
    )


_attend.defvjp(_forward, _backward)


def _given(ids: Ids, query: Array, key: Array, value: Array) -> Given:
    return Given(query, key, value, _lengths(query), _lengths(key), ids)


def _lengths(x: Float[Array, "B T N H"]) -> Float[Array, "B N T"]:
    squares = jnp.square(x.astype(jnp.float32)).sum(axis=3)
    return jnp.swapaxes(jnp.sqrt(squares), 1, 2)


def _from_direction(
    x: Float[Array, "B T N H"],
    length: Float[Array, "B N T"],
    change: Float[Array, "B T N H"],
    weight: Float[Array, "B N T"],
) -> Float[Array, "B T N H"]:
    """The gradient of x by that of x̂, in which `weight` x̂ is too much."""
    length, weight = (jnp.swapaxes(a, 1, 2)[..., None] for a in (length, weight))
    whole = length + EPSILON
    unit = x.astype(jnp.float32) / whole
    along = (unit * change).sum(axis=3, keepdims=True)
    along *= jnp.where(
        length > 0, 1 + EPSILON / jnp.where(length > 0, length, 1.0), 0.0
    )
    found = (change - unit * (along + weight * (EPSILON / whole))) / whole
    return found.astype(x.dtype)
