"""The feed-forward half of a block."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from symjax.layers.linear import Linear

# swiglu is silu(gate(x)) · up(x); its tanh-free activation is as cheap as ReLU on CPU.
ACTIVATIONS = {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "swiglu": jax.nn.silu}


class FeedForward(nnx.Module):
    """down(activation(up(x))), or with a gate down(silu(gate(x)) · up(x)).

    Raises:
        ValueError: the activation is unknown.
    Source: Shazeer 2020, arXiv:2002.05202 (SwiGLU).
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: str = "relu",
        bias: bool = True,
        dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"activation {activation!r} is unknown: choose from "
                f"{', '.join(ACTIVATIONS)}"
            )
        self.activation = activation
        self.up = Linear(width, hidden, use_bias=bias, dtype=dtype, rngs=rngs)
        if activation == "swiglu":
            self.gate = Linear(width, hidden, use_bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear(hidden, width, use_bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        activate = ACTIVATIONS[self.activation]
        if self.activation == "swiglu":
            return self.down(activate(self.gate(x)) * self.up(x))
        return self.down(activate(self.up(x)))
