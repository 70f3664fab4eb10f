"""Differential attention of one pass over keys, forward and backward, on Hopper GPUs.

Compared on an H200, B 4, T 4096, 16 heads of halves of 64 and values of 128, causal,
bfloat16, forward and backward: these kernels take 2.75 ms; cuDNN, which computes two
whole attentions, 4.26 in one call and 5.46 in two; PyTorch's SDPA by cuDNN in four
calls 6.55. Softmax with 16 heads of 128 takes 2.16 by cuDNN.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from symjax.attention.kernels.blocks import RESIDUAL
from symjax.attention.kernels.hopper_backward import backward
from symjax.attention.kernels.hopper_forward import forward
from symjax.attention.kernels.intervals import Seen


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def differential(
    static: tuple[Any, float, bool],
    query: Float[Array, "B T 2N 64"],
    key: Float[Array, "B S 2K 64"],
    value: Float[Array, "B S K 128"],
    lam: Float[Array, "B N T"],
    seen: Seen | None,
) -> Float[Array, "B T N 128"]:
    """softmax(q₁ k₁ᵀ) v − λ softmax(q₂ k₂ᵀ) v of heads side by side.

    Blocks of keys that no row of a block sees cost nothing.

    Gradients of queries are added up in the order in which programs come to them.

    Args:
        static: whether to interpret, the scale of scores, whether a row sees no later
            (the last one sees all, and S − T is a multiple of 64).
        seen: which keys each row sees, in place of that; one at least.
    """
    return _forward(static, query, key, value, lam, seen)[0]


def _forward(static: tuple, *given: Any) -> tuple[Array, tuple]:
    interpret, scale, causal = static
    found = forward(interpret, *given, scale=scale, causal=causal)
    output, second, normaliser = checkpoint_name(found, RESIDUAL)
    return output, (given, output, second, normaliser)


def _backward(static: tuple, saved: tuple, change: Array) -> tuple[Array | None, ...]:
    interpret, scale, causal = static
    (query, key, value, lam, seen), output, second, normaliser = saved
    # Read more than once, and so as bfloat16, and not as what it was rounded from.
    change = jax.lax.optimization_barrier(change)

    def by_rows(found: Array) -> Float[Array, "B N T"]:
        """Σ change · output of each row."""
        products = change.astype(jnp.float32) * found.astype(jnp.float32)
        return jnp.swapaxes(products.sum(axis=3), 1, 2)

    # Else its sum, the gradient of one λ for all rows, would read both arrays again.
    of_second = jax.lax.optimization_barrier(by_rows(second))
    of_first = by_rows(output) + lam * of_second
    deltas = jnp.stack([of_first, of_second], axis=2).reshape(normaliser.shape)
    given = query, key, value, lam, normaliser, deltas, change, seen
    gradients = backward(interpret, *given, scale=scale, causal=causal)
    return *gradients, -of_second, None


differential.defvjp(_forward, _backward)
