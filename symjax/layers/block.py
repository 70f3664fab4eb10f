"""One transformer block: attention and feed-forward, each after a norm."""

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
from symjax.layers.primitives import FEEDFORWARD, PROJECTION, Linear, dropout, keep
from symjax.layers.segments import Segments

# swiglu is silu(gate(x)) · up(x); its tanh-free activation is as cheap as ReLU on CPU.
# A gradient of gelu computes its tanh again: to keep it takes as much as its input.
ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": jax.checkpoint(jax.nn.gelu),
    "swiglu": jax.nn.silu,
}

# By the values of model.remat. What a kernel of attention gives is kept: it is about as
# small as its input, and dear to compute (not the Performer's, whose states are large).
# Of the products with weights those are kept that are marked, three of four: with all,
# a model of 1b would fill 16 GB.
POLICIES = {
    name: jax.checkpoint_policies.save_only_these_names(RESIDUAL, *kept)
    for name, kept in {
        "full": (),
        "feedforward": (FEEDFORWARD,),
        "dots": (FEEDFORWARD, PROJECTION),
    }.items()
}


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
            gate = keep(self.gate(x), FEEDFORWARD)
            return self.down(activate(gate) * self.up(x))
        return self.down(activate(keep(self.up(x), FEEDFORWARD)))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + feedforward(norm(x)).

    Args:
        options: the model's configuration.
        depth: of this block, counted from 0; differential attention starts from it.
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
        """
        Args:
            padding_mask: True for tokens that exist; the others are seen by none.
                None: all.
            segments: the documents of a row; None: it is one.
            dropout_key: None turns dropout off.
            watch: is told (the layer with the mechanism, what it is given, the padding
                mask, the output of the block), to read what happens inside.
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
        """The layers inside with a mechanism, in the order of their calls."""
        return [self.attention]

    def init_cache(self, batch: int, length: int) -> Any:
        """The decoding state before the first of at most `length` tokens."""
        return self.attention.init_cache(batch, length)

    def decode(
        self,
        x: Float[Array, "B T D"],
        cache: Any,
        position: Int[Array, "B"],
        padding_mask: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """The next T tokens of every example from its cache: (output, new cache).

        Args:
            position: how many tokens each example has read.
            padding_mask: True for tokens that exist, the others stand at the end; None:
                all.
        """
        normed = self.attention_norm(x)
        y, cache = self.attention.decode(normed, cache, position, padding_mask)
        x = x + y
        return x + self.feedforward(self.feedforward_norm(x)), cache


def run_of(remat: str, watch: Callable | None = None) -> Callable[..., Array]:
    """(block, x, padding_mask, segments, dropout_key) → output, by the value of
    model.remat."""

    def run(block: Any, x: Array, mask: Any, segments: Any, key: Any) -> Array:
        return block(x, mask, segments, dropout_key=key, watch=watch)

    return run if watch is not None else rematerialised(run, remat)


def rematerialised(run: Callable, choice: str, *, in_scan: bool = False) -> Callable:
    """`run`, of modules or arrays, in `jax.checkpoint` by the value of model.remat.

    Args:
        choice: "none" keeps everything, "dots" the input and most products with
            weights, "feedforward" the input and one product of the feed-forward, "full"
            the input alone. All keep what a kernel of attention gives.
        in_scan: the loop itself keeps the compiler from merging both computations.
    """
    if choice == "none":
        return run
    return nnx.remat(run, policy=POLICIES[choice], prevent_cse=not in_scan)
