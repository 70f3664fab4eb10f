"""LayerNorm and RMSNorm of Flax NNX, whose backward pass keeps one array like x.

    def layer_norm(x, scale, bias):          # RMSNorm: no mean, no bias
        distance = x - x.mean()
        return distance / np.sqrt(np.square(distance).mean() + epsilon) * scale + bias

Sources: Ba et al. 2016, arXiv:1607.06450; Zhang and Sennrich 2019, arXiv:1910.07467.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from symjax.attention.core.meshes import sharded_like_first
from symjax.attention.kernels.dispatch import run_heads
from symjax.layers.sharded import Operand, heads_per_device

EPSILON = 1e-5


class LayerNorm(nnx.LayerNorm):
    """`nnx.LayerNorm` whose backward pass keeps one array of the size of x."""

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        arrays = (x, _value(self.scale), _value(self.bias))
        arrays = self.promote_dtype(arrays, dtype=self.dtype)
        return _normalised(True, self.epsilon, *arrays).astype(arrays[0].dtype)


class RMSNorm(nnx.RMSNorm):
    """`nnx.RMSNorm` whose backward pass keeps one array of the size of x."""

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        arrays = self.promote_dtype((x, _value(self.scale)), dtype=self.dtype)
        return _normalised(False, self.epsilon, *arrays, None).astype(arrays[0].dtype)


class HeadNorm(RMSNorm):
    """RMSNorm over each head.

    On a TPU a kernel computes it (`symjax.attention.kernels.tpu.heads`) if the number
    of tokens and the head size are multiples of 128. The kernel has neither a
    forward-mode derivative (`jax.jvp`) nor a second derivative.
    """

    def __call__(
        self, x: Float[Array, "B T N H"], factor: Any = 1.0
    ) -> Float[Array, "B T N H"]:
        """Return each head, normalised, times a factor."""
        arrays: Any = x, _value(self.scale)
        x, scale = self.promote_dtype(arrays, dtype=self.dtype)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        scale = Operand(scale.astype(wide) * factor, "")
        return heads_per_device(self._normed, x, scale=scale)

    def _normed(self, x: Array, scale: Array) -> Float[Array, "B T N H"]:
        def normed(x: Array, scale: Array) -> Array:
            return _normalised(False, self.epsilon, x, scale, None).astype(x.dtype)

        return run_heads("norm", self.epsilon, normed, x, scale)


def _value(parameter: nnx.Param | None) -> Array | None:
    return None if parameter is None else parameter[...]


def norm(
    kind: str,
    features: int,
    *,
    bias: bool = True,
    epsilon: float = EPSILON,
    dtype=jnp.float32,
    rngs: nnx.Rngs,
) -> LayerNorm | RMSNorm:
    """Return a LayerNorm or an RMSNorm, with statistics in float32.

    Args:
        kind: "layernorm" or "rmsnorm".
        bias: of a LayerNorm; an RMSNorm has none.
        epsilon: added to the variance, inside the root.
    Raises:
        ValueError: the kind is unknown.
    """
    shared = {"epsilon": epsilon, "dtype": dtype, "rngs": rngs}
    if kind == "layernorm":
        return LayerNorm(features, use_bias=bias, **shared)
    if kind == "rmsnorm":
        return RMSNorm(features, **shared)
    raise ValueError(f"norm {kind!r} is unknown: choose from layernorm, rmsnorm")


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _normalised(
    centred: bool, epsilon: float, x: Array, scale: Array, bias: Array | None
) -> Float[Array, "*B D"]:
    """Return x / deviation · scale + bias, with x − mean in place of x if `centred`."""
    distance, inverse = _statistics(centred, epsilon, x)
    output = distance * (inverse * _row(scale, x))
    return output if bias is None else output + _row(bias, x)


@_normalised.defjvp
def _normalised_tangent(
    centred: bool, epsilon: float, primals: tuple, tangents: tuple
) -> tuple[Array, Array]:
    """Return value and tangent: du = (dx − mean(dx) − u mean(u dx)) / deviation.

    u is (x − mean) / deviation. An RMSNorm has no mean in either formula.
    """
    (x, scale, _), (change, scale_change, bias_change) = primals, tangents
    distance, inverse = _statistics(centred, epsilon, x)
    unit = distance * inverse
    change = change.astype(unit.dtype)
    turned = _orthogonal_part(change, unit)
    if centred:
        turned -= change.mean(axis=-1, keepdims=True)
    tangent = turned * inverse * _row(scale, x) + unit * _row(scale_change, x)
    if bias_change is not None:
        tangent += _row(bias_change, x)
    return _normalised(centred, epsilon, *primals), tangent


@sharded_like_first
def _orthogonal_part(
    change: Float[Array, "*B D"], unit: Float[Array, "*B D"]
) -> Float[Array, "*B D"]:
    """Return the change without its component along `unit` (of mean square 1)."""
    # By einsum: XLA's CPU compiler sums broadcast products slowly.
    product = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    along = product("...d,...d->...", unit, change) / unit.shape[-1]
    return change - product("...,...d->...d", along, unit)


def _row(vector: Float[Array, " D"], like: Array) -> Float[Array, "... D"]:
    """Return the vector with as many axes as `like`."""
    return jnp.expand_dims(vector, range(like.ndim - 1))


def _statistics(centred: bool, epsilon: float, x: Array) -> tuple[Array, Array]:
    """Return x (minus its mean if `centred`) and 1/deviation, in float32 at least."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = wide.mean(axis=-1, keepdims=True) if centred else 0.0
    square = jnp.square(wide).mean(axis=-1, keepdims=True)
    variance = jnp.maximum(0.0, square - jnp.square(mean))
    return wide - mean, jax.lax.rsqrt(variance + epsilon)
