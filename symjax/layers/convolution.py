"""Short causal convolution over queries, keys or values, with its decoding state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from symjax.layers.segments import Segments

RULES = (("attention/*_convolution/kernel", P(None, "tensor")),)


class Convolved(NamedTuple):
    """Decoding state of a layer with convolutions."""

    cache: Any  # state of the mechanism
    inputs: dict[str, Float[Array, "B I C"]]  # last I = size − 1 of each convolution


class ShortConvolution(nnx.Module):
    """silu(Σ_i kernel[i] x[t − size + 1 + i]), separately for each channel.

    Source: Fu et al. 2022, arXiv:2212.14052; Yang et al. 2024, arXiv:2406.06484.
    """

    def __init__(self, size: int, channels: int, *, dtype: Any, rngs: nnx.Rngs):
        self.dtype = dtype
        bound = size**-0.5
        shape, span = (size, channels), {"minval": -bound, "maxval": bound}
        self.kernel = nnx.Param(jax.random.uniform(rngs.params(), shape, **span))

    def init_cache(self, batch: int) -> Float[Array, "B I C"]:
        """Return the inputs before the first token: zeros."""
        size, channels = self.kernel.shape
        return jnp.zeros((batch, size - 1, channels), self.dtype)

    def __call__(
        self,
        x: Float[Array, "B T C"],
        inputs: Float[Array, "B I C"] | None = None,
        padding_mask: Bool[Array, "B T"] | None = None,
        *,
        segments: Segments | None = None,
    ) -> tuple[Float[Array, "B T C"], Float[Array, "B I C"]]:
        """Return the output, and the last inputs, which the next tokens need.

        Args:
            inputs: the last inputs before x. By default zeros.
            padding_mask: True for tokens, False for padding, which comes after them in
                the row. By default there is no padding.
            segments: documents; a token's convolution reads zeros in place of tokens of
                other documents. By default the row is one document.
        """
        kernel, time = self.kernel[...].astype(self.dtype), x.shape[1]
        before = self.init_cache(x.shape[0]) if inputs is None else inputs
        extended = jnp.concatenate([before.astype(x.dtype), x], axis=1)

        def shifted(tap: int) -> Float[Array, "B T C"]:
            inputs, back = extended[:, tap : tap + time], len(kernel) - 1 - tap
            if segments is None:
                return inputs
            return jnp.where((segments.positions >= back)[..., None], inputs, 0)

        mixed = sum(row * shifted(i) for i, row in enumerate(kernel[:, None, None]))
        if padding_mask is None:
            last = extended[:, time:]
        else:
            columns = jnp.arange(before.shape[1])[None]
            columns = padding_mask.sum(axis=1)[:, None] + columns
            last = jnp.take_along_axis(extended, columns[..., None], axis=1)
        return jax.nn.silu(mixed), last
