"""Rotary positions as the configuration of a model chooses them."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from symjax import attention, config


@dataclass(frozen=True)
class Rotary:
    """Turns queries and keys [B T N H] by their positions [B T], or leaves them."""

    turns: bool
    base: float
    interleaved: bool
    share: float

    def __call__(
        self, x: Float[Array, "B T N H"], positions: Int[Array, "#B T"]
    ) -> Float[Array, "B T N H"]:
        if not self.turns:
            return x
        return attention.rotate(
            x, positions, self.base, interleaved=self.interleaved, share=self.share
        )


def rotary(options: config.Model, head_size: int) -> Rotary:
    """Raises: ValueError: heads of this size cannot be turned as the model asks."""
    interleaved = options.positions == "rope_interleaved"
    turns = interleaved or options.positions == "rope"
    made = Rotary(turns, options.rope_base, interleaved, options.rope_share)
    like = jax.ShapeDtypeStruct((1, 1, 1, head_size), jnp.float32)
    try:
        jax.eval_shape(made, like, jax.ShapeDtypeStruct((1, 1), jnp.int32))
    except ValueError as error:
        raise ValueError(
            f"model.positions {options.positions!r}: {error}: give an even "
            "model.head_size"
        ) from None
    return made
