"""The cached keys and values that score mechanisms decode with."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int


class KeyValues(NamedTuple):
    """The decoding state of score mechanisms: the keys and values seen so far."""

    key: Float[Array, "B L K H"]
    value: Float[Array, "B L K V"]


def check_room(
    room: int,
    named: str,
    position: Int[Array, "B"],
    count: int,
    padding_mask: Bool[Array, "B T"] | None = None,
) -> None:
    """Refuse tokens beyond the room there is, as far as their number is known.

    Under `jax.jit` it is known how many come, not how many came before nor which of
    them exist.

    Args:
        room, named: how many tokens fit, and the words that name it.
        position: how many tokens each example has read.
        count, padding_mask: how many come, and which of them exist; None: all.
    Raises:
        ValueError: more tokens than room, naming both.
    """
    needed = position + (count if padding_mask is None else padding_mask.sum(axis=1))
    least = count if padding_mask is None else 0
    if not isinstance(needed, Tracer):
        least = max(needed.tolist(), default=0)
    if least > room:
        raise ValueError(f"{least} tokens do not fit {named}")


def write(
    cache: Float[Array, "B L *rest"],
    new: Float[Array, "B T *rest"],
    positions: Int[Array, "B T"],
) -> Float[Array, "B L *rest"]:
    """`new` at each example's own positions; those beyond the end are dropped.

    A piece may be filled up with tokens that do not exist, and they need no room.
    """
    examples = jnp.arange(cache.shape[0])[:, None]
    return cache.at[examples, positions].set(new.astype(cache.dtype), mode="drop")
