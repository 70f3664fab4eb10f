"""Gated attention unit: one block in place of attention and feed-forward."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from symjax import config
from symjax.layers.mixer import mixer_of
from symjax.layers.norms import norm
from symjax.layers.primitives import Linear, dropout, keep_for_backward, rotary
from symjax.layers.segments import Segments, positions_of, row_operands
from symjax.layers.sharded import Operand

RULES = (("roles/*", P(None)),)


class Role(nnx.Module):
    """Query or key made from the shared vector z: scale · z + bias."""

    def __init__(self, size: int, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        draw = nnx.initializers.normal(0.02)
        self.dtype = dtype
        # Other implementations start with scales near 0. Near 1, the held-out loss of
        # configs/gau.py:tiny after 300 training steps is 1.98 instead of 2.16.
        self.scale = nnx.Param(1 + draw(rngs.params(), (size,)))
        self.bias = nnx.Param(jnp.zeros((size,)))

    def __call__(self, z: Float[Array, "B T s"]) -> Float[Array, "B T s"]:
        scale, bias = (x[...].astype(self.dtype) for x in (self.scale, self.bias))
        return z * scale[None, None] + bias[None, None]


class GatedBlock(nnx.Module):
    """x + W_o(u ⊙ A v), with u = silu(W_u y), v = silu(W_v y) and y = norm(x).

    A is relu² attention with one head, whatever model.heads says. Query and key are
    made from one vector z = silu(W_z y), each with its own scale and bias (`Role`). u
    and v have twice the width. So two such blocks cost about as much as one of
    attention and feed-forward.

    gau    attention to all tokens; weights are divided by model.length in a decoder,
           and by the number of visible tokens in an encoder
    flash  attention in groups of chunk_size tokens, plus linear attention across groups
           with a second query and key; all weights are divided by the size of a group

    Args:
        options: the model's configuration. z has model.head_size features, by default
            half the width and at most 128.
        depth: depth of this block, counted from 0.
    Raises:
        ValueError: a key is set that the block does not have, naming it.
    Source: Hua et al. 2022, arXiv:2202.10447.
    """

    symmetric = "none"

    def __init__(self, options: config.Model, depth: int, *, rngs: nnx.Rngs):
        self.mixer = mixer_of(options, depth)
        size, hidden = self.mixer.sizes.head_size, self.mixer.sizes.value_size
        self.rotate = rotary(options, size)
        layer = {"dtype": self.mixer.dtype, "rngs": rngs}
        normed = {**layer, "bias": options.bias, "epsilon": options.norm_eps}
        self.norm = norm(options.norm, options.width, **normed)

        def linear(inputs: int, outputs: int) -> Linear:
            return Linear(inputs, outputs, use_bias=options.bias, **layer)

        self.gate = linear(options.width, hidden)
        self.value = linear(options.width, hidden)
        self.shared = linear(options.width, size)
        roles = ("query", "key", *self.mixer.entry.required)
        self.roles = nnx.Dict({role: Role(size, **layer) for role in roles})
        self.out = linear(hidden, options.width)
        self.dropout = options.dropout

    @property
    def attentions(self) -> list[Any]:
        """Return the layers with a mechanism: the block itself."""
        return [self]

    def __call__(
        self,
        x: Float[Array, "B T D"],
        padding_mask: Bool[Array, "B T"] | None = None,
        segments: Segments | None = None,
        *,
        dropout_key: Array | None = None,
        watch: Callable | None = None,
    ) -> Float[Array, "B T D"]:
        """Return the output of the block; the arguments are those of `Block`."""
        y, positions = self.norm(x), positions_of(x, segments)
        lengths = self.rotate.lengths(positions, padding_mask, segments)
        operands = self.operands(y, positions, lengths=lengths)
        operands |= row_operands(padding_mask, segments)
        mixed = self._output(y, self.mixer(operands))
        hidden = x + dropout(mixed, self.dropout, dropout_key)
        if watch is not None:
            watch(self, y, padding_mask, hidden)
        return hidden

    def init_cache(self, batch: int, length: int) -> Any:
        """Return the decoding state before the first of at most `length` tokens."""
        return self.mixer.init_cache(batch, length)

    def decode(
        self,
        x: Float[Array, "B T D"],
        cache: Any,
        position: Int[Array, "B"],
        padding_mask: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Read the next T tokens of each example; return (output, new cache).

        The arguments are those of `Mixer.decode`.
        """
        y, positions = self.norm(x), position[:, None] + jnp.arange(x.shape[1])[None]
        lengths = self.rotate.lengths(positions, padding_mask)
        operands = self.operands(y, positions, lengths=lengths)
        mixed, cache = self.mixer.decode(operands, cache, position, padding_mask)
        return x + self._output(y, mixed), cache

    def operands(
        self,
        y: Float[Array, "B T D"],
        positions: Int[Array, "#B T"],
        *,
        lengths: Int[Array, "#B #T"] | None = None,
    ) -> dict[str, Operand]:
        """Return the operands of the mechanism, each with its sharding.

        Args:
            lengths: as in `Attention.project`.
        """
        if lengths is None:
            lengths = self.rotate.lengths(positions)
        z = jax.nn.silu(keep_for_backward(self.shared(y)))
        operands = {
            role: Operand(self.rotate(make(z)[:, :, None], positions, lengths), "BSK")
            for role, make in self.roles.items()
        }
        value = jax.nn.silu(keep_for_backward(self.value(y)))[:, :, None]
        return operands | {"value": Operand(value, "BSK")}

    def project(
        self,
        y: Float[Array, "B T D"],
        positions: Int[Array, "#B T"],
        *,
        lengths: Int[Array, "#B #T"] | None = None,
    ) -> tuple[Array, Array, Array]:
        """Return query, key and value; positions rotate query and key."""
        operands = self.operands(y, positions, lengths=lengths)
        return tuple(operands[name].array for name in ("query", "key", "value"))

    def _output(self, y: Array, mixed: Float[Array, "B T 1 E"]) -> Array:
        return self.out(jax.nn.silu(keep_for_backward(self.gate(y))) * mixed[:, :, 0])
