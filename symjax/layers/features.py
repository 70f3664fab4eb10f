"""Feature maps with weights of their own, one for every head."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from symjax import attention


class Hedgehog(nnx.Module):
    """softmax([Wx, −Wx]) with W of every head, the identity at first: 2H features.

    Source: Zhang et al. 2024, arXiv:2402.04347.
    """

    def __init__(self, heads: int, head_size: int):
        self.size = 2 * head_size
        eye = jnp.eye(head_size)[None]
        self.weight = nnx.Param(jnp.broadcast_to(eye, (heads, head_size, head_size)))

    def __call__(self, x: Float[Array, "B T N H"]) -> Float[Array, "B T N M"]:
        return attention.hedgehog(x, self.weight[...])


class T2R(nnx.Module):
    """relu(Wx + b) with W and b of every head.

    Source: Kasai et al. 2021, arXiv:2103.13076.
    """

    def __init__(self, heads: int, head_size: int, features: int, *, rngs: nnx.Rngs):
        self.size = features
        draw = nnx.initializers.normal(head_size**-0.5)
        self.weight = nnx.Param(draw(rngs.params(), (heads, head_size, features)))
        self.bias = nnx.Param(jnp.zeros((heads, features)))

    def __call__(self, x: Float[Array, "B T N H"]) -> Float[Array, "B T N M"]:
        return attention.t2r(x, self.weight[...], self.bias[...])


def feature_map(
    name: str, heads: int, head_size: int, features: int, *, rngs: nnx.Rngs
) -> Hedgehog | T2R:
    if name == "hedgehog":
        return Hedgehog(heads, head_size)
    return T2R(heads, head_size, features, rngs=rngs)
