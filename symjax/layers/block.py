"""Transformer block: attention and feed-forward, each after a norm."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from symjax import config
from symjax.attention.kernels.operands import RESIDUAL
from symjax.layers.attention import Attention
from symjax.layers.norms import norm
from symjax.layers.primitives import (
    FEEDFORWARD,
    PROJECTION,
    Linear,
    dropout,
    features_last,
    keep_for_backward,
)
from symjax.layers.segments import Segments

# For swiglu the table has the activation of the gate. The gradient of gelu computes
# tanh again, since a saved tanh would take as much memory as the input.
ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": jax.checkpoint(jax.nn.gelu),
    "swiglu": jax.nn.silu,
}

# Value of model.remat → results that are saved for the backward pass, by their names.
# Most attention kernels give the name RESIDUAL to their results. Results without this
# name are computed again in the backward pass: those of cuDNN, of jax-linear-attention
# and of the TPU kernels of feature maps, and the states of the GPU kernels of feature
# maps.
# "dots" saves only two kinds of products with weights. All kinds would fill the 16 GB
# of a TPU v5e in a model of 1b parameters.
POLICIES = {
    name: jax.checkpoint_policies.save_only_these_names(RESIDUAL, *kept)
    for name, kept in {
        "full": (),
        "feedforward": (FEEDFORWARD,),
        "dots": (FEEDFORWARD, PROJECTION),
    }.items()
}


class FeedForward(nnx.Module):
    """down(activation(up(x))), or down(silu(gate(x)) · up(x)) for swiglu.

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
            gate = keep_for_backward(self.gate(x), FEEDFORWARD)
            hidden = activate(gate) * self.up(x)
        else:
            hidden = activate(keep_for_backward(self.up(x), FEEDFORWARD))
        return self.down(features_last(hidden))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + feedforward(norm(x)).

    Args:
        options: the model's configuration.
        depth: number of this block, from 0. The mechanism (model.pattern), λ_init and
            some decays depend on it.
    """

    def __init__(self, options: config.Model, depth: int, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(options.dtype)
        shared = {"bias": options.bias, "dtype": dtype, "rngs": rngs}
        normed = {**shared, "epsilon": options.norm_eps}
        self.attention_norm = norm(options.norm, options.width, **normed)
        self.attention = Attention(options, depth, rngs=rngs)
        self.feedforward_norm = norm(options.norm, options.width, **normed)
        self.feedforward = FeedForward(
            options.width,
            options.feedforward or 4 * options.width,
            activation=options.activation,
            **shared,
        )
        self.dropout = options.dropout

    def __call__(
        self,
        x: Float[Array, "B T D"],
        padding_mask: Bool[Array, "B T"] | None = None,
        segments: Segments | None = None,
        *,
        dropout_key: Array | None = None,
        watch: Callable | None = None,
    ) -> Float[Array, "B T D"]:
        """Return the output of the block.

        Args:
            padding_mask: True for tokens, False for padding, which no token sees. By
                default there is no padding.
            segments: the documents of a row. By default the row is one document.
            dropout_key: None turns dropout off.
            watch: function that is called with (the attention layer, its input, the
                padding mask, the output of the block), to read values inside a model.
        """
        keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        normed = self.attention_norm(x)
        y = self.attention(normed, padding_mask, segments)
        x = x + dropout(y, self.dropout, keys[0])
        y = self.feedforward(self.feedforward_norm(x))
        x = x + dropout(y, self.dropout, keys[1])
        if watch is not None:
            watch(self.attention, normed, padding_mask, x)
        return x

    @property
    def attentions(self) -> list[Attention]:
        """Return the attention layers of the block, in the order of their calls."""
        return [self.attention]

    def init_cache(self, batch: int, length: int) -> Any:
        """Return the decoding state before the first of at most `length` tokens."""
        return self.attention.init_cache(batch, length)

    def decode(
        self,
        x: Float[Array, "B T D"],
        cache: Any,
        position: Int[Array, "B"],
        padding_mask: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Read the next T tokens of each example; return (output, new cache).

        Args:
            position: number of tokens that each example has read.
            padding_mask: True for tokens, False for padding, which comes after them in
                the row (`generate` moves it there). By default there is no padding.
        """
        normed = self.attention_norm(x)
        y, cache = self.attention.decode(normed, cache, position, padding_mask)
        x = x + y
        return x + self.feedforward(self.feedforward_norm(x)), cache


def run_of(remat: str, watch: Callable | None = None) -> Callable[..., Array]:
    """Return a function that runs a block with the rematerialisation of model.remat.

    Its arguments are (block, x, padding_mask, segments, dropout_key). With `watch`
    nothing is recomputed.
    """

    def run(block: Any, x: Array, mask: Any, segments: Any, key: Any) -> Array:
        return block(x, mask, segments, dropout_key=key, watch=watch)

    return run if watch is not None else rematerialised(run, remat)


def rematerialised(run: Callable, choice: str, *, in_scan: bool = False) -> Callable:
    """Wrap `run`, a function of modules or arrays, in `jax.checkpoint`.

    Args:
        choice: the value of model.remat. "none" keeps everything, "dots" the input and
            most products with weights, "feedforward" the input and one product of the
            feed-forward, "full" the input alone. All also keep the results of most
            attention kernels (`POLICIES`).
        in_scan: `run` is the body of a loop, which already keeps the compiler from
            merging the recomputation with the forward pass.
    """
    if choice == "none":
        return run
    return nnx.remat(run, policy=POLICIES[choice], prevent_cse=not in_scan)
