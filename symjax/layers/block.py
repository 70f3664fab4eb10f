"""One transformer block: attention and feed-forward, each after a norm."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from symjax import config
from symjax.layers.attention import Attention
from symjax.layers.feedforward import FeedForward
from symjax.layers.norms import norm


class Block(nnx.Module):
    """x + attention(norm(x)), then x + feedforward(norm(x)).

    Args:
        options: the model's configuration.
        depth: of this block, counted from 0; differential attention starts from it.
    """

    def __init__(self, options: config.Model, depth: int, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(options.dtype)
        shared = {"bias": options.bias, "dtype": dtype, "rngs": rngs}
        self.attention_norm = norm(options.norm, options.width, **shared)
        self.attention = Attention(options, depth, rngs=rngs)
        self.feedforward_norm = norm(options.norm, options.width, **shared)
        self.feedforward = FeedForward(
            options.width,
            options.feedforward or 4 * options.width,
            activation=options.activation,
            **shared,
        )
        self.dropout = nnx.Dropout(options.dropout)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        present: Bool[Array, "B T"] | None = None,
        *,
        dropout_key: Array | None = None,
    ) -> Float[Array, "B T D"]:
        """
        Args:
            present: the tokens that exist, the others are seen by none; None: all.
            dropout_key: None turns dropout off.
        """
        attention_key, feedforward_key = _two(dropout_key)
        y = self.attention(self.attention_norm(x), present)
        x = self._add(x, y, attention_key)
        y = self.feedforward(self.feedforward_norm(x))
        return self._add(x, y, feedforward_key)

    def calibrate(self, x: Float[Array, "B T D"]) -> None:
        """As `Attention.calibrate`, from a sample of inputs of the block."""
        self.attention.calibrate(self.attention_norm(x))

    def empty(self, batch: int, length: int) -> Any:
        """The decoding state before the first of at most `length` tokens."""
        return self.attention.empty(batch, length)

    def extend(
        self,
        x: Float[Array, "B T D"],
        state: Any,
        position: Int[Array, "B"],
        present: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """The next T tokens of every example from its state: (output, new state).

        Args:
            position: how many tokens each example has read.
            present: the tokens that exist, the others stand at the end; None: all.
        """
        normed = self.attention_norm(x)
        y, state = self.attention.extend(normed, state, position, present)
        x = x + y
        return x + self.feedforward(self.feedforward_norm(x)), state

    def _add(self, x: Array, y: Array, key: Array | None) -> Array:
        return x + self.dropout(y, deterministic=key is None, rngs=key)


def _two(key: Array | None) -> tuple[Array | None, Array | None]:
    return (None, None) if key is None else tuple(jax.random.split(key))
